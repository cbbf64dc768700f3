"""Every refusal, through the real trainer: it raises with the mend in the message, and nothing was touched before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers as tf
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.utils.data import Subset

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer, DPTrainingArguments, UnsupportedModuleError
from hf_dpopt.huggingface import refusals
from hf_dpopt.records.lengths import positions
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run import LEDGER

NUM_RECORDS, NUM_TOKENS, VOCABULARY = 24, 6, 40
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
_LIKE_LLAMA = {**_BERT, "num_key_value_heads": 2}


def bert() -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**_BERT))


def records(num_records: int = NUM_RECORDS) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.randint(1, VOCABULARY, (NUM_TOKENS,)).tolist(),
            "attention_mask": [1] * NUM_TOKENS,
            "labels": i % 2,
        }
        for i in range(num_records)
    ]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path):
    """Keys in a folder of the test's own, and what accelerate leaves in the environment taken out again."""
    before = dict(os.environ)
    os.environ["HF_DPOPT_PRIVATE_DIR"] = str(tmp_path / "keys")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def arguments(tmp_path) -> Callable[..., DPTrainingArguments]:
    """Arguments of a small private run; `late` values are set afterwards, for what the host itself refuses here."""

    def make(late: dict[str, Any] | None = None, **values: Any) -> DPTrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "noise_multiplier": 1.0, "max_steps": 2, "expected_batch_size": 8, "per_device_train_batch_size": 4,
            "save_strategy": "no", "remove_unused_columns": False,
        }  # fmt: skip
        args = DPTrainingArguments(**(defaults | values))
        for name, value in (late or {}).items():
            setattr(args, name, value)
        return args

    return make


@pytest.fixture
def refused(tmp_path) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Inside, the trainer must refuse with these words before anything happens: no folder, no key, no seeding."""

    @contextlib.contextmanager
    def block(mend: str, error: type[Exception] = DPConfigError) -> Iterator[None]:
        before = torch.get_rng_state()
        with pytest.raises(error, match=f"(?s){mend}"):
            yield
        assert not (tmp_path / "out").exists() and not (tmp_path / "keys").exists()
        assert torch.equal(torch.get_rng_state(), before)  # the Trainer's constructor begins with set_seed

    return block


@pytest.fixture
def refused_in_training(tmp_path) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """For what only training shows: refused with these words, at most `charged` steps charged, no parameter moved."""

    @contextlib.contextmanager
    def block(
        mend: str, model: nn.Module, *, charged: int = 0, error: type[Exception] = DPConfigError
    ) -> Iterator[None]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(error, match=f"(?s){mend}"):
            yield
        assert num_charged(tmp_path / "out") == charged
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    return block


def num_charged(output_dir: Path) -> int:
    path = output_dir / LEDGER
    return Ledger.read(path).num_charged if path.exists() else 0


def test_what_is_refused_below_is_the_option_not_the_run(arguments, tmp_path):
    """The base of every case trains, so a refusal comes from what the case changes."""
    assert DPTrainer(bert(), arguments(), train_dataset=records()).train().global_step == 2
    assert num_charged(tmp_path / "out") == 2 and (tmp_path / "keys").exists()


# --- arguments -------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"fp16": True}, "skips an update.*Use --bf16"),
    "n_gpu": ({"late": {"_n_gpu": 2}}, "2 GPUs.*accelerate launch --num_processes 2"),
    "fsdp": ({"fsdp": True}, "FSDP.*Use plain accelerate launch"),
    "deepspeed": ({"late": {"deepspeed": "ds.json"}}, "DeepSpeed.*Use plain accelerate launch"),
    "deepspeed from accelerate": (
        {"late": {"deepspeed_plugin": object()}},
        "DeepSpeed.*Use plain accelerate launch",
    ),
    "parallelism_config": ({"late": {"parallelism_config": object()}}, "parallelism_config.*Use plain accelerate"),
    "torch_compile": ({"torch_compile": True}, "Remove --torch_compile"),
    "torch_compile_mode": ({"torch_compile_mode": "default"}, "Remove --torch_compile"),
    "liger": ({"use_liger_kernel": True}, "Remove --use_liger_kernel"),
    "lomo": ({"optim": "lomo"}, "optim=lomo.*Use adamw_torch"),
    "adalomo": ({"optim": "adalomo"}, "optim=adalomo.*Use adamw_torch"),
    "galore layerwise": ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise.*Use adamw_torch"),
    "apollo layerwise": ({"optim": "apollo_adamw_layerwise"}, "apollo_adamw_layerwise.*Use adamw_torch"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "Set --per_device_train_batch_size"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "Remove --neftune_noise_alpha"),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "group_by_length.*Leave it at 'random'"),
    "sequential": ({"train_sampling_strategy": "sequential"}, "sequential.*Leave it at 'random'"),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, "split_batches.*Remove it"),
    "dispatch_batches": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches.*Remove it"),
    "accumulation of accelerate": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        "num_steps=2.*Use --gradient_accumulation_steps",
    ),
    "ignore_data_skip": ({"ignore_data_skip": True}, "Remove --ignore_data_skip"),
    "dataloader_in_order": ({"dataloader_in_order": False}, "dataloader_in_order=False.*Remove it"),
    "reentrant": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "reentrant, old name": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "reentrant by torch's default": (  # torch takes reentrant where other keywords are given without this one
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"preserve_rng_state": True}},
        "Reentrant.*'use_reentrant': False",
    ),
    "debug": ({"debug": "underflow_overflow"}, "Remove --debug"),
    "tokens seen": ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen.*Leave it at 'no'"),
    "tokens seen, text": ({"include_num_input_tokens_seen": "non_padding"}, "Leave it at 'no'"),
    "jit checkpoint": ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint.*Use --save_steps"),
    "no budget": ({"noise_multiplier": None}, "Neither target_epsilon nor noise_multiplier.*Add --target_epsilon"),
    "two budgets": ({"target_epsilon": 8.0}, "Both target_epsilon and noise_multiplier are.*Give exactly one"),
    "epsilon 0": ({"noise_multiplier": None, "target_epsilon": 0.0}, "target_epsilon=0.0.*Use a finite number > 0"),
    "epsilon < 0": (
        {"noise_multiplier": None, "target_epsilon": -1.0},
        "target_epsilon=-1.0.*Use a finite number > 0",
    ),
    "epsilon nan": ({"noise_multiplier": None, "target_epsilon": float("nan")}, "target_epsilon=nan.*Use a finite"),
    "delta 1": ({"target_delta": 1.0}, "target_delta=1.0.*at most 1 / number of records"),
    "noise < 0": ({"noise_multiplier": -0.5}, "noise_multiplier=-0.5.*Use a finite number > 0"),
    "clipping_norm": ({"clipping_norm": 0.0}, "clipping_norm=0.0.*Use a finite number > 0"),
    "clipping": ({"clipping": "adaptive"}, "clipping='adaptive'.*Use one of: 'flat'"),
    "clipping_engine": ({"clipping_engine": "vmap"}, "clipping_engine='vmap'.*Use one of: 'auto', 'book_keeping'"),
    "sampling": ({"sampling": "shuffle"}, "sampling='shuffle'.*Use one of: 'auto'"),
    "adjacency": ({"adjacency": "add"}, "adjacency='add'.*Use one of: 'auto', 'add_or_remove_one'"),
    "privacy_unit": ({"privacy_unit": "user"}, "privacy_unit='user'.*--user_id_column author"),
    "batch larger than the dataset": ({"expected_batch_size": 25}, "expected_batch_size.*25"),
    "empty batch": ({"expected_batch_size": 0}, "expected_batch_size=0.*integer >= 1"),
    "fixed key": ({"unsafe_fixed_noise_key": "42"}, "unsafe_fixed_noise_key.*64 hexadecimal"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case, arguments, refused):
    values, mend = ARGUMENTS[case]
    args, model, dataset = arguments(**values), bert(), records()
    with refused(mend):
        DPTrainer(model, args, train_dataset=dataset)


ENVIRONMENT = {
    "fp16": ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed precision is fp16.*ACCELERATE_MIXED_PRECISION"),
    "fp8": ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed precision is fp8.*ACCELERATE_MIXED_PRECISION"),
    "dynamo": ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "ACCELERATE_DYNAMO_BACKEND=inductor.*Unset it"),
    "wandb gradients": ("WANDB_WATCH", "gradients", "WANDB_WATCH.*Unset it"),
    "wandb all": ("WANDB_WATCH", "all", "WANDB_WATCH.*Unset it"),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_environment(case, arguments, refused, monkeypatch):
    variable, value, mend = ENVIRONMENT[case]
    monkeypatch.setenv(variable, value)
    args, model, dataset = arguments(), bert(), records()
    with refused(mend):
        DPTrainer(model, args, train_dataset=dataset)


@pytest.mark.parametrize("variable, value", [("ACCELERATE_DYNAMO_BACKEND", "no"), ("WANDB_WATCH", "false")])
def test_harmless_environment_is_allowed(variable, value, arguments, monkeypatch):
    monkeypatch.setenv(variable, value)
    DPTrainer(bert(), arguments(), train_dataset=records())


def _accelerator(mode: str = "NO", **values: Any) -> SimpleNamespace:
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO), fsdp_plugin=None)
    defaults = {"mixed_precision": "no", "scaler": None, "state": state, "parallelism_config": None}
    return SimpleNamespace(distributed_type=DistributedType(mode), **(defaults | values))


ACCELERATORS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"mode": "FSDP"}, "mode FSDP.*choose plain multi-GPU or CPU"),
    "deepspeed": ({"mode": "DEEPSPEED"}, "mode DEEPSPEED.*choose plain multi-GPU or CPU"),
    "megatron": ({"mode": "MEGATRON_LM"}, "mode MEGATRON_LM.*choose plain multi-GPU or CPU"),
    "tpu": ({"mode": "XLA"}, "mode XLA.*choose plain multi-GPU or CPU"),
    "fp16": ({"mixed_precision": "fp16"}, "precision is fp16.*Use bf16 or no"),
    "scaler": ({"scaler": object()}, "Use bf16 or no"),
    "tensor parallelism": ({"parallelism_config": object()}, "parallelism_config.*Unset ACCELERATE_USE_PARALLELISM"),
    "dynamo": (
        {"state": SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.INDUCTOR), fsdp_plugin=None)},
        "INDUCTOR.*without dynamo",
    ),
}


@pytest.mark.parametrize("case", ACCELERATORS)
def test_accelerator(case):
    """States that this machine cannot be put in, so the check is called with what accelerate would hold."""
    values, mend = ACCELERATORS[case]
    with pytest.raises(DPConfigError, match=mend):
        refusals.check_accelerator(_accelerator(**values))


@pytest.mark.parametrize("mode", ["NO", "MULTI_CPU", "MULTI_GPU"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_plain_data_parallelism_is_allowed(mode, precision):
    refusals.check_accelerator(_accelerator(mode, mixed_precision=precision))


def test_stock_arguments(tmp_path, refused):
    args = tf.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    model, dataset = bert(), records()
    with refused("got TrainingArguments.*Replace TrainingArguments by hf_dpopt.DPTrainingArguments"):
        DPTrainer(model, args, train_dataset=dataset)
    with refused("got NoneType.*DPTrainingArguments"):
        DPTrainer(model, train_dataset=dataset)


# --- model -----------------------------------------------------------------------------------------------------------


def _bert_with(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = bert()
        change(model)
        return model

    return make


def _embedding_with(**values: Any) -> Callable[[], nn.Module]:
    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model.bert.embeddings.word_embeddings, name, value)

    return _bert_with(change)


class _BatchNormedForSequenceClassification(tf.BertForSequenceClassification):
    def __init__(self, config, norm=nn.BatchNorm1d):
        super().__init__(config)
        self.extra_norm = norm(config.hidden_size)


class _ScaledForSequenceClassification(tf.BertForSequenceClassification):
    """Owns a tensor of its own beside its children, as vision models own their class token."""

    def __init__(self, config):
        super().__init__(config)
        self.own_scale = nn.Parameter(torch.ones(()))


def mixtral(**config: Any) -> nn.Module:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**_LIKE_LLAMA, num_local_experts=2, num_experts_per_tok=1, **config))


def qwen_moe() -> nn.Module:
    return tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(
            **_LIKE_LLAMA, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    )  # fmt: skip


def granite_moe() -> nn.Module:
    return tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**_LIKE_LLAMA, num_local_experts=2, num_experts_per_tok=1))


def _only(make: Callable[[], nn.Module], *fragments: str) -> Callable[[], nn.Module]:
    """The model with these parameters trained and no others."""

    def build() -> nn.Module:
        model = make()
        for name, p in model.named_parameters():
            p.requires_grad_(any(fragment in name for fragment in fragments))
        return model

    return build


def _attention_lora(make: Callable[[], nn.Module]) -> nn.Module:
    return peft.get_peft_model(
        make(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def _adapted(config: peft.PeftConfig) -> Callable[[], nn.Module]:
    return lambda: peft.get_peft_model(bert(), config)


def _initialised_as(how: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
        model.peft_config["default"].init_lora_weights = how  # after the fact: peft wants the data here
        return model

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "device_map": (
        _bert_with(lambda m: setattr(m, "hf_device_map", {"bert": 0, "classifier": 1})),
        "device_map.*Load it on one device",
    ),
    "sharded while loading": (
        _bert_with(lambda m: setattr(m, "_is_distributed_loading_by_transformers", True)),
        "distributed_config.*Load it without",
    ),
    "reentrant checkpointing": (
        _bert_with(lambda m: m.gradient_checkpointing_enable({"use_reentrant": True})),
        "reentrant.*'use_reentrant': False",
    ),
    "reentrant checkpointing by torch's default": (
        _bert_with(lambda m: m.gradient_checkpointing_enable({"preserve_rng_state": True})),
        "reentrant.*'use_reentrant': False",
    ),
    "batch norm": (
        lambda: _BatchNormedForSequenceClassification(tf.BertConfig(**_BERT)),
        "extra_norm .BatchNorm1d.*Replace it by GroupNorm",
    ),
    "synchronised batch norm": (
        lambda: _BatchNormedForSequenceClassification(tf.BertConfig(**_BERT), nn.SyncBatchNorm),
        "extra_norm .SyncBatchNorm.*Replace it by GroupNorm",
    ),
    "mixtral": (mixtral, "mixture of experts.*Freeze experts and routers"),
    "mixtral experts": (_only(mixtral, "experts"), "experts.*Freeze experts and routers"),
    "mixtral router": (_only(mixtral, "mlp.gate.weight"), "mlp.gate.weight.*Freeze experts and routers"),
    "qwen router": (_only(qwen_moe, "mlp.gate.weight"), "mlp.gate.weight.*Freeze experts and routers"),
    "granite router": (_only(granite_moe, "router"), "router.*Freeze experts and routers"),
    "load balancing loss": (
        lambda: _attention_lora(lambda: mixtral(output_router_logits=True)),
        "Set config.output_router_logits = False",
    ),
    "adalora": (
        _adapted(
            peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10, target_modules=["query"], task_type="SEQ_CLS")
        ),
        "AdaLoRA.*Use LoRA",
    ),
    "eva": (_initialised_as("eva"), "initialised from data.*'eva'.*Use init_lora_weights=True"),
    "corda": (_initialised_as("corda"), "initialised from data.*'corda'.*Use init_lora_weights=True"),
    "lora_ga": (_initialised_as("lora_ga"), "initialised from data.*'lora_ga'.*Use init_lora_weights=True"),
    "max_norm": (_embedding_with(max_norm=1.0), "word_embeddings renormalises.*Set max_norm=None"),
    "scale_grad_by_freq": (_embedding_with(scale_grad_by_freq=True), "word_embeddings.*Set scale_grad_by_freq=False"),
    "sparse": (_embedding_with(sparse=True), "word_embeddings.*Set sparse=False"),
    "uncovered tensor": (
        lambda: _ScaledForSequenceClassification(tf.BertConfig(**_BERT)),
        "own_scale.*Freeze them.*LoRA",
    ),
    "gradient hook": (
        _bert_with(lambda m: m.classifier.weight.register_hook(lambda grad: grad)),
        "classifier.weight.*Remove the hook",
    ),
    "post-accumulate hook": (
        _bert_with(lambda m: m.classifier.weight.register_post_accumulate_grad_hook(lambda p: None)),
        "classifier.weight.*Remove the hook",
    ),
    "nothing to train": (_bert_with(lambda m: m.requires_grad_(False)), "no trainable parameter.*LoRA"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, arguments, refused):
    make, mend = MODELS[case]
    model, args, dataset = make(), arguments(), records()
    with refused(mend, UnsupportedModuleError):
        DPTrainer(model, args, train_dataset=dataset)


ALLOWED_MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention LoRA beside frozen experts": lambda: _attention_lora(mixtral),
    "weights-only initialisation": _initialised_as("pissa"),
    "checkpointing without reentrance": _bert_with(lambda m: m.gradient_checkpointing_enable()),
    "checkpointing that was switched off": _bert_with(
        lambda m: (m.gradient_checkpointing_enable({"use_reentrant": True}), m.gradient_checkpointing_disable())
    ),
    "one device": _bert_with(lambda m: setattr(m, "hf_device_map", {"bert": "cpu", "classifier": "cpu"})),
    "frozen tensor of its own": _only(lambda: _ScaledForSequenceClassification(tf.BertConfig(**_BERT)), "classifier"),
    "frozen scaled embedding": lambda: _only(_embedding_with(scale_grad_by_freq=True), "classifier")(),
}


@pytest.mark.parametrize("case", ALLOWED_MODELS)
def test_neighbours_of_refused_models_are_allowed(case, arguments):
    DPTrainer(ALLOWED_MODELS[case](), arguments(), train_dataset=records())


def test_a_model_made_by_model_init_is_checked_when_it_is_there(arguments, refused_in_training):
    trainer = DPTrainer(
        None,
        arguments(),
        model_init=lambda: _BatchNormedForSequenceClassification(tf.BertConfig(**_BERT)),
        train_dataset=records(),
    )
    with refused_in_training("extra_norm.*Replace it by GroupNorm", trainer.model, error=UnsupportedModuleError):
        trainer.train()


# --- data and loss ---------------------------------------------------------------------------------------------------


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(records())


class _Unsized:
    def __getitem__(self, i):
        return records()[i]


def long_record(num_tokens: int) -> dict[str, Any]:
    return {"input_ids": [5] * num_tokens, "attention_mask": [1] * num_tokens, "labels": 0}


DATA: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataset": _Stream()}, "streaming=False"),
    "iterable of datasets": (
        lambda: {"train_dataset": datasets.Dataset.from_list(records()).to_iterable_dataset()},
        "streaming=False",
    ),
    "without length": (lambda: {"train_dataset": _Unsized()}, "streaming=False"),
    "empty": (lambda: {"train_dataset": []}, "empty.*Check the file"),
    "longer than the positions": (
        lambda: {"train_dataset": [*records(), long_record(17)]},
        "longer than the 16 positions .*truncation=True, max_length=16",
    ),
    "longer than the positions, dataset": (
        lambda: {"train_dataset": datasets.Dataset.from_list([*records(), long_record(17)])},
        "longer than the 16 positions .*truncation=True, max_length=16",
    ),
    "flattening collator": (
        lambda: {"train_dataset": records(), "data_collator": tf.DataCollatorWithFlattening()},
        "Use DataCollatorWithPadding",
    ),
    "compute_loss_func": (
        lambda: {"train_dataset": records(), "compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()},
        "compute_loss_func.*Pass per_example_loss_func=f",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_and_loss(case, arguments, refused):
    make, mend = DATA[case]
    given, args, model = make(), arguments(), bert()
    with refused(mend):
        DPTrainer(model, args, **given)


def test_records_as_long_as_the_positions_are_allowed(arguments):
    long = datasets.Dataset.from_list([*records(), long_record(17)]).select(range(len(records())))  # not its rows
    for dataset in ([*records(), long_record(16)], long):
        DPTrainer(bert(), arguments(), train_dataset=dataset)


def _with_prompt(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _with_wrapped_positions(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True)
    return peft.get_peft_model(model, config)


def _tiny(family: str, head: str = "Model", **more: Any) -> nn.Module:
    values = {**_BERT, "decoder_start_token_id": 2, **more}
    if family == "OPT":
        values |= {"ffn_dim": 16, "word_embed_proj_dim": 16}
    if family == "GPT2":
        values = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    if family in ("Bart", "LED"):
        values = {
            "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, **more,
        }  # fmt: skip
    return getattr(tf, f"{family}{head}")(getattr(tf, f"{family}Config")(**values)).eval()


_LED = {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 16, "attention_window": 4}
POSITIONS: dict[str, tuple[Callable[[], nn.Module], str, int | None]] = {
    "bert": (bert, "input_ids", 16),
    "roberta": (lambda: _tiny("Roberta", pad_token_id=1), "input_ids", 14),  # counted from 2
    "opt": (lambda: _tiny("OPT"), "input_ids", 16),
    "gpt2": (lambda: _tiny("GPT2"), "input_ids", 16),
    "gpt2, prompt tuning": (lambda: _with_prompt(_tiny("GPT2", "LMHeadModel")), "input_ids", 12),
    "gpt2, trained positions": (lambda: _with_wrapped_positions(_tiny("GPT2", "LMHeadModel")), "input_ids", 16),
    "bart, sources": (lambda: _tiny("Bart", max_position_embeddings=16), "input_ids", 16),
    "bart, targets": (lambda: _tiny("Bart", max_position_embeddings=16), "labels", 16),
    "led, sources": (lambda: _tiny("LED", **_LED), "input_ids", 32),
    "led, targets": (lambda: _tiny("LED", **_LED), "labels", 16),
    "llama": (lambda: _tiny("Llama"), "input_ids", None),
}  # fmt: skip


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_of_a_model(case):
    make, column, most = POSITIONS[case]
    model = make()
    table = positions(model, column)
    assert (None if table is None else table.most) == most

    def run(num_tokens: int) -> None:
        ids = torch.full((1, num_tokens), 5)
        inputs = {"input_ids": ids} if column == "input_ids" else {"input_ids": ids[:, :4], "decoder_input_ids": ids}
        if column == "input_ids" and model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :4]
        with torch.no_grad():
            model(**inputs)

    run(most or 64)
    if most:
        with pytest.raises((IndexError, RuntimeError)):
            run(most + 1)


def test_long_targets_of_a_decoder_are_refused():
    model = _tiny("Bart", max_position_embeddings=16)
    short, long = {"input_ids": [5] * 4, "labels": [5] * 16}, {"input_ids": [5] * 4, "labels": [5] * 17}
    refusals.check_lengths([short], model)
    for dataset in ([short, long], datasets.Dataset.from_list([short, long])):
        with pytest.raises(DPConfigError, match="labels of some training records are longer than the 16 positions"):
            refusals.check_lengths(dataset, model)


def test_what_is_not_a_stored_row_of_tokens_is_not_measured():
    """Padding that takes no position, rows that a transform makes, rows that are missing or no lists."""
    roberta = _tiny("Roberta", pad_token_id=1)
    refusals.check_lengths([{"input_ids": [5] * 14 + [1] * 2}], roberta)
    with pytest.raises(DPConfigError, match="14 positions"):
        refusals.check_lengths([{"input_ids": [5] * 15 + [1]}], roberta)
    served = datasets.Dataset.from_dict({"input_ids": [[5] * 40]})
    served.set_transform(lambda batch: {"input_ids": [row[:8] for row in batch["input_ids"]]})
    for dataset in (served, datasets.Dataset.from_dict({"input_ids": [None, [5]]}), [{"input_ids": None}],
                    datasets.Dataset.from_dict({"input_ids": ["a text " * 9]})):  # fmt: skip
        refusals.check_lengths(dataset, bert())


def _train_itself(train: Any) -> Any:
    return train


def _train_in_a_dict(train: Any) -> Any:
    return {"held_out": records(4), "seen": train}


def _train_in_a_dataset_dict(train: Any) -> Any:
    return datasets.DatasetDict({"held_out": datasets.Dataset.from_list(records(4)), "seen": train})


@pytest.mark.parametrize("wrap", [_train_itself, _train_in_a_dict, _train_in_a_dataset_dict])
def test_the_training_data_as_evaluation_data(wrap, arguments, refused):
    train, args, model = datasets.Dataset.from_list(records()), arguments(), bert()
    evaluation = wrap(train)
    with refused("evaluation dataset is the training dataset.*Hold out records"):
        DPTrainer(model, args, train_dataset=train, eval_dataset=evaluation)


@pytest.mark.parametrize("call", ["evaluate", "evaluate-dict", "evaluate-part", "predict"])
def test_metrics_on_the_training_data(call, arguments):
    train = records()
    trainer = DPTrainer(bert(), arguments(), train_dataset=train, eval_dataset=records(4))
    with pytest.raises(DPConfigError, match="Evaluate on held-out records"):
        if call == "predict":
            trainer.predict(train)
        else:
            seen = {"evaluate": train, "evaluate-dict": {"seen": train}, "evaluate-part": Subset(train, [0, 1])}
            trainer.evaluate(seen[call])
    assert trainer.evaluate()["eval_loss"] > 0  # held-out records are not refused


def test_an_overridden_loss(arguments, refused):
    class Own(DPTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).loss * 2

    args, model, dataset = arguments(), bert(), records()
    with refused("Own overrides compute_loss.*Pass per_example_loss_func=f"):
        Own(model, args, train_dataset=dataset)
    by_record = partial(nn.functional.cross_entropy, reduction="none")  # and the way out works
    trainer = Own(
        model, args, train_dataset=dataset,
        per_example_loss_func=lambda outputs, labels: 2 * by_record(outputs.logits, labels),
    )  # fmt: skip
    trainer.train()
    assert trainer.privacy_spent().num_steps == trainer.plan.num_steps


def test_a_loss_function_of_the_batch_beside_one_of_records(arguments, refused):
    args, model, dataset = arguments(), bert(), records()

    def of_batch(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    with refused("compute_loss_func returns one number.*Pass per_example_loss_func=f"):
        DPTrainer(model, args, train_dataset=dataset, compute_loss_func=of_batch)
    by_record = partial(nn.functional.cross_entropy, reduction="none")
    DPTrainer(
        model, args, train_dataset=dataset, compute_loss_func=of_batch,
        per_example_loss_func=lambda outputs, labels: by_record(outputs.logits, labels),
    ).train()  # fmt: skip


def test_a_head_without_known_loss(arguments, refused):
    args, model, dataset = arguments(), tf.BertForNextSentencePrediction(tf.BertConfig(**_BERT)), records()
    with refused("BertForNextSentencePrediction.*Pass per_example_loss_func=f"):
        DPTrainer(model, args, train_dataset=dataset)


def test_a_loss_of_the_whole_batch(arguments, refused_in_training):
    model = bert()
    trainer = DPTrainer(
        model, arguments(), train_dataset=records(),
        per_example_loss_func=lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels),
    )  # fmt: skip
    with refused_in_training("return the per-record losses", model):
        trainer.train()


def _packed(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    row = torch.tensor([x for f in features for x in f["input_ids"]])[None]
    ends = torch.arange(len(features) + 1) * NUM_TOKENS
    return {"input_ids": row, "labels": torch.zeros(1, dtype=torch.long), "cu_seq_lens_q": ends.int()}


def _flattened(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As `_packed`, without the keys that would betray it."""
    packed = _packed(features)
    return {name: packed[name] for name in ("input_ids", "labels")}


def _repeated(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return tf.default_data_collator([f for f in features for _ in range(2)])


@pytest.mark.parametrize(
    "collate, mend, charged",
    [
        (_packed, "batch is packed.*padding collator", 0),
        (_flattened, "collator.*one row per record", 0),
        (_repeated, "collator.*one row per record", 0),
    ],
)
def test_collators_whose_rows_are_not_the_records(collate, mend, charged, arguments, refused_in_training):
    """Two records in a row would be clipped as one, two rows of a record would count it twice."""
    model = tf.BertForSequenceClassification(tf.BertConfig(**(_BERT | {"max_position_embeddings": 200})))
    args = arguments(expected_batch_size=NUM_RECORDS)  # every record is drawn: no batch is empty
    trainer = DPTrainer(model, args, train_dataset=records(), data_collator=collate)
    with refused_in_training(mend, model, charged=charged):
        trainer.train()


@pytest.mark.parametrize("between", [False, True])
def test_accumulation_that_is_changed_after_the_trainer_was_made(between, arguments):
    trainer = DPTrainer(bert(), arguments(), train_dataset=records())
    if between:
        trainer.train()
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(DPConfigError, match="gradient_accumulation_steps=2 was set after.*make a new trainer"):
        trainer.train()


def test_hyperparameter_search(arguments):
    trainer = DPTrainer(bert(), arguments(), train_dataset=records())
    with pytest.raises(DPConfigError, match="budget per trial.*add up their epsilons"):
        trainer.hyperparameter_search()


# --- training --------------------------------------------------------------------------------------------------------


class LeakingForSequenceClassification(tf.BertForSequenceClassification):
    """Uses a weight outside the layer that owns it."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * (1 + self.bert.pooler.dense.weight.mean())
        return outputs


class CountingForSequenceClassification(tf.BertForSequenceClassification):
    """Counts what it was trained on, in a buffer that is saved with the model."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, input_ids, **kwargs):
        if self.training:
            self.num_seen += input_ids.size(0)
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("skip_self_check", [False, True])
def test_a_parameter_used_outside_its_layer(skip_self_check, arguments, refused_in_training):
    model = LeakingForSequenceClassification(tf.BertConfig(**_BERT))
    args = arguments(skip_self_check=skip_self_check, expected_batch_size=NUM_RECORDS)
    trainer = DPTrainer(model, args, train_dataset=records())
    mend = "outside the layers that own them.*bert.pooler.dense.weight.*Freeze them"
    with refused_in_training(mend, model, charged=int(skip_self_check), error=UnsupportedModuleError):
        trainer.train()


def test_a_buffer_that_changes_in_a_forward(arguments, refused_in_training):
    model = CountingForSequenceClassification(tf.BertConfig(**_BERT))
    trainer = DPTrainer(model, arguments(), train_dataset=records())
    with refused_in_training("buffers .num_seen.*Replace these layers", model, error=UnsupportedModuleError):
        trainer.train()
    assert model.num_seen == 0


def test_an_optimizer_of_other_tensors(arguments, refused_in_training):
    model = bert()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    trainer = DPTrainer(model, arguments(), train_dataset=records(), optimizers=(optimizer, None))
    with refused_in_training("updates 1 tensors.*model.parameters", model):
        trainer.train()


@pytest.mark.parametrize("unfreeze", [False, True])
def test_parameters_that_are_frozen_or_unfrozen_on_the_way(unfreeze, arguments):
    class Toggle(tf.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.bert.embeddings.requires_grad_(unfreeze)

    model = bert()
    model.bert.embeddings.requires_grad_(not unfreeze)
    trainer = DPTrainer(model, arguments(max_steps=3), train_dataset=records(), callbacks=[Toggle()])
    with pytest.raises(DPConfigError, match="changed during training.*Decide what to train before"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("inside", [".", "keys", "a/b"])
def test_keys_where_the_model_is_published(inside, arguments, tmp_path, refused_in_training):
    model = bert()
    args = arguments(private_state_dir=str(tmp_path / "out" / inside))
    trainer = DPTrainer(model, args, train_dataset=records())
    with refused_in_training("overlap.*Use two directories side by side", model):
        trainer.train()
    assert not list(tmp_path.rglob("*.key"))


def test_training_without_training_data(arguments, refused_in_training):
    model = bert()
    trainer = DPTrainer(model, arguments(), eval_dataset=records(4))
    with refused_in_training("Pass train_dataset", model):
        trainer.train()


def test_arguments_that_change_after_the_plan_was_made(arguments, refused_in_training):
    model = bert()
    trainer = DPTrainer(model, arguments(), train_dataset=records())
    trainer.args.max_steps = 20
    with refused_in_training("20 steps, but the plan was made for 2.*Make a new trainer", model):
        trainer.train()


def test_more_steps_than_the_budget_covers(arguments, tmp_path):
    """The same run again: its two steps are charged, so the next two are refused before they run."""
    budget = {"noise_multiplier": None, "target_epsilon": 3.0}
    DPTrainer(bert(), arguments(**budget), train_dataset=records()).train()
    assert num_charged(tmp_path / "out") == 2
    with pytest.raises(DPBudgetExceeded, match="Raise --target_epsilon"):
        DPTrainer(bert(), arguments(**budget), train_dataset=records()).train()
    assert num_charged(tmp_path / "out") == 2


def test_labels_out_of_range(arguments):
    wrong = [*records(), {**records()[0], "labels": 7}]
    with pytest.raises(DPConfigError, match="outside 0 to 1.*num_labels"):
        DPTrainer(bert(), arguments(), train_dataset=wrong)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_batch(arguments, kind):
    model = bert()
    model.config.rope_parameters = {"full_attention": {"rope_type": kind}}
    with pytest.raises(UnsupportedModuleError, match="longest record.*another rope_type"):
        DPTrainer(model, arguments(), train_dataset=records())


def test_a_model_with_tokens_in_the_first_dimension(arguments, refused):
    config = tf.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=16, num_labels=2)
    args, model, dataset = arguments(), tf.XLNetForSequenceClassification(config), records()
    with refused("XLNet computes with the tokens in the first dimension.*freeze model.transformer"):
        DPTrainer(model, args, train_dataset=dataset)
    model.transformer.requires_grad_(False)  # and the way out works
    DPTrainer(model, args, train_dataset=dataset).train()


def test_float16_parameters(arguments):
    with pytest.raises(UnsupportedModuleError, match="float32 or bfloat16"):
        DPTrainer(bert().half(), arguments(), train_dataset=records())


def test_collators_with_public_coins(arguments):
    collator = tf.default_data_collator
    seeded = type("Seeded", (), {"seed": 3, "__call__": lambda self, rows: collator(rows)})()
    with pytest.raises(DPConfigError, match="seed=None"):
        DPTrainer(bert(), arguments(), train_dataset=records(), data_collator=seeded)
