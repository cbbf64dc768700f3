"""TRL's SFTTrainer behind the mixin: completion-only loss, exact against a loop over single records."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_dpopt import DPConfigError, DPTrainerMixin, DPTrainingArguments
from tests import tiny
from tests.reference import clipping as reference

trl = pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

WORDS = "the capital of france is paris spain madrid italy rome what where city a".split()


class DPSFTTrainer(DPTrainerMixin, trl.SFTTrainer):
    pass


@dataclasses.dataclass(repr=False)
class DPSFTConfig(DPTrainingArguments, trl.SFTConfig):
    pass


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _records() -> Dataset:
    pairs = [("france", "paris"), ("spain", "madrid"), ("italy", "rome")] * 8
    return Dataset.from_list(
        [{"prompt": f"what is the capital of {land}", "completion": f" the city is {city}"} for land, city in pairs]
    )


def _model(tokenizer) -> GPT2LMHeadModel:
    return tiny.made(GPT2LMHeadModel, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=1)


def _trainer(tmp_path, callbacks=(), model=None, peft_config=None, **changes):
    tokenizer = _tokenizer()
    values = dict(
        output_dir=str(tmp_path / "out"), private_state_dir=str(tmp_path / "keys"), use_cpu=True, report_to="none",
        per_device_train_batch_size=4, expected_batch_size=8, max_steps=2, save_strategy="no", learning_rate=0.0,
        noise_multiplier=0.0, clipping_norm=0.5, target_delta=1e-3, bf16=False, completion_only_loss=True,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    return DPSFTTrainer(
        model=model or _model(tokenizer), peft_config=peft_config, args=DPSFTConfig(**values | changes), train_dataset=_records(), processing_class=tokenizer,
        callbacks=list(callbacks),
    )  # fmt: skip


def test_a_step_is_the_clipped_sum_of_completion_losses(tmp_path):
    seen = tiny.Gradients()
    trainer = _trainer(tmp_path, [seen])
    trainer.train()
    records = [{k: row[k] for k in ("input_ids", "labels")} for row in trainer.train_dataset]
    assert all(row["labels"][0] == -100 and row["labels"][-1] != -100 for row in records)
    for step, got in enumerate(seen.steps, start=1):
        drawn = trainer._session.run.plan.sampler.draw(trainer._session.run.chain.sampling_key, step).tolist()
        batch = trainer.data_collator([records[i] for i in drawn])
        want = reference.clipped_sum(trainer.model.eval(), dict(batch), 0.5)
        assert reference.relative_error(got, {n: g / 8 for n, g in want.items()}) < 1e-5


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"packing": True}, "packing=False"),
        ({"padding_free": True}, "padding_free=False"),
        ({"loss_type": "dft"}, "loss_type='nll'"),
        ({"activation_offloading": True}, "activation_offloading=False"),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path, changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        _trainer(tmp_path, **changes)


def test_plain_dp_arguments_are_refused(tmp_path):
    args = DPTrainingArguments(output_dir=str(tmp_path / "out"), noise_multiplier=1.0, report_to="none", use_cpu=True)
    with pytest.raises(DPConfigError, match=r"DPSFTConfig\(DPTrainingArguments, SFTConfig\)"):
        DPSFTTrainer(model=_model(_tokenizer()), args=args, train_dataset=_records(), processing_class=_tokenizer())


def test_a_model_that_the_trainer_loads_and_wraps_is_checked_afterwards(tmp_path):
    folder = str(tmp_path / "model")
    _model(_tokenizer()).save_pretrained(folder)
    trainer = _trainer(tmp_path, model=folder, peft_config=LoraConfig(r=2, target_modules=["c_attn"]))
    trainer.train()
    assert all("lora_" in name for name in trainer._session.engine.parameters)


def test_the_loss_is_not_in_the_logs(tmp_path):
    trainer = _trainer(tmp_path, logging_steps=1, noise_multiplier=1.0)
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert not logged & {"loss", "mean_token_accuracy", "entropy", "num_tokens"}
    assert torch.tensor([entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]).numel()
