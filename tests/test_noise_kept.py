"""Correlated noise kept or drawn again: the window of draws, the cost model, and a choice that a resume keeps."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.huggingface import planning
from hf_dpopt.noise import BandedInverse, BandedToeplitz, NuDPFTRL
from hf_dpopt.noise.streams import HistoryStream, Speed, StreamCost, cheapest, measure_speed
from hf_dpopt.plan.choose import fit_backend
from hf_dpopt.randomness.cipher import make_noise_source
from tests import tiny

STEPS, SIZE, KEY = 20, 300, bytes(range(32))
SPEED = Speed(draw_s=10e-9, pass_s=1e-9)  # of about one core of a CPU
FAST = Speed(draw_s=1e-11, pass_s=3e-12)  # of the order of a large GPU, by count; it was not measured


def _stream(strategy, **options):
    return strategy.stream(make_noise_source("secure", KEY), scale=0.7, num_steps=STEPS, **options)


def _noise(stream, steps) -> list[torch.Tensor]:
    found = []
    for step in steps:
        stream.add_(sums := {"w": torch.zeros(SIZE)}, step)
        found.append(sums["w"])
    return found


@pytest.mark.parametrize("bands", [1, 2, 5, STEPS])
def test_a_window_keeps_what_later_steps_use_and_changes_no_bit(bands):
    strategy = BandedInverse.of_nu(bands)
    windowed = _stream(strategy, backend="history")
    whole = HistoryStream(
        strategy.rows(STEPS), make_noise_source("secure", KEY), scale=0.7, num_steps=STEPS,
    )  # fmt: skip
    for one, other in zip(_noise(windowed, range(12)), _noise(whole, range(12)), strict=True):
        assert torch.equal(one, other)
    assert windowed.bytes_kept() == 4 * SIZE * min(bands - 1, 12) and whole.bytes_kept() == 4 * SIZE * 12
    assert strategy.cost(STEPS, backend="history").kept == bands - 1
    resumed = _stream(strategy, backend="history")
    resumed.continue_at(12)
    for one, other in zip(_noise(resumed, range(12, STEPS)), _noise(whole, range(12, STEPS)), strict=True):
        assert torch.equal(one, other)
    assert resumed.bytes_kept() <= 4 * SIZE * max(bands - 1, 1)


def test_noise_without_a_window_keeps_all_its_draws():
    stream = _stream(NuDPFTRL(0.1), backend="history")
    _noise(stream, range(12))
    assert stream.bytes_kept() == 4 * SIZE * 12 and NuDPFTRL(0.1).cost(STEPS, backend="history").kept == STEPS - 1


def test_the_fastest_way_that_fits_is_taken():
    costs = {"keeps": StreamCost(1, 8, 7), "block": StreamCost(2, 8, 2), "again": StreamCost(8, 8, 0)}
    for room_in_copies, want in ((7, "keeps"), (6.9, "block"), (2, "block"), (1.9, "again"), (0, "again")):
        assert cheapest(costs, coordinates=1000, room=4000 * room_in_copies, speed=SPEED) == want
    assert cheapest(costs, coordinates=1000, room=0, speed=Speed(0.0, 0.0)) == "again"
    assert SPEED.seconds(costs["block"], 10**6) == pytest.approx((2 * 10e-9 + 8e-9) * 10**6)


def test_the_speed_of_a_device_is_measured():
    speed = measure_speed(torch.device("cpu"))
    assert 1e-11 < speed.pass_s and 1e-10 < speed.draw_s < 1e-5


def _plan(name: str, **kwargs):
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=10, noise_mechanism=name, noise_kwargs=kwargs
    )
    return make_plan(config, num_examples=200, num_steps=STEPS)


@pytest.mark.parametrize(
    "name, options, copies, way",
    [
        ("banded_inverse", {"num_bands": 5}, 4, {"backend": "history"}),
        ("banded_inverse", {"num_bands": 5}, 3.9, {"backend": "regenerate", "block": 2}),
        ("banded_inverse", {"num_bands": 5}, 1.9, {}),  # its own way is to draw again
        ("banded", {"num_bands": 4}, 3, {}),
        ("banded", {"num_bands": 4}, 2.9, {"backend": "regenerate", "block": 2}),
        ("banded", {"num_bands": 4}, 0, {"backend": "regenerate"}),
        ("honaker", {}, 0, {}),
    ],
)
def test_a_plan_is_given_the_way_that_fits_and_is_otherwise_the_same(name, options, copies, way):
    plan = _plan(name, **options)
    chosen = fit_backend(plan, coordinates=SIZE, room=4 * SIZE * copies, speed=SPEED)
    assert chosen.config.noise_kwargs == {**options, **way}
    assert (chosen.mechanism.backend, chosen.mechanism.block) == (way.get("backend", "auto"), way.get("block", 1))
    assert chosen.epsilon() == plan.epsilon() and chosen.strategy == plan.strategy
    said, before = chosen.record.to_json(), plan.record.to_json()
    assert {key for key in said if said[key] != before[key]} <= {"noise_kwargs"}


def test_bands_at_seven_billion_need_no_second_model():
    """16 bands are 15 copies of the gradient, 420 GB; on a device of 139 GiB beside the model they are drawn again."""
    strategy, coordinates, gb = BandedToeplitz(tuple((i + 1.0) ** -0.5 for i in range(16))), 7 * 10**9, 10**9
    assert 4 * strategy.cost(1000).kept * coordinates == 420 * gb
    costs = {block: strategy.cost(1000, backend="regenerate", block=block) for block in (1, 2, 4)} | {
        0: strategy.cost(1000)
    }
    named = {str(block): cost for block, cost in costs.items()}
    assert cheapest(named, coordinates=coordinates, room=10 * gb, speed=FAST) == "1"
    assert costs[1].kept == 0 and cheapest(named, coordinates=coordinates, room=500 * gb, speed=FAST) == "0"


def test_the_choice_is_recorded_and_a_resume_keeps_it(tmp_path, monkeypatch):
    """Also on a machine where another way would be taken now; the weights are those of the way by its name."""
    options = dict(
        noise_mechanism="banded_inverse", max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2,
        unsafe_fixed_noise_key="0" * 64, private_state_dir=str(tmp_path / "keys"),
    )  # fmt: skip

    def run(folder: str, kwargs, free: int):
        monkeypatch.setattr(planning, "free_bytes", lambda device: free)
        return tiny.trainer(tmp_path / folder, noise_kwargs={"num_bands": 3, **kwargs}, **options)

    whole = run("out", {"backend": "fit"}, 10**12)
    assert whole.plan.config.noise_kwargs == {"num_bands": 3, "backend": "history"}
    whole.train()
    report = json.loads((tmp_path / "out/privacy/report.json").read_text())
    assert report["plan"]["noise_kwargs"] == {"num_bands": 3, "backend": "history"}
    resumed = run("out", {"backend": "fit"}, 0)
    assert resumed.plan.config.noise_kwargs == {"num_bands": 3, "backend": "history"}
    assert run("other", {"backend": "fit"}, 0).plan.config.noise_kwargs == {"num_bands": 3}  # draws again
    shutil.rmtree(tmp_path / "keys")
    named = run("named", {"backend": "history"}, 0)
    named.train()
    assert all(torch.equal(p, tiny.weights(named.model)[n]) for n, p in tiny.weights(whole.model).items())


def test_a_model_that_is_not_there_yet_is_refused(tmp_path, monkeypatch):
    options = dict(noise_mechanism="banded_inverse", noise_kwargs={"num_bands": 2, "backend": "fit"})
    monkeypatch.setattr(planning, "measure_speed", lambda device: SPEED)
    with pytest.raises(DPConfigError, match="Hand over a loaded model"):
        tiny.trainer(tmp_path, model=None, model_init=tiny.model, **options)


def test_where_nothing_is_chosen_the_name_is_refused():
    with pytest.raises(DPConfigError, match="backend='fit'"):
        _plan("banded", num_bands=2, backend="fit")
    with pytest.raises(DPConfigError, match="Independent noise keeps nothing"):
        _plan("gaussian", backend="fit")
