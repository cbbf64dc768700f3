"""Trainers with a loss of pairs or of the batch: what the refusal says is the case, and what it names works."""

from __future__ import annotations

import dataclasses

import pytest
from datasets import Dataset
from transformers import BertForSequenceClassification, DataCollatorWithPadding

from hf_dpopt import DPConfigError, DPSFTConfig, DPSFTTrainer, DPTrainer, DPTrainerMixin, DPTrainingArguments
from tests import tiny
from tests.migration.test_sft import _model

trl = pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")


class DPDPOTrainer(DPTrainerMixin, trl.DPOTrainer):
    pass


class DPRewardTrainer(DPTrainerMixin, trl.RewardTrainer):
    pass


class DPKTOTrainer(DPTrainerMixin, trl.KTOTrainer):
    pass


class DPRLOOTrainer(DPTrainerMixin, trl.RLOOTrainer):
    pass


PAIRS = Dataset.from_list(
    [
        {"prompt": f"what is the capital of {land}", "chosen": f" paris {city}", "rejected": f" the city {city}"}
        for land, city in [("france", "paris"), ("spain", "madrid"), ("italy", "rome")] * 8
    ]
)


def _arguments(tmp_path, cls=DPTrainingArguments, **changes):
    values = dict(
        output_dir=str(tmp_path / "out"), private_state_dir=str(tmp_path / "keys"), use_cpu=True, report_to="none",
        per_device_train_batch_size=4, expected_batch_size=8, max_steps=2, save_strategy="no", noise_multiplier=1.0,
        target_delta=1e-3, disable_tqdm=True, bf16=False,
    )  # fmt: skip
    return cls(**values | changes)


@pytest.mark.parametrize("given", [None, lambda outputs, labels: outputs.logits.mean((1, 2))])
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (DPDPOTrainer, "DPOTrainer compares two answers.*two rows of one record.*Finetune on the chosen answers"),
        (DPRewardTrainer, "RewardTrainer compares two answers.*Classify instead.*--user_id_column pair"),
        (DPKTOTrainer, "KTOTrainer estimates a divergence from the other records.*desirable completions"),
        (DPRLOOTrainer, "RLOOTrainer computes a loss of the whole batch.*SFTTrainer can be private"),
    ],
)
def test_what_is_the_case_is_said(trainer, words, given, tmp_path):
    """The same with a loss of records, which is no way out here."""
    with pytest.raises(DPConfigError, match=words):
        trainer(
            model=_model(),
            args=_arguments(tmp_path),
            train_dataset=PAIRS,
            per_example_loss_func=given,
        )


def test_chosen_answers_can_be_learned(tmp_path):
    """The way out of DPO and KTO."""
    chosen = PAIRS.remove_columns("rejected").rename_column("chosen", "completion")
    args = _arguments(tmp_path, DPSFTConfig, completion_only_loss=True, gradient_checkpointing=False)
    trainer = DPSFTTrainer(model=_model(), args=args, train_dataset=chosen, processing_class=tiny.byte_tokenizer())
    trainer.train()
    assert trainer.privacy_spent().num_steps == 2


def test_a_reward_is_learned_by_classification_with_the_pair_as_unit(tmp_path):
    """The way out of reward models: both rows of a pair are clipped as one."""
    tokenizer = tiny.byte_tokenizer()
    texts = [(p["prompt"] + p[name], label) for p in PAIRS for name, label in (("chosen", 1), ("rejected", 0))]
    rows = Dataset.from_list(
        [{**tokenizer(text), "labels": label, "pair": i // 2} for i, (text, label) in enumerate(texts)]
    )
    model = tiny.made(BertForSequenceClassification, vocab_size=len(tokenizer))
    args = _arguments(tmp_path, privacy_unit="user", user_id_column="pair", records_per_user=2)
    collator = DataCollatorWithPadding(tokenizer)
    trainer = DPTrainer(model, args, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
    trainer.train()
    assert trainer.plan.num_users == len(PAIRS) and dataclasses.asdict(trainer.privacy_spent())["unit"] == "user"
