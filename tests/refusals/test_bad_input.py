"""Bad input ends in a run or in one line, at once, before anything is charged; so do the faults that it once met."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
import traceback

import numpy as np
import pytest
import torch

from hf_dpopt import DPBudgetExceeded, DPConfigError, PrivacyConfig, UnsupportedModuleError, make_plan
from hf_dpopt.plan.options import GROUPS
from hf_dpopt.run.ledger import LEDGER
from tests.helpers import tiny
from tests.refusals import odd

BUDGET = {"noise_multiplier": None}
PLACES = ("private_state_dir", "earlier_runs")  # never outside of the test's folder
OWN = [f.name for group in GROUPS for f in dataclasses.fields(group) if f.name not in PLACES]
SECONDS = 5.0

ARGUMENTS = {  # what was given -> what is said
    "a budget of 1e-300": ({**BUDGET, "target_epsilon": 1e-300}, "target_epsilon=1e-300 is outside 0.0001 to 1e"),
    "a budget of 1e301": ({**BUDGET, "target_epsilon": 1e301}, "target_epsilon=1e[+]301 is outside"),
    "delta 0.999": ({"target_delta": 0.999, "allow_large_delta": True}, "target_delta=0.999 is above 0.5"),
    "noise 1e300": ({"noise_multiplier": 1e300}, "noise_multiplier=1e[+]300 is outside 1e-09 to 1e[+]09"),
    "noise 1e-300": ({"noise_multiplier": 1e-300}, "noise_multiplier=1e-300 is outside"),
    "a number of 400 digits": ({"clipping_norm": 10**400}, "clipping_norm=1000.* is not a finite number"),
    "bad JSON": ({"noise_kwargs": '{"num_buffers": '}, "noise_kwargs=.* is not JSON [(]Expecting value"),
    "deep JSON": ({"preconditioner_kwargs": '{"a": ' * 2000}, "is not JSON [(](too many brackets|Expecting value)"),
    "bad JSON of transformers": ({"lr_scheduler_kwargs": "{'a': 1}"}, "lr_scheduler_kwargs=.* is not JSON"),
    "JSON of a number": ({"preconditioner_kwargs": "1"}, "preconditioner_kwargs='1' is no mapping"),
    "no JSON of accelerate": ({"accelerator_config": "nonsense"}, "accelerator_config='nonsense' is no mapping"),
    "no key of accelerate": (
        {"accelerator_config": {"a": 1}},
        "accelerator_config=.* 'a' is no key of it. Its keys: di",
    ),
    "no JSON of FSDP": ({"fsdp_config": "nonsense"}, "fsdp_config='nonsense' is no mapping"),
    "no key of a schedule": (
        {"lr_scheduler_kwargs": {"a": 1}},
        "lr_scheduler_kwargs=.* 'a' is no key of it.* none: le",
    ),
    "an unknown tracker": ({"report_to": "nonsense"}, "report_to='nonsense' is unknown. Use one of: "),
    "an evaluation batch of 0": ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0 is out of range"),
    "99 buffers": ({"noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 99}}, "num_buffers=99 is more than 16"),
    "1e9 epochs": ({"max_steps": -1, "num_train_epochs": 1e9}, "1e[+]09 epochs of 4 steps are more than 10,000,000"),
    "1e9 steps": ({"max_steps": 10**9}, "num_steps=1000000000 is more than 10,000,000"),
    "long noise": ({"max_steps": 10**6, "noise_mechanism": "tree"}, "num_steps=1000000 .*noise_restart_every=100000"),
    "a long matrix": ({"max_steps": 3000, "noise_mechanism": "dense"}, "num_steps=3000 .*noise_restart_every=2048"),
    "a long transform": ({"max_steps": 5000, "noise_mechanism": "fft"}, "num_steps=5000 .*noise_restart_every=4096"),
    "no steps": ({"max_steps": 0}, "max_steps=0 takes no step"),
    "a physical batch of False": ({"per_device_train_batch_size": False}, "batch_size=False is of type bool"),
    "a physical batch of 0": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 is out of range"),
    "an array for a choice": ({"clipping": np.zeros(0)}, "clipping=array.* is of type ndarray. Use a text"),
    "an unknown declaration": ({"eval_data_privacy": "maybe"}, "eval_data_privacy='maybe' is unknown"),
    "a rate of -1": ({"learning_rate": -1.0}, "learning_rate=-1.0 is out of range"),
    "a rate of NaN": ({"learning_rate": math.nan}, "learning_rate=nan is not a finite number"),
    "betas of None": ({"adam_beta1": None}, "adam_beta1=None is of type NoneType. Use a number"),
    "a text for a number": ({"public_batch_size": "two"}, "public_batch_size='two' is of type str"),
    "folders in a number": ({"earlier_runs": -2.0}, "earlier_runs=-2.0 is of type float"),
    "an option without a value": ({"optim": "adafactor", "optim_args": "rank"}, "`optim_args` has 'rank', which"),
    "an order of 1e6": ({"filter": "butterworth:1000000:0.1"}, "order=1000000 is more than 20"),
    "1e6 taps": ({"filter": "adaptive:1000000"}, "taps=1000000 is more than 256"),
    "a ripple of 1e300": ({"filter": "chebyshev:2:0.1:1e300"}, "ripple=1e[+]300 is out of range"),
}


@pytest.fixture(autouse=True)
def _at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # files that an option names go there
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


def _refused(folder, match, error=DPConfigError, **changes):
    with pytest.raises(error, match=match) as found:
        tiny.trainer(folder / "out", **changes).train()
    text = str(found.value)
    assert "\n" not in text and len(text) < 1200
    assert not list(folder.rglob("ledger*")) or not _charged(folder)


def _charged(folder):
    lines = (folder / "out" / LEDGER).read_text().splitlines() if (folder / "out" / LEDGER).exists() else []
    return sum(json.loads(line)["kind"] == "step" for line in lines)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_options(name, tmp_path):
    changes, match = ARGUMENTS[name]
    _refused(tmp_path, match, **changes)


MODELS = {  # name among the odd ones -> what is said
    "NaN in one weight": "layer.0.output.dense.weight holds NaN or infinity",
    "inf in one weight": "layer.0.output.dense.weight holds NaN or infinity",
    "NaN in a frozen weight": "dense.weight holds NaN or infinity",
    "on no device": "has no values yet",
    "a lazy layer": "extra.weight has no values yet",
    "in inference mode": "was made in torch.inference_mode",
    "a text": "model='bert-base-uncased' is no model",
    "None": "model=None is no model",
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    _refused(tmp_path, MODELS[name], (DPConfigError, UnsupportedModuleError), model=odd.MODELS[name]())


DATA = {
    ("train_dataset", "a text"): "train_dataset='train.csv' is no dataset",
    ("train_dataset", "of length None"): "The length of train_dataset cannot be told",
    ("train_dataset", "of 1e12 records"): "The length of train_dataset=1000000000000 is more than",
    ("public_dataset", "an iterator"): "`public_dataset` is a stream",
    ("data_collator", "sparse tensors"): "The collator returns 'input_ids' as a tensor of layout torch.sparse",
    ("data_collator", "returns lists"): "The batch has no tensor with a row per record",
}


@pytest.mark.parametrize("where, name", DATA)
def test_data(where, name, tmp_path):
    given = odd.COLLATORS[name] if where == "data_collator" else odd.DATASETS[name]()
    _refused(tmp_path, DATA[where, name], **{where: given})


def test_a_number_of_no_dimension(tmp_path):
    rows = odd.every(input_ids=torch.tensor(1))
    _refused(tmp_path, "The collator fails on two training records", train_dataset=rows)


@pytest.mark.parametrize("where", [5, ["x"], ""])
def test_a_checkpoint_that_is_none(where, tmp_path):
    with pytest.raises(DPConfigError, match="is no checkpoint to resume from.*resume_from_checkpoint=True takes"):
        tiny.trainer(tmp_path / "out").train(resume_from_checkpoint=where)


@pytest.mark.parametrize(
    ("steps", "changes"),
    [(3 * 10**5, {}), (10**7, {"sampling": "fixed_order"}), (10**5, {"noise_mechanism": "nu_dpftrl"})],
)
def test_long_runs_on_many_records_are_planned(steps, changes):
    plan = make_plan(
        PrivacyConfig(noise_multiplier=1.0, expected_batch_size=1024, **changes), num_examples=10**8, num_steps=steps
    )
    assert 0 < plan.epsilon() < math.inf


# --- anything else that is odd: it runs, or is refused in one line ---


def _ends_well(folder, **changes):
    """Take a step, or be told in one line of ours, or by a refusal of transformers; nothing is charged for an error."""
    try:
        tiny.trainer(folder / "out", callbacks=[tiny.StopAt(1)], **changes).train()
    except (DPConfigError, DPBudgetExceeded) as refusal:
        assert 10 <= len(str(refusal)) <= 1200 and "\n" not in str(refusal)
    except (ValueError, ImportError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "/transformers/" not in last.filename or not (last.line or "").startswith("raise "):
            raise
    else:
        return
    assert not _charged(folder)


@pytest.mark.slow_but(12)
@pytest.mark.parametrize("name", OWN)
def test_an_option_of_any_value(name, tmp_path):
    """Three values that no option expects, the same in every run."""
    for number, value in enumerate(random.Random(name).sample(odd.OPTIONS, 3)):
        changes = {"noise_multiplier": None} if name == "target_epsilon" else {}
        _ends_well(tmp_path / str(number), **changes | {name: value})


PIECES = [(table, name) for table in ("DATASETS", "COLLATORS", "MODELS") for name in getattr(odd, table)]


@pytest.mark.slow_but(12)
@pytest.mark.parametrize("table, name", PIECES)
def test_a_dataset_a_collator_or_a_model_of_any_kind(table, name, tmp_path):
    where = {"DATASETS": "train_dataset", "COLLATORS": "data_collator", "MODELS": "model"}[table]
    piece = getattr(odd, table)[name]
    _ends_well(tmp_path, skip_self_check=len(name) % 2 == 0, **{where: piece if table == "COLLATORS" else piece()})


@pytest.mark.slow_but(12)
@pytest.mark.parametrize("number", range(len(odd.VALUES)))
@pytest.mark.parametrize("name", ["input_ids", "label"])
def test_a_record_with_any_value(name, number, tmp_path):
    _ends_well(tmp_path, train_dataset=odd.changed(5, **{name: odd.VALUES[number]}))
