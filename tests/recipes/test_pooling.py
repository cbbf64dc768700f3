"""`glue.py --pooling`: what is read of a record, whatever stands beside it, and a saved model that others can load."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BertModel, GPT2Model

from hf_dpopt import DPConfigError
from recipes.classifiers import FEATURE_NORM, PooledConfig, PooledForSequenceClassification, pool
from recipes.glue import ModelArguments
from recipes.glue_model import load_pooled, save_merged
from tests.helpers import tiny

STATES_BTD = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]])
MASK_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    "way, expected",
    [("mean", [[2.0, 3.0], [7.0, 8.0]]), ("cls", [[1.0, 2.0], [5.0, 6.0]]), ("last", [[3.0, 4.0], [9.0, 10.0]])],
)
def test_padding_is_not_read_on_either_side(way, expected):
    assert pool(STATES_BTD, MASK_BT, way).tolist() == expected
    assert pool(STATES_BTD.flip(1), MASK_BT.flip(1), {"cls": "last", "last": "cls"}.get(way, way)).tolist() == expected


ENCODERS = {"bert": (BertModel, {"num_hidden_layers": 2}), "gpt2": (GPT2Model, {"n_layer": 2})}


def pooled(kind="bert", pooling=("mean",), layers=(-1,)):
    encoder, changes = ENCODERS[kind]
    body = tiny.made(encoder, **changes)
    config = PooledConfig(body.config, pooling, layers, num_labels=3)
    return PooledForSequenceClassification(config, body).eval()


IDS_BT = torch.tensor([[4, 5, 0, 0], [6, 7, 8, 9]])
TEXT_BT = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("pooling, layers", [(("mean",), (-1,)), (("cls", "mean", "last"), (0, 1, 2))])
def test_features_are_those_of_the_record_alone(kind, pooling, layers):
    model = pooled(kind, pooling, layers)
    together = model.features(IDS_BT, TEXT_BT)
    alone = model.features(IDS_BT[:1, :2], TEXT_BT[:1, :2])
    torch.testing.assert_close(together[:1], alone)
    assert together.shape == (2, 16 * len(pooling) * len(layers))
    parts = together.view(2, -1, 16)
    expected = torch.full(parts.shape[:2], FEATURE_NORM / parts.size(1) ** 0.5)
    torch.testing.assert_close(parts.norm(dim=-1), expected, rtol=0.05, atol=0)  # less where states are near 0


def test_what_was_saved_loads_without_this_repository(tmp_path):
    model = pooled(pooling=("mean", "cls"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "classifiers.py").exists()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    torch.testing.assert_close(loaded(IDS_BT, TEXT_BT).logits, model(IDS_BT, TEXT_BT).logits)


@pytest.fixture
def saved(tmp_path):
    """Folder of a pooled model that reads the mean of the last layer, and its configuration."""
    model = pooled()
    model.save_pretrained(tmp_path)
    return tmp_path, model


def load(folder, **flags):
    model_args = ModelArguments(model_name_or_path=str(folder), **flags)
    return load_pooled(model_args, AutoConfig.from_pretrained(folder))


def test_a_saved_model_is_loaded_with_its_head(saved):
    folder, model = saved
    torch.testing.assert_close(load(folder).eval()(IDS_BT, TEXT_BT).logits, model(IDS_BT, TEXT_BT).logits)


@pytest.mark.parametrize("flags", [{"pooling": ["cls"]}, {"pooling": ["mean"], "pooling_layers": [1]}], ids=str)
def test_a_head_is_not_put_on_other_features(saved, flags):
    with pytest.raises(DPConfigError, match=r"reads \['mean'\] of the layers \[-1\].*Leave --pooling"):
        load(saved[0], **flags)


def test_adapters_are_saved_with_the_head_they_belong_to(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(pooled(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                value.normal_()
    model.eval()
    save_merged(model, tmp_path, AnyTokenizer())
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    torch.testing.assert_close(loaded(IDS_BT, TEXT_BT).logits, model(IDS_BT, TEXT_BT).logits)
    assert any("lora_B" in name for name, _ in model.named_parameters()), "the trained model keeps its adapters"


class AnyTokenizer:
    def save_pretrained(self, folder):
        pass
