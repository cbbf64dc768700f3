"""The reproductions of arXiv:2310.06771 against closed forms, independent sums and each other."""

from __future__ import annotations

import functools
import json
import sys
import zlib

import numpy as np
import pytest
import torch
from scipy.signal import lfilter

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.noise import BandedInverse, NuDPFTRL, Participation
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from recipes.paper.correlated_noise import exact, figure1, figure2, tables, training
from recipes.paper.runs import log_slope

pytestmark = pytest.mark.slow


def energy(coefs: np.ndarray, curvature: float, eta: float) -> float:
    """Sum of squares of what one draw does to all later iterates on a quadratic: V without its gamma, the slow way."""
    return float(np.sum(lfilter([eta], [1.0, eta * curvature - 1], coefs) ** 2))


# --- Figure 1 ---

RATIOS = {1e-4: 0.002583, 1e-3: 0.016374, 1e-2: 0.090868, 0.1: 0.400491, 0.5: 0.863790, 0.9: 0.994984}


def test_figure_1_has_the_closed_form_ratios():
    rows = {row["eta"]: row for row in figure1.compute()["rows"]}
    for eta, ratio in RATIOS.items():
        assert rows[eta]["ratio"] == pytest.approx(ratio, abs=6e-7)
    assert rows[0.999]["ratio"] == pytest.approx(1.0, abs=1e-6), "not orders of magnitude, as the caption has it"


@pytest.mark.parametrize("eta", [0.02, 0.3])
def test_the_errors_of_mean_estimation_are_those_of_the_coefficients(eta):
    coefs, n = NuDPFTRL(eta).noising_coefs(2000), 2000
    squared = NuDPFTRL(eta).sensitivity(n, Participation()) ** 2
    assert exact.mean_estimation_ftrl(eta) == pytest.approx(squared * energy(coefs, 1.0, eta), rel=1e-9)
    assert exact.mean_estimation_sgd(eta) == pytest.approx(energy(np.eye(1, n)[0], 1.0, eta), rel=1e-9)


def _error_of(spectrum: np.ndarray, eigenvalues: np.ndarray, eta: float) -> float:
    """Excess loss of the noise with power |B|^2 on a grid: from its coefficients, the slow way."""
    n = len(spectrum)
    cepstrum = np.fft.ifft(np.log(spectrum) / 2).real
    cepstrum[1 : n // 2] *= 2
    cepstrum[n // 2 + 1 :] = 0
    coefs = np.fft.ifft(np.exp(np.fft.fft(cepstrum))).real  # causal, with that power
    inverse = lfilter([1.0], coefs, np.eye(1, n)[0])
    gains = np.array([energy(coefs, curvature, eta) for curvature in eigenvalues])
    return exact.excess_loss(float(inverse @ inverse) * gains, eigenvalues, eta)


def test_no_correlation_leaves_less_than_the_best():
    eigenvalues, eta, rng = np.array([1.0, 0.4, 0.15]), 0.2, np.random.default_rng(0)
    best = exact.regression_best(eigenvalues, eta)
    omega = 2 * np.pi * np.arange(4096) / 4096
    weights = [exact.excess_loss(unit, eigenvalues, eta) for unit in np.eye(3)]
    responses = np.abs(1 - eta * eigenvalues[:, None] - np.exp(1j * omega)) ** -2
    optimum = (weights @ responses) ** -0.5
    assert _error_of(optimum, eigenvalues, eta) == pytest.approx(best, rel=1e-6)
    for _ in range(20):
        waves = sum(rng.normal(0, 0.3) * np.cos(k * omega) for k in range(1, 6))
        assert _error_of(optimum * np.exp(waves), eigenvalues, eta) > best * (1 + 1e-4)
    assert exact.regression_nu(eigenvalues, eta) > best > exact.regression_lower_bound(eigenvalues, eta)
    least = eta**2 * responses.min(axis=1)  # a frequency passes no less than this, so no |B|^2 leaves less
    assert exact.regression_lower_bound(eigenvalues, eta) == pytest.approx(weights @ least, rel=1e-9)
    single = exact.regression_best(np.array([1.0]), eta, linearised=True)
    assert single == pytest.approx(exact.mean_estimation_ftrl(eta) / 2, rel=1e-9), "of one coordinate nu = eta is best"


# --- Tables 1 and 2 ---


def test_table_1_has_the_rates():
    """Errors over their rates stay within a constant while the errors themselves vary by factors of 1,000 and more."""
    rows, ranges = (tables.table_1()[key] for key in ("rows", "ranges"))
    for key, low, high in (("lower", 0.124, 0.36), ("sgd", 0.249, 0.72), ("labels", 0.249, 0.72), ("nu", 0.029, 0.31)):
        assert low < ranges[f"{key}_over_rate"][0] <= ranges[f"{key}_over_rate"][1] < high, key
    assert 1 <= ranges["nu_over_best"][0] + 1e-9 and ranges["nu_over_best"][1] < 1.51
    row = next(row for row in rows if (row["d"], row["exponent"], row["eta"]) == (8, 1.0, 0.01))
    eigenvalues, n = exact.power_law(8), 40_000
    coefs = NuDPFTRL(0.01 / 8).noising_coefs(n)
    squared = NuDPFTRL(0.01 / 8).sensitivity(n, Participation()) ** 2
    gains = np.array([[energy(c, h, 0.01) for h in eigenvalues] for c in (np.eye(1, n)[0], squared**0.5 * coefs)])
    sgd, nu = (exact.excess_loss(gain, eigenvalues, 0.01) for gain in gains)
    assert row["sgd_over_nu"] == pytest.approx(sgd / nu, rel=1e-6)
    assert row["sgd_over_rate"] == pytest.approx(sgd / 0.08, rel=1e-6)


@pytest.mark.parametrize("noise", ["private", "labels"])
def test_the_excess_loss_is_that_of_the_recursion_of_second_moments(noise):
    """Independent noise: the covariance has an exact recursion (Isserlis), run until it stands still.

    Noise of labels makes gradients ``xi x`` with xi of variance 1: ``eta^2 H`` a step, without private noise.
    """
    eigenvalues, eta = np.array([1.0, 0.5, 0.2]), 0.3
    h, moment = np.diag(eigenvalues), np.zeros((3, 3))
    added, found = {
        "private": (np.eye(3), exact.regression_sgd(eigenvalues, eta)),
        "labels": (h, exact.excess_loss(exact.noise_gains_labels(eigenvalues, eta), eigenvalues, eta)),
    }[noise]
    for _ in range(2000):
        sampled = 2 * h @ moment @ h + np.trace(h @ moment) * h  # E x x^T M x x^T
        moment = moment - eta * (h @ moment + moment @ h) + eta**2 * (sampled + added)
    assert found == pytest.approx(0.5 * np.trace(h @ moment), rel=1e-9)
    assert exact.regression_sgd(eigenvalues, eta, linearised=True) < 0.8 * exact.regression_sgd(eigenvalues, eta)


GAMMA_SQUARED = {0.1: 1.45184, 0.01: 2.13688, 1e-3: 2.86199, 1e-4: 3.59381}


def test_table_2_has_the_sensitivities_and_slopes():
    numbers = tables.compute()
    for row in numbers["squared_sensitivities"]:
        assert row["nu_dpftrl"] == pytest.approx(GAMMA_SQUARED[row["nu"]], abs=6e-6)
        assert row["nu_dpftrl_from_coefficients"] == pytest.approx(row["nu_dpftrl"], rel=1e-9)
        assert row["damped_anti_pgd_from_coefficients"] == pytest.approx(row["damped_anti_pgd"], rel=1e-9)
    assert numbers["anti_pgd_squared_sensitivity_by_steps"] == {"100": 100.0, "1000": 1000.0, "10000": 10000.0}
    flat = numbers["slopes"]["all 1"]
    assert flat["slope_in_eta"]["sgd"] == pytest.approx(1.0, abs=0.002)
    assert flat["slope_in_eta"]["best_damped_anti_pgd"] == pytest.approx(1.5, abs=0.002)
    assert 1.7 < flat["slope_in_eta"]["nu_dpftrl"] < flat["slope_at_the_smallest_eta"]["nu_dpftrl"] < 2
    damping = numbers["slopes"]["1/k"]["best_damping_over_root_of_eta_mean_eigenvalue"]
    assert all(1.38 < factor < 1.42 for factor in damping)


# --- Figure 2 ---


def test_the_gains_are_sums_of_squares():
    eigenvalues, eta = np.array([1.0, 0.3, 0.1]), 0.2
    for nu in (0.02, 0.5):
        for strategy, gains in (
            (NuDPFTRL(nu), exact.noise_gains_nu),
            (BandedInverse((1.0, nu - 1.0)), exact.noise_gains_damped),
        ):
            coefs, squared = strategy.noising_coefs(3000), strategy.sensitivity(3000, Participation()) ** 2
            slow = [squared * energy(coefs, curvature, eta) for curvature in eigenvalues]
            np.testing.assert_allclose(gains(eigenvalues, eta, nu), slow, rtol=1e-8)
    np.testing.assert_allclose(exact.noise_gains_sgd(eigenvalues, eta), exact.noise_gains_nu(eigenvalues, eta, 1.0))


def test_figure_2_has_the_slopes():
    etas = np.geomspace(0.02, 0.16, 8)
    whole = exact.power_law(128)
    assert log_slope(etas, [exact.regression_sgd(whole, eta) for eta in etas]) == pytest.approx(1.25, abs=0.006)
    assert log_slope(etas, [exact.regression_nu(whole, eta) for eta in etas]) == pytest.approx(2.01, abs=0.006)
    exponents = np.linspace(0.4, 1.0, 7)
    spectra = [exact.power_law(128, a) for a in exponents]
    d_eff = [spectrum.sum() for spectrum in spectra]
    for linearised, sgd, nu in ((False, 0.170, 0.942), (True, 0.001, 0.774)):
        options = {"linearised": linearised}
        assert log_slope(d_eff, [exact.regression_sgd(s, 0.02, **options) for s in spectra]) == pytest.approx(
            sgd, abs=1e-3
        )
        assert log_slope(d_eff, [exact.regression_nu(s, 0.02, **options) for s in spectra]) == pytest.approx(
            nu, abs=1e-3
        )
    dimensions = figure2.DIMENSIONS
    in_d = log_slope(dimensions, [exact.regression_sgd(exact.power_law(d), 0.02) for d in dimensions])
    assert in_d == pytest.approx(1.009, abs=0.003)


@pytest.mark.parametrize("d, eta", [(16, 0.08), (32, 0.16)])
def test_a_short_simulation_has_the_exact_error(d, eta):
    """Standard errors are below 1.5 %; without the noise of sampled x the formula would be 12 % and more too low."""
    eigenvalues = exact.power_law(d)
    found = figure2.simulate(eigenvalues, eta, num_steps=9000, num_runs=32, seed=1)
    for name, formula in (("sgd", exact.regression_sgd), ("nu", exact.regression_nu)):
        mean, error = found[name]
        assert error < 0.02 * mean
        assert mean == pytest.approx(formula(eigenvalues, eta), rel=0.08)
        assert mean > 1.08 * formula(eigenvalues, eta, linearised=True)


# --- training on real text, every row of it in a few steps ---


_plans = functools.cache(training.make)  # of the small setting, for it alone calls this


@pytest.fixture
def few_phrases(tmp_path, monkeypatch):
    """60 phrases of two words, 40 of them to train on and 10 that choose, in epochs of four steps."""
    lines = [f"{'good' if i % 2 else 'bad'} word{i}\t{i % 2}" for i in range(60)]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]), encoding="utf-8")
    small = {"NUM_TRAIN": 40, "NUM_TUNING": 10, "BATCH": 10, "BUCKETS": 32, "WIDTH": 4, "BLOCK": 5, "NUM_SEEDS": 2}
    for name, value in small.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training, "make", _plans)
    return tmp_path


class BagOfWords(torch.nn.Module):
    """The model as torch has it: mean of word vectors, then a linear layer."""

    def __init__(self, weights_D: np.ndarray):
        super().__init__()
        self.embedding = torch.nn.Embedding(training.BUCKETS, training.WIDTH)
        self.head = torch.nn.Linear(training.WIDTH, 2)
        for p, value in zip(self.parameters(), training.parts(weights_D), strict=True):
            p.data = torch.from_numpy(value)

    def forward(self, words_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        summed_BW = (self.embedding(words_BT) * mask_BT[..., None]).sum(dim=1)
        return self.head(summed_BW / mask_BT.sum(dim=1, keepdim=True))


def _random_phrases(seed: int, num: int) -> tuple[list[str], np.ndarray]:
    """Phrases of 0 to 12 words out of 9, so that most of them have one twice; the first has none."""
    rng = np.random.default_rng(seed)
    lengths = [0, *rng.integers(0, 13, num - 1)]
    return [" ".join(f"w{word}" for word in rng.integers(0, 9, size)) for size in lengths], rng.integers(0, 2, num)


def _sum_of_the_engine(phrases, labels, weights_D, clipper) -> np.ndarray:
    words, mask = torch.zeros(len(phrases), 12, dtype=torch.long), torch.zeros(len(phrases), 12)
    for i, phrase in enumerate(phrases):
        buckets = [zlib.crc32(word.encode()) % training.BUCKETS for word in phrase.split()] or [0]
        words[i, : len(buckets)], mask[i, : len(buckets)] = torch.tensor(buckets), 1.0
    model, loss = BagOfWords(weights_D), torch.nn.functional.cross_entropy
    engine = make_engine(model, clipper)
    sums = engine.empty_sum()
    engine.add_clipped_sum(
        sums, lambda: loss(model(words, mask), torch.tensor(labels), reduction="none"), len(phrases)
    )
    found = sums.result()
    return torch.cat([found[name].flatten() for name, _ in model.named_parameters()]).numpy()


@pytest.mark.parametrize("clip", [0.3, 1.0, 100.0])
def test_clipped_sums_of_bags_are_those_of_the_engine(few_phrases, clip):
    clipper = make_clipping("flat", clip)
    for seed in range(5):
        (phrases, labels), weights_D = _random_phrases(seed, 25), 2 * training.initial_weights(seed)
        want = _sum_of_the_engine(phrases, labels, weights_D, clipper)
        got = training.clipped_sum(training.bags(phrases, labels), weights_D, clipper)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_noise_of_a_run_is_that_of_the_stream(few_phrases):
    """Of all steps at once, at draws of stddev 1, as the stream of every mechanism adds it step by step."""
    num_steps, seed = 12, 3
    for name in training.MECHANISMS:
        plan = training.make(name, 8.0, num_steps)
        source = ChaCha20Gaussian(np.random.default_rng([seed, zlib.crc32(name.encode())]).bytes(32))
        stream = plan.mechanism.stream(source, plan.sensitivity)
        noise_TD = training.noise_of_a_run(plan.strategy, name, seed, num_steps)
        for t, row in enumerate(noise_TD):
            sums = {"weights": torch.zeros(len(row))}
            stream.add_(sums, t)
            scale = plan.draw_stddev * plan.sensitivity
            np.testing.assert_allclose(scale * row, sums["weights"].numpy(), rtol=0, atol=1e-5 * scale, err_msg=name)


def test_training_runs_every_row_of_the_table(few_phrases, monkeypatch):
    pytest.importorskip("matplotlib", reason="it is in the extra `plots`")
    monkeypatch.setattr(sys, "argv", [
        "training", "--data", str(few_phrases), "--output_dir", str(few_phrases / "out"), "--num_steps", "12",
        "--epsilons", "8",
    ])  # fmt: skip
    training.main()
    rows = json.loads((few_phrases / "out" / "training.json").read_text())["rows"]
    assert [row["mechanism"] for row in rows] == list(training.MECHANISMS)
    assert all(row["spent"] <= 8 and 0 <= row["accuracy"] <= 100 for row in rows)
    assert [row["mechanism"] for row in rows if "over_dp_sgd" not in row] == ["DP-SGD, amplified"]
    assert [row["mechanism"] for row in rows if "over_best_nu" not in row] == ["best nu"]
    assert (few_phrases / "out" / "training.png").stat().st_size > 10_000
    kept = (few_phrases / "out" / "training_runs.jsonl").read_text()
    monkeypatch.setattr(training, "train", pytest.fail)
    training.main()
    assert (few_phrases / "out" / "training_runs.jsonl").read_text() == kept, "no run is made twice"
