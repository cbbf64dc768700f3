"""`LowPassFilter`: the outputs of scipy.signal.lfilter, step by step, and a state that can be put down at any of them."""

from __future__ import annotations

import json
import secrets
from fractions import Fraction

import numpy as np
import pytest
import scipy.signal
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import PRESETS, LowPassFilter
from hf_dpopt.postprocess.recursion import start_up_gain
from tests.contract import postprocess as contract

# The table of the paper, in fractions; a without its leading 1.
TABLE = {
    "none": ("1", ""),
    "momentum": ("1/10", "-9/10"),
    "first_order_v1": ("1/11 1/11", "-9/11"),
    "first_order_v2": ("3/11 -1/11", "-9/11"),
    "second_order": ("1/58 2/58 1/58", "-92/58 38/58"),
    "f1": ("75/1000 25/1000", "-9/10"),
    "f2": ("25/1000 75/1000", "-9/10"),
    "f3": ("1/10 1/10", "-8/10"),
    "f4": ("2/10 2/10", "-6/10"),
    "f5": ("25/1000 50/1000 25/1000", "-9/10"),
    "f6": ("25/1000 25/1000", "-18/10 85/100"),
}
FILTERS = {
    **{name: LowPassFilter.preset(name) for name in PRESETS},
    **{f"butterworth:{n}:{c}": LowPassFilter.butterworth(n, c) for n in (1, 2, 3, 4) for c in (0.05, 0.2, 0.6)},
    **{f"chebyshev:{n}:{c}": LowPassFilter.chebyshev(n, c, 0.5) for n in (1, 2, 3, 4) for c in (0.05, 0.2, 0.6)},
    "mean of 7": LowPassFilter(b=[1 / 7] * 7),
    "difference": LowPassFilter(b=[3, -2]),
    "many zeros, slow pole": LowPassFilter(b=[0.01] * 5, a=[0.0, -0.95]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _any_seed():
    torch.manual_seed(secrets.randbits(63))


def recordings(num_steps: int, d: int = 24, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A gradient that drifts, under noise, (num_steps, d)."""
    drift = torch.randn(num_steps, d, dtype=torch.float64).cumsum(0) * 0.03 + torch.linspace(-2, 2, d)
    return (drift + 0.3 * torch.randn(num_steps, d)).to(dtype)


def run(low_pass, recorded: torch.Tensor) -> torch.Tensor:
    """Outputs of all steps; the coordinates are spread over three tensors."""
    outputs = []
    for g in recorded:
        filtered = low_pass.update({"b": g[:7].reshape(7, 1), "c": g[7], "a": g[8:].reshape(2, -1)})
        outputs.append(torch.cat([filtered["b"].flatten(), filtered["c"].flatten(), filtered["a"].flatten()]))
    return torch.stack(outputs)


def expected(b, a, recorded: torch.Tensor) -> np.ndarray:
    x = recorded.double().numpy()
    m = scipy.signal.lfilter(b, [1.0, *a], x, axis=0)
    c = scipy.signal.lfilter(b, [1.0, *a], np.ones(len(x)))
    return m / c[:, None]


def relative_error(actual: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.abs(actual.double().numpy() - wanted).max() / np.abs(wanted).max())


def fresh(low_pass: LowPassFilter, **changes) -> LowPassFilter:
    return LowPassFilter(**json.loads(json.dumps(low_pass.parameters())) | changes)


# --- the recursion ---------------------------------------------------------------------------------------------------


@pytest.mark.slow_but(24)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 3e-6)])
def test_equals_lfilter_over_lfilter_of_ones(name, dtype, tolerance):
    """float32 is within 3e-6 of the largest output also for filters whose plain form is off by 1e-3."""
    low_pass = fresh(FILTERS[name])
    recorded = recordings(300, dtype=dtype)
    wanted = expected(low_pass.b, low_pass.a, recorded)
    assert relative_error(run(low_pass, recorded), wanted) < tolerance


def test_random_stable_filters_equal_lfilter():
    seed = secrets.randbits(32)
    rng, tested = np.random.default_rng(seed), 0
    while tested < 40:
        real, pairs = rng.integers(0, 3), rng.integers(0, 3)
        complex_poles = rng.uniform(0, 0.95, pairs) * np.exp(1j * rng.uniform(0, np.pi, pairs))
        poles = np.concatenate([rng.uniform(-0.95, 0.95, real), complex_poles, complex_poles.conj()])
        a = np.atleast_1d(np.real(np.poly(poles)))
        b = np.abs(rng.standard_normal(rng.integers(1, 6)))
        b, a = (b * a.sum() / b.sum()).tolist(), a[1:].tolist()
        if start_up_gain(b, a) > 10:
            continue
        recorded = recordings(120)
        error = relative_error(run(LowPassFilter(b=b, a=a), recorded), expected(b, a, recorded))
        assert error < 1e-6, (seed, b, a)
        tested += 1


def test_coordinates_do_not_depend_on_order_or_grouping():
    recorded, low_pass = recordings(20, dtype=torch.float32), FILTERS["second_order"]
    whole = run(fresh(low_pass), recorded)
    one = fresh(low_pass)
    assert torch.equal(torch.stack([one({"w": g})["w"] for g in recorded]), whole)
    swapped = fresh(low_pass)
    for t, g in enumerate(recorded):
        parts = {"x": g[:5], "y": g[5:]}
        output = swapped(parts if t % 2 else dict(reversed(parts.items())))
        assert torch.equal(torch.cat([output["x"], output["y"]]), whole[t])


def test_bfloat16_gradients_are_filtered_in_float32():
    recorded = recordings(30, dtype=torch.bfloat16)
    low_pass = fresh(FILTERS["second_order"])
    actual = run(low_pass, recorded)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, run(fresh(FILTERS["second_order"]), recorded.float()).bfloat16())
    assert {s.dtype for buffers in low_pass.state_dict()["buffers"].values() for s in buffers} == {torch.float32}


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_paper_has_unit_gain_and_is_stable(name):
    b, a = ([Fraction(x) for x in text.split()] for text in TABLE[name])
    assert sum(b) - sum(a) == 1
    assert all(abs(np.roots([1.0, *map(float, a)])) < 0.93)
    assert PRESETS[name] == (tuple(map(float, b)), tuple(map(float, a)))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_designs_keep_their_specification(order):
    """Butterworth: half the power at the cutoff. Chebyshev: the ripple is all that the gain varies up to there."""
    at = np.linspace(0, 0.3, 4001) * np.pi
    low_pass = LowPassFilter.butterworth(order, 0.3)
    gain = abs(scipy.signal.freqz(low_pass.b, [1, *low_pass.a], worN=at)[1])
    assert gain[0] == pytest.approx(1, abs=1e-9)
    assert gain[-1] == pytest.approx(0.5**0.5, rel=1e-9)
    low_pass = LowPassFilter.chebyshev(order, 0.3, 2.0)
    gain = 20 * np.log10(abs(scipy.signal.freqz(low_pass.b, [1, *low_pass.a], worN=at)[1]))
    assert gain[0] == pytest.approx(0, abs=1e-8)
    assert gain.max() - gain.min() == pytest.approx(2.0, abs=1e-4)


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["none", "momentum", "second_order", "f5", "chebyshev:3:0.2", "mean of 7"])
def test_keeps_the_contract_of_filters(check, name):
    check(lambda: LowPassFilter(b=FILTERS[name].b, a=FILTERS[name].a))


def test_the_state_of_another_filter_is_refused():
    low_pass = LowPassFilter.preset("momentum")
    low_pass({"w": torch.ones(3)})
    state = low_pass.state_dict()
    with pytest.raises(DPConfigError, match=r"b=\[0.1\], a=\[-0.9\].*Continue with the filter"):
        LowPassFilter(b=[0.2], a=[-0.8]).load_state_dict(state)
    with pytest.raises(DPConfigError, match="belongs to another filter"):
        AdaptiveFIR(4, IndependentNoise()).load_state_dict(state)
    with pytest.raises(DPConfigError, match="belongs to another filter"):
        low_pass.load_state_dict(AdaptiveFIR(4, IndependentNoise()).state_dict())


@pytest.mark.parametrize("second", [{"w": torch.ones(3)}, {"w": torch.ones(3), "v": torch.ones(2, 1)},
                                    {"w": torch.ones(3), "v": torch.ones(2), "x": torch.ones(1)}])  # fmt: skip
def test_changed_tensors_are_refused(second):
    for low_pass in (
        LowPassFilter.preset("momentum"),
        LowPassFilter.preset("none"),
        AdaptiveFIR(4, IndependentNoise()),
    ):
        low_pass({"w": torch.ones(3), "v": torch.ones(2)})
        with pytest.raises(DPConfigError, match="Give it the gradients of the same parameters"):
            low_pass(second)


def test_the_names_are_those_of_the_state():
    low_pass = LowPassFilter.preset("momentum")
    low_pass({"w": torch.ones(3)})
    resumed = LowPassFilter.preset("momentum")
    resumed.load_state_dict(low_pass.state_dict())
    with pytest.raises(DPConfigError, match="1 are now missing, new or of another shape: w"):
        resumed({"w": torch.ones(4)})


# --- choosing one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, wanted", [
    *((name, LowPassFilter.preset(name)) for name in PRESETS),
    ("butterworth:2:0.1", LowPassFilter.butterworth(2, 0.1)),
    (" chebyshev:3:0.1:0.5 ", LowPassFilter.chebyshev(3, 0.1, 0.5)),
    ("b=0.1;a=-0.9", LowPassFilter.preset("momentum")),
    ("b=1/58, 2/58, 1/58; a=-92/58, 38/58", LowPassFilter.preset("second_order")),
    ("b=0.5,5e-1", LowPassFilter(b=[0.5, 0.5])),
])  # fmt: skip
def test_parse(text, wanted):
    assert LowPassFilter.parse(text).parameters() == wanted.parameters()


def test_parse_adaptive():
    noise = IndependentNoise(0.5)
    low_pass = LowPassFilter.parse("adaptive:8", noise)
    assert isinstance(low_pass, AdaptiveFIR) and not low_pass.as_printed
    assert (low_pass.taps, low_pass.noise) == (8, noise)
    printed = LowPassFilter.parse("adaptive_as_printed:8", noise)
    assert isinstance(printed, AdaptiveFIR) and printed.as_printed
    assert (printed.taps, printed.refresh_every) == (8, 10)
    assert LowPassFilter.parse("adaptive_as_printed:4:7", noise).parameters() == {
        "taps": 4, "refresh_every": 7, "as_printed": True,
    }  # fmt: skip
    with pytest.raises(DPConfigError, match="needs the noise level.*noise=..."):
        LowPassFilter.parse("adaptive:8")


@pytest.mark.parametrize("text", [
    "", "Momentum", "butterworth", "butterworth:2", "butterworth:2:0.1:3", "butterworth:two:0.1", "butterworth:2.5:0.1",
    "chebyshev:2:0.1", "adaptive", "adaptive:x", "adaptive_as_printed", "b=0.1", "a=-0.9", "b=0.1;a=-0.9;c=1", "b=;a=-0.9", "b=1/0", "b=0.1 a=-0.9",
])  # fmt: skip
def test_unknown_texts_are_refused_with_what_is_allowed(text):
    allowed = (
        "Divide b by" if text == "b=0.1" else r"second_order.*butterworth:ORDER:CUTOFF.*adaptive:TAPS.*'b=0.1;a=-0.9'"
    )
    with pytest.raises(DPConfigError, match=allowed):
        LowPassFilter.parse(text, IndependentNoise())


@pytest.mark.parametrize("b, a, message", [
    ([0.1], [-1.1], r"a pole at 1\.1, of modulus 1\.1.*without its leading 1"),
    ([1.0], [-1.0], r"a pole at 1, of modulus 1,"),
    ([2.0], [1.0], "a pole at -1, of modulus 1,"),
    ([4.0], [2.0, 1.0], "of modulus 1,"),
    ([0.06], [-2.0, 1.06], r"a pole at 1[+-]0\.244949j, of modulus 1\.02956"),
    ([0.1], [1.0, -0.9], "not stable"),
    ([0.2], [-0.9], r"gain 2 at frequency 0.*Divide b by 2\."),
    ([0.1 + 2e-9], [-0.9], r"gain 1\.00000002 at frequency 0"),  # more than 1e-9 away
    ([1.0, -1.0], [], "gain 0 at frequency 0.*must not add up to 0"),
    ([], [], "gain 0 at frequency 0"),
    ([0.0, 1.0], [], r"is not positive in every step\. Use a b\[0\] > 0 \(it is 0\)"),
    ([1.0, -2.0, 2.0], [], "is not positive in every step"),
    ([1.0, -0.99, 0.99], [], r"the noise is multiplied by 141"),
    ([float("nan")], [], "must be finite"),
])  # fmt: skip
def test_coefficients_that_are_refused(b, a, message):
    with pytest.raises(DPConfigError, match=message):
        LowPassFilter(b=b, a=a)


@pytest.mark.parametrize("make, message", [
    (lambda: LowPassFilter.preset("f7"), "Use one of: 'none', 'momentum'"),
    (lambda: LowPassFilter.butterworth(0, 0.1), "an integer >= 1"),
    (lambda: LowPassFilter.butterworth(2.0, 0.1), "an integer >= 1"),
    (lambda: LowPassFilter.butterworth(2, 1.0), r"outside \(0, 1\).*Nyquist"),
    (lambda: LowPassFilter.butterworth(2, 0), r"outside \(0, 1\)"),
    (lambda: LowPassFilter.chebyshev(2, 0.1, 0.0), "ripple=0.0 is out of range"),
    (lambda: LowPassFilter.butterworth(8, 0.01), "too narrow for its order.*Take a lower order or a higher cutoff"),
])  # fmt: skip
def test_designs_that_are_refused(make, message):
    with pytest.raises(DPConfigError, match=message):
        make()
