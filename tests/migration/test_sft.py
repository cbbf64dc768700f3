"""DPSFTTrainer: prompts, conversations under the chat templates of TRL, LoRA, users; exact against a loop."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig, GPT2LMHeadModel, LlamaForCausalLM

from hf_dpopt import DPConfigError, DPTrainingArguments
from tests.helpers import tiny
from tests.reference import clipping as reference

trl = pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from hf_dpopt import DPSFTConfig, DPSFTTrainer  # noqa: E402  they need TRL

WITH_IMAGES = {"idefics3_training", "llava_next_training", "smolvlm_training"}  # a message is a list of parts
TEMPLATES = [
    path
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja"))
    if path.stem not in WITH_IMAGES
]
CITIES = [("france", "paris"), ("spain", "madrid"), ("italy", "rome"), ("norway", "oslo")]


def _prompts(num: int = 24) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"capital of {land}?", "completion": f" it is {city} {i}"} for i, (land, city) in _turns(num)]
    )


def _turns(num: int) -> Any:
    return ((i, CITIES[i % len(CITIES)]) for i in range(num))


def _chats(num: int = 24, user: bool = False) -> Dataset:
    """Conversations of one or two questions; with `user`, a column says whose each is."""
    rows = []
    for i, (land, city) in _turns(num):
        messages = [{"role": "user", "content": f"{land}?"}, {"role": "assistant", "content": f"{city} {i}"}]
        rows.append({"messages": messages * (1 + i % 2)} | ({"who": f"p{i % 6}"} if user else {}))
    return Dataset.from_list(rows)


def _model(kind: type = GPT2LMHeadModel, **changes: Any) -> Any:
    return tiny.made(kind, vocab_size=259, bos_token_id=1, eos_token_id=2, pad_token_id=0, **changes)


def _trainer(tmp_path, callbacks=(), model=None, peft_config=None, rows=None, template=None, **changes):
    values = dict(
        output_dir=str(tmp_path / "out"), private_state_dir=str(tmp_path / "keys"), use_cpu=True, report_to="none",
        per_device_train_batch_size=4, expected_batch_size=8, max_steps=2, save_strategy="no", learning_rate=0.0,
        noise_multiplier=0.0, clipping_norm=0.5, target_delta=1e-3, disable_tqdm=True, max_length=None,
    )  # fmt: skip
    return DPSFTTrainer(
        model=model or _model(n_positions=4096), args=DPSFTConfig(**values | changes), callbacks=list(callbacks),
        train_dataset=_prompts() if rows is None else rows, processing_class=tiny.byte_tokenizer(template), peft_config=peft_config,
    )  # fmt: skip


def _is_exact(trainer: Any, seen: tiny.Gradients) -> None:
    """Each step released the clipped sum of the records that were drawn, by a loop over them."""
    trainer.train()
    run, model = trainer._session.run, trainer.model.eval()
    rows = [{k: row[k] for k in ("input_ids", "labels")} for row in trainer.train_dataset]
    assert seen.steps
    for step, got in enumerate(seen.steps, start=1):
        drawn = run.plan.sampler.draw(run.chain.sampling_key, step).tolist()
        batch = trainer.data_collator([rows[i] for i in drawn])
        want = reference.clipped_sum(model, dict(batch), 0.5)
        assert reference.relative_error(got, {n: g / 8 for n, g in want.items()}) < 1e-5


def _learned(trainer: Any, i: int) -> str:
    row = trainer.train_dataset[i]
    kept = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    return trainer.processing_class.decode(kept)


def test_a_step_is_the_clipped_sum_of_completion_losses(tmp_path):
    seen = tiny.Gradients()
    trainer = _trainer(tmp_path, [seen], completion_only_loss=True)
    assert _learned(trainer, 0) == " it is paris 0<eos>"
    _is_exact(trainer, seen)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("template", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_the_answers_of_a_conversation_are_learned_exactly(tmp_path, template):
    """Each chat template that TRL has for training: the answers alone, and the step is exact."""
    seen = tiny.Gradients()
    trainer = _trainer(
        tmp_path, [seen], rows=_chats(12), template=template.read_text(), assistant_only_loss=True, max_steps=1,
    )  # fmt: skip
    for i in (0, 1):
        assert _learned(trainer, i).count(f"{CITIES[i][1]} {i}") == 1 + i % 2
        assert f"{CITIES[i][0]}?" not in _learned(trainer, i)
    _is_exact(trainer, seen)


def test_all_conversations_of_a_person_are_one_unit(tmp_path):
    trainer = _trainer(
        tmp_path, rows=_chats(user=True), template=TEMPLATES[0].read_text(), expected_batch_size=3, noise_multiplier=1.0,
        privacy_unit="user", user_id_column="who", target_delta=0.01,
    )  # fmt: skip
    trainer.train()
    assert trainer.plan.num_users == 6
    statement = (tmp_path / "out" / "privacy" / "statement.md").read_text()
    assert "user" in statement


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"packing": True}, "packing=False"),
        ({"padding_free": True}, "padding_free=False"),
        ({"loss_type": "dft"}, "loss_type='nll'"),
        ({"activation_offloading": True}, "activation_offloading=False"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path, changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        _trainer(tmp_path, **changes)


@pytest.mark.parametrize("kind", [DPTrainingArguments, trl.SFTConfig])
def test_other_arguments_are_refused_and_the_right_ones_named(tmp_path, kind):
    changes = {"noise_multiplier": 1.0} if kind is DPTrainingArguments else {"bf16": False}
    args = kind(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, **changes)
    with pytest.raises(DPConfigError, match="hf_dpopt.DPSFTConfig"):
        DPSFTTrainer(model=_model(), args=args, train_dataset=_prompts(), processing_class=tiny.byte_tokenizer())


def test_a_model_that_the_trainer_loads_and_wraps_is_checked_afterwards(tmp_path):
    folder = str(tmp_path / "model")
    _model().save_pretrained(folder)
    trainer = _trainer(tmp_path, model=folder, peft_config=LoraConfig(r=2, target_modules=["c_attn"]))
    trainer.train()
    assert all("lora_" in name for name in trainer._session.engine.parameters)


def test_lora_on_a_base_of_4_bits_is_trained(tmp_path):
    """QLoRA as TRL's users have it: the base is quantised while it is loaded, the adapter is trained."""
    pytest.importorskip("bitsandbytes")
    folder = str(tmp_path / "model")
    _model(LlamaForCausalLM).save_pretrained(folder)
    seen = tiny.Gradients()
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    trainer = _trainer(
        tmp_path, [seen], model=folder, peft_config=LoraConfig(r=2, target_modules="all-linear"),
        model_init_kwargs={"quantization_config": four_bits, "device_map": None}, learning_rate=1e-2,
    )  # fmt: skip
    assert any("4bit" in type(module).__name__ for module in trainer.model.modules())
    trainer.train()
    assert all("lora_" in name for name in seen.steps[0])
    assert any(grad.abs().sum() > 0 for grad in seen.steps[0].values())


def test_the_loss_is_not_in_the_logs(tmp_path):
    trainer = _trainer(tmp_path, logging_steps=1, noise_multiplier=1.0)
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    assert not logged & {"loss", "mean_token_accuracy", "entropy", "num_tokens"}
    assert torch.tensor([entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]).numel()


def test_the_length_of_a_long_record_is_not_printed(tmp_path, caplog):
    """The tokenizer names it where a text is longer than its model, before anything cuts it."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.model_max_length = 20
    args = DPSFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", noise_multiplier=1.0)
    DPSFTTrainer(_model(), args, train_dataset=_prompts(), processing_class=tokenizer)
    logger.removeHandler(caplog.handler)
    assert "longer than" not in caplog.text


def test_without_trl_the_install_line_is_named():
    code = "import sys; sys.modules['trl'] = None; import hf_dpopt; hf_dpopt.DPSFTTrainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "DPSFTTrainer needs the package trl" in done.stderr and "pip install 'hf-dpopt[chat]'" in done.stderr
