"""AdaGrad in a public subspace: a slow loop, noise, sensitivity, composition, one charge, words, refusals, resume."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy import optimize, stats

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex import adagrad, clip_features, make_head_plan, make_subspace_plan
from hf_dpopt.convex.adagrad import SubspaceDescent
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.verify import verify
from tests.convex.heads import K, M, N, begin, clipped, data, plain, run
from tests.convex.heads import in_subspace as config
from tests.reference.gaussian_mixtures import gaussian_delta

ALPHA = 1e-6  # false alarms, whatever the key


@pytest.fixture
def released(monkeypatch):
    """Noisy coordinates that a run's steps are made of, in their order."""
    seen = []
    move = SubspaceDescent.move

    def note(self, coordinates, step):
        seen.append(coordinates.clone())
        move(self, coordinates, step)

    monkeypatch.setattr(SubspaceDescent, "move", note)
    return seen


# --- the run, against p x p matrices in numpy ---


def record_gradient(x, y, w):
    """``(softmax(W x) - y) x^T`` as a vector, by itself."""
    logits = w @ x
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[y] -= 1
    return np.outer(p, x).ravel()


def top_directions(public, w, rank):
    """Right singular vectors of the public gradients, (p, f), signed so that the first record's largest share is > 0."""
    matrix = np.array([record_gradient(x, y, w) for x, y in zip(*public, strict=True)])
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    found = min(rank, np.linalg.matrix_rank(matrix, tol=1e-5 * values[0]))
    signs = [np.sign(column[np.abs(column).argmax()]) for column in left.T[:found]]
    return (right[:found] * np.array(signs)[:, None]).T


def closest_in_norm(point, h, radius):
    if np.linalg.norm(point) <= radius:
        return point
    eye = np.eye(len(point))

    def excess(log_multiplier):
        return np.linalg.norm(np.linalg.solve(h + np.exp(log_multiplier) * eye, h @ point)) - radius

    return np.linalg.solve(h + np.exp(optimize.brentq(excess, -60, 60, xtol=1e-13)) * eye, h @ point)


def raised(h, least):
    """The symmetric matrix with its eigenvalues raised to at least that, everywhere in p dimensions."""
    values, vectors = np.linalg.eigh(h)
    return vectors * np.maximum(values, least) @ vectors.T


def goe(normals, size):
    """A symmetric matrix: the diagonal as drawn, every other entry once, divided by sqrt(2); lower triangle by rows."""
    drawn, b = iter(normals), np.zeros((size, size))
    for i in range(size):
        for j in range(i + 1):
            b[i, j] = b[j, i] = next(drawn) / (1 if i == j else math.sqrt(2))
    return b


def slow_loop(asked, private, public, batches, noise):
    """Mean of the iterates: everything in p dimensions, a record at a time; `noise` gives the normals of a step.

    Algorithm 1 line by line for adagrad="clean": u_t, S_t, G_t = S_t^(1/2), H_t = G_t + B_t, a step with H_t^-1, the
    projection in its norm, the mean; with stddevs by hand from the two shares of the budget of a step.
    """
    (x, y), w, n = private, np.zeros((K, private[0].shape[1])), asked.expected_batch_size
    mean, rows, moment = np.zeros(w.size), np.zeros((0, w.size)), np.zeros((w.size, w.size))
    longest = math.sqrt(2) * asked.feature_norm
    for step in range(1, asked.num_steps + 1):
        if (step - 1) % asked.refresh_every == 0:
            v = top_directions(public, w, asked.rank)
            moment, rows = v @ v.T @ moment @ v @ v.T, rows @ v @ v.T
        f, gradient, most = v.shape[1], np.zeros(w.size), longest * step**-asked.envelope
        for i in batches(step):
            g = record_gradient(x[i], y[i], w)
            gradient += g * min(1, most / np.linalg.norm(g))
        share = asked.matrix_share if asked.adagrad == "clean" else 0
        stddev = asked.noise_multiplier * most / math.sqrt(1 - share)
        normals = noise(step, f + f * (f + 1) // 2 if share else f)
        clean = v @ (v.T @ gradient) / n
        u = clean + v @ (stddev * normals[:f]) / n
        if asked.adagrad == "clean":
            rows = np.vstack([rows, clean])
            moved = math.sqrt(2 * sum((longest * s**-asked.envelope) ** 2 for s in range(1, step + 1)))
            stddev = asked.noise_multiplier * moved / math.sqrt(share) / n
            _, values, right = np.linalg.svd(rows, full_matrices=False)
            h = (right.T * values) @ right + v @ (stddev * goe(normals[f:], f)) @ v.T
            h = raised((h + h.T) / 2, max(math.sqrt(asked.eps), stddev * math.sqrt(2 * f)))
        elif asked.adagrad == "released":
            moment += np.outer(u, u)
            h = scipy.linalg.sqrtm(moment + asked.eps * np.eye(w.size)).real
        else:
            h = np.eye(w.size)
        w = closest_in_norm(w.ravel() - asked.step_size * np.linalg.solve(h, u), h, asked.head_radius).reshape(w.shape)
        mean += w.ravel() / asked.num_steps
    return mean.reshape(w.shape)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"refresh_every": 1},
        {"refresh_every": 100, "has_bias": False},
        {"expected_batch_size": 60},
        {"noise_multiplier": 0.0, "learning_rate": 1.0},
        {"rank": 1, "refresh_every": 3, "head_radius": 0.2, "learning_rate": 0.4},  # out of the ball in most steps
        {"rank": 6, "refresh_every": 2, "head_radius": 0.2, "learning_rate": 0.3},
        {"rank": 18},  # of the 21 coordinates, public gradients span 14
        {"adagrad": "clean"},
        {"adagrad": "clean", "refresh_every": 1, "matrix_share": 0.6, "noise_multiplier": 1.0},
        {"adagrad": "clean", "refresh_every": 4, "rank": 6, "noise_multiplier": 0.05, "eps": 1e-8},  # H mostly signal
        {"adagrad": "clean", "rank": 18, "noise_multiplier": 0.0, "learning_rate": 0.5},
        {"adagrad": "clean", "head_radius": 0.2, "learning_rate": 0.4, "envelope": 0.5},
        {"adagrad": "none", "learning_rate": 0.5},
        {"envelope": 0.3, "expected_batch_size": 60},
    ],
)
def test_a_run_equals_a_slow_loop(tmp_path, keys, changes):
    asked = config(**changes)
    private, public = clipped(asked), clipped(asked, M, seed=7)
    made, weights = run(tmp_path, asked)
    source = ChaCha20Gaussian(keys[0].noise_key)
    slow = slow_loop(
        asked,
        [values.double().numpy() if values.is_floating_point() else values.numpy() for values in private],
        [values.double().numpy() if values.is_floating_point() else values.numpy() for values in public],
        lambda step: made.plan.sampler.draw(keys[0].sampling_key, step),
        lambda step, size: source.normal((size,), step=step, tensor=0).double().numpy(),
    )
    assert 0.001 < np.linalg.norm(slow) / asked.head_radius < 1
    np.testing.assert_allclose(weights.double().numpy(), slow, rtol=1e-4, atol=1e-5 * asked.head_radius)


def test_full_batches_have_all_records_and_directions_that_were_not_found_have_no_noise(tmp_path, released):
    asked = config(rank=18)
    made, _ = run(tmp_path, asked)
    assert len(made.plan.sampler.draw(bytes(32), 3)) == N
    assert {len(coordinates) for coordinates in released} == {14}  # (labels - 1) x features, with the constant one


def test_iterates_stay_in_the_ball_and_reach_it(tmp_path, monkeypatch):
    norms = []
    project = adagrad.project_in_norm

    def note(*args, **kwargs):
        found = project(*args, **kwargs)
        norms.append(float(found.norm()))
        return found

    monkeypatch.setattr(adagrad, "project_in_norm", note)
    _, weights = run(tmp_path, config(head_radius=0.1, learning_rate=0.2, noise_multiplier=40.0))
    assert len(norms) == 12 and max(norms) == pytest.approx(0.1, rel=1e-12) and max(norms) <= 0.1 * (1 + 1e-15)
    assert float(weights.norm()) < 0.1


# --- what a release is ---


def test_releases_are_independent_normals_of_the_stated_stddev(tmp_path, released):
    """Features of nothing but zeros, so the releases are noise. Power: 5 % of the stddev; a correlation of 5 %."""
    asked = config(num_steps=800, rank=30, refresh_every=400, has_bias=False, noise_multiplier=0.7)
    raw, labels = data(40, seed=7, width=30)
    public = (clip_features(raw, asked.feature_norm), labels)
    run(tmp_path, asked, private=(torch.zeros(N, 30), data()[1]), public=public)
    white_Tk = torch.stack(released) / (0.7 * math.sqrt(2) * 2.0)
    low, high = stats.chi2.ppf([ALPHA / 2, 1 - ALPHA / 2], df=white_Tk.numel())
    assert white_Tk.shape == (800, 30) and low < float(white_Tk.square().sum()) < high
    for one, other in ((white_Tk[1:], white_Tk[:-1]), (white_Tk[:, 1:], white_Tk[:, :-1])):
        limit = stats.norm.isf(ALPHA / 2) * 1.01 * math.sqrt(one.numel())  # the sum of products is nearly normal
        assert abs(float((one * other).sum())) < limit


@pytest.mark.parametrize("adagrad, envelope", [("released", 0.0), ("released", 0.5), ("clean", 0.0), ("clean", 0.5)])
def test_a_record_more_moves_a_release_by_its_bound_at_most(adagrad, envelope):
    """Leave one out of all steps, at weights and directions of later ones, too; the same releases before."""
    asked = config(has_bias=False, adagrad=adagrad, envelope=envelope)
    features, labels = clipped(asked)
    kept = [torch.arange(N) != i for i in (-1, *range(0, N, 10))]  # all records first
    descents = [descend_from(asked, clipped(asked, M, seed=7)) for _ in kept]
    torch.manual_seed(0)
    for step in range(1, 13):
        whole, *others = (
            descent.query(features[rows], labels[rows], step) for descent, rows in zip(descents, kept, strict=True)
        )
        assert all(float((whole - without).norm()) <= asked.lipschitz * (1 + 1e-9) for without in others)
        assert max(float((whole - without).norm()) for without in others) > 0.05 * asked.lipschitz
        noise = 40 * torch.randn(len(whole), dtype=torch.float64)
        for descent in descents:
            descent.move(whole + noise, step)


def descend_from(asked, public):
    return SubspaceDescent(asked, K, public, noise_multiplier=asked.noise_multiplier or 0.0)


def test_a_record_alone_reaches_the_bound():
    asked = config(rank=1, head_radius=1e6, has_bias=False)
    features, label = clipped(asked)[0], torch.tensor([0])
    record = features[:1] * (2 / features[:1].norm())
    descent = descend_from(asked, (record, label))
    descent.weights = torch.tensor([[-30.0], [30.0], [-30.0]]).double() * record.double()
    descent._refresh()
    assert float(descent.query(record, label, 1).norm()) == pytest.approx(asked.lipschitz, rel=1e-6)


def matrix_of(asked, gradients, step):
    """Query of a "clean" run whose un-noised coordinates are these, with gradients that pass as they are; its matrix."""
    descent = object.__new__(SubspaceDescent)
    descent._config, descent._moment = asked, torch.zeros(asked.rank, asked.rank, dtype=torch.float64)
    descent._directions = lambda: torch.eye(asked.rank, dtype=torch.float64)
    descent.weights = None
    for t, row in enumerate(gradients, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adagrad, "gradient_sum", lambda *_, row=row: row)
            query = descent.query(None, None, t)
    assert t == step
    return query


@pytest.mark.parametrize("envelope", [0.0, 0.5])
def test_adversarial_records_reach_the_bound_of_the_matrix_and_none_exceeds_it(envelope):
    """All gradients long and alike, and the record's across: |X| turns with them, by the factor sqrt(2) to the digit."""
    asked = config(rank=3, refresh_every=100, adagrad="clean", matrix_share=0.5, envelope=envelope)
    bounds = torch.tensor([asked.lipschitz * t**-envelope for t in range(1, 10)], dtype=torch.float64)
    x, e = torch.zeros(9, 3, dtype=torch.float64), torch.zeros(9, 3, dtype=torch.float64)
    x[:, 0], e[:, 1] = 1e5 * bounds, bounds
    moved = (matrix_of(asked, x + e, 9) - matrix_of(asked, x, 9)).norm()
    assert 0.9999 * asked.lipschitz < float(moved) <= asked.lipschitz * (1 + 1e-6)
    rng = torch.Generator().manual_seed(1)
    for _ in range(200):  # and any others
        x, e = (torch.randn(9, 3, generator=rng, dtype=torch.float64) for _ in range(2))
        e *= (bounds / e.norm(dim=1)).unsqueeze(1)
        moved = (matrix_of(asked, 3 * x + e, 9) - matrix_of(asked, 3 * x, 9)).norm()
        assert float(moved) <= asked.lipschitz * (1 + 1e-9)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("seed", range(3))
def test_optimised_neighbours_do_not_exceed_the_bound_of_the_matrix(seed):
    """Gradient ascent on ``|| |X + E| - |X| ||_F`` from random starts: near ``sqrt(2) |E|``, never above."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    e = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    optimizer, most = torch.optim.Adam([x, e], lr=0.05), 0.0

    def root(y):  # with a ridge, so that its gradient exists
        values, vectors = torch.linalg.eigh(y.T @ y + 1e-9 * torch.eye(3, dtype=torch.float64))
        return vectors * values.clamp(min=1e-12).sqrt() @ vectors.T

    def absolute(y):
        _, values, right = torch.linalg.svd(y)
        return right.T * values @ right

    for _ in range(400):
        unit = e / e.norm()
        optimizer.zero_grad()
        (-(root(x + unit) - root(x)).norm()).backward()
        optimizer.step()
        with torch.no_grad():
            moved = float((absolute(x + e / e.norm()) - absolute(x)).norm())
        assert moved <= math.sqrt(2) * (1 + 1e-9)
        most = max(most, moved)
    assert most > 0.75 * math.sqrt(2)  # the search found something


def test_the_matrix_and_its_vector_have_one_norm_and_small_directions_keep_their_digits():
    """Isotropic noise on the vector is noise of the Gaussian orthogonal ensemble; a root of S is off by 1e-8 of it."""
    matrix = torch.randn(5, 5, dtype=torch.float64)
    vector = adagrad.symmetric_to_vector(matrix + matrix.T)
    assert float(vector.norm()) == pytest.approx(float((matrix + matrix.T).norm()), rel=1e-12) and len(vector) == 15
    torch.testing.assert_close(adagrad.vector_to_symmetric(vector, 5), matrix + matrix.T)
    asked = config(rank=3, refresh_every=100, adagrad="clean", matrix_share=0.5)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    query = matrix_of(asked, torch.tensor([[1e5, 0, 0], [0, 1e-4, 0]], dtype=torch.float64) @ turn, 2)
    found = adagrad.vector_to_symmetric(query[3:] / asked.query_scales(2)[1], 3)
    want = turn.T @ torch.diag(torch.tensor([1e5, 1e-4, 0], dtype=torch.float64)) @ turn
    torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("adagrad", ["released", "clean"])
def test_what_is_done_with_releases_looks_at_no_record(adagrad):
    """Two datasets, the same releases: the same weights, directions and matrices, to the bit."""
    asked, public = config(adagrad=adagrad), clipped(config(), M, seed=7)
    ends = []
    for seed in (0, 1):
        descent, rng = descend_from(asked, public), torch.Generator().manual_seed(5)
        features, labels = clipped(asked, seed=seed)
        for step in range(1, 13):
            query = descent.query(features, labels, step)
            descent.move(10 * torch.randn(len(query), generator=rng, dtype=torch.float64), step)
        ends.append((descent.weights, descent.result, *([] if adagrad == "clean" else [descent._moment])))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


# --- what it costs ---


def test_epsilon_is_that_of_all_gaussian_releases():
    """Full batches: T Gaussian mechanisms are one of sqrt(T) / z, whose delta is known in closed form."""
    plan = make_subspace_plan(config(num_steps=25, noise_multiplier=5.0), num_examples=N)
    assert gaussian_delta(math.sqrt(25) / 5.0, plan.epsilon()) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_delta(math.sqrt(50) / 5.0, plan.epsilon(2)) == pytest.approx(1e-5, rel=1e-6)
    asked = make_subspace_plan(config(noise_multiplier=None, target_epsilon=2.0, num_steps=100), num_examples=N)
    assert 2.0 * (1 - 1e-6) < asked.epsilon() <= 2.0
    assert gaussian_delta(10 / asked.noise_multiplier, 2.0) == pytest.approx(1e-5, rel=1e-4)
    off = make_subspace_plan(config(noise_multiplier=0.0), num_examples=N)
    assert math.isinf(off.epsilon()) and not off.is_private and off.public_dict()["epsilon"] is None


def test_epsilon_of_a_clean_matrix_is_that_of_both_queries_of_every_step():
    """Accounted anew from the noise that is added: T gradients and T matrices, each a Gaussian mechanism by itself."""
    for envelope in (0.0, 0.4):
        plan = make_subspace_plan(config(adagrad="clean", matrix_share=0.2, envelope=envelope), num_examples=N)
        longest, mu_squared = plan.config.lipschitz, 0.0
        for t in range(1, 13):
            scale, matrix_scale = plan.config.query_scales(t)
            stddev = plan.noise_multiplier * longest
            mu_squared += (longest * t**-envelope / (stddev / scale)) ** 2
            moved = math.sqrt(2 * sum((longest * s**-envelope) ** 2 for s in range(1, t + 1)))
            mu_squared += (moved / (stddev / matrix_scale)) ** 2
        assert gaussian_delta(math.sqrt(mu_squared), plan.epsilon()) == pytest.approx(1e-5, rel=1e-6)
        same = make_subspace_plan(config(), num_examples=N)
        assert plan.epsilon() == same.epsilon()  # the share is a share: nothing is added


@pytest.mark.slow
def test_poisson_batches_cost_what_their_composition_costs():
    """The number that the head by projected SGD has for all its iterates together."""
    changes = dict(expected_batch_size=30, num_steps=50, noise_multiplier=1.0)
    plan = make_subspace_plan(config(**changes), num_examples=N)
    other = make_head_plan(plain(**changes), num_examples=N)
    assert plan.epsilon() == pytest.approx(other.spent.composition, rel=1e-3)
    assert make_subspace_plan(
        config(**{**changes, "noise_multiplier": None}, target_epsilon=3.0), num_examples=N
    ).epsilon() == pytest.approx(3.0, rel=5e-3)


def test_the_bound_on_the_last_iterate_is_never_used():
    """With a small ball and many steps it would be far below; neither the other plan nor its accountant takes them."""
    changes = dict(head_radius=0.01, num_steps=10**4, noise_multiplier=3.0, expected_batch_size=200)
    plan = make_subspace_plan(config(**changes), num_examples=20_000)
    last = make_head_plan(plain(**changes), num_examples=20_000)
    assert last.spent.horizon is not None and plan.epsilon() > 2 * last.spent.epsilon
    with pytest.raises(DPConfigError, match="no contractions.*Use make_subspace_plan"):
        make_head_plan(config(**changes), num_examples=20_000)


def test_ledger_report_and_statement_say_composition_and_no_last_iterate(tmp_path):
    made, _ = run(tmp_path, config())
    words = "no last-iterate bound; composition of 12 releases"
    lines = [json.loads(line) for line in (tmp_path / "out/privacy/ledger.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "plan", "chain", "step"]
    (plan,) = (line["plan"] for line in lines if line["kind"] == "plan")
    assert plan["accounting"] == words and plan["epsilon"] == made.plan.epsilon()
    assert {"horizon", "noise_share", "diameter"}.isdisjoint(plan)
    assert (plan["rank"], plan["refresh_every"], plan["eps"], plan["num_public_records"]) == (4, 5, 1e-3, M)
    assert lines[2]["note"] == f"convex head in a public subspace: {words}"
    assert json.loads((tmp_path / "out/privacy/head.json").read_text())["accounting"] == words
    assert not verify(tmp_path / "out").has_failed
    text = (tmp_path / "out/privacy/statement.md").read_text()
    assert text.startswith("# Composition of 12 releases, no last-iterate bound: epsilon ")
    assert "**Accounting.** No last-iterate bound" in text and "that of 12 Gaussian releases, composed" in text
    assert "all iterates, and their mean" in text and "Not protected at all**: the public records" in text
    assert "Final weights only" not in text and "Altschuler" not in text and "{" not in text
    run(tmp_path / "poisson", config(expected_batch_size=60))
    assert "Gaussian releases of Poisson batches" in (tmp_path / "poisson/out/privacy/statement.md").read_text()
    run(tmp_path / "clean", config(adagrad="clean", envelope=0.5))
    text = (tmp_path / "clean/out/privacy/statement.md").read_text()
    assert "releases, each of a gradient and a matrix" in text and "30% of the budget of a step" in text
    assert "shortened to t^-0.5" in text and not verify(tmp_path / "clean/out").has_failed
    run(tmp_path / "off", config(noise_multiplier=0.0))
    assert "NOT PRIVATE" in (tmp_path / "off/out/privacy/statement.md").read_text().splitlines()[0]


# --- runs that were killed ---


def test_a_run_goes_on_with_its_own_public_records_and_settings_only(tmp_path):
    asked = config()
    _, weights = run(tmp_path, asked, finish=False)
    features, labels = clipped(asked, M, seed=7)
    for public in ((features, labels.flip(0)), (features * 0.9, labels), (features[1:], labels[1:])):
        with pytest.raises(DPConfigError, match="public_records"):
            run(tmp_path, asked, public=public, finish=False)
    for changes in (
        {"rank": 5}, {"refresh_every": 6}, {"eps": 2e-3}, {"learning_rate": 0.1}, {"adagrad": "clean"}, {"envelope": 0.1}
    ):  # fmt: skip
        with pytest.raises(DPConfigError, match="another private mechanism"):
            run(tmp_path, config(**changes), finish=False)
    assert torch.equal(run(tmp_path, asked, finish=False)[1], weights)


# --- refusals ---


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"head_radius": None}, "Give --head_radius"),
        ({"feature_norm": None}, "Give --feature_norm"),
        ({"l2": 0.1}, "Leave both at 0"),
        ({"decay": 0.5}, "Leave both at 0"),
        ({"rank": 0}, "rank=0 is not a positive count"),
        ({"rank": 2.5}, "rank=2.5 is not a positive count"),
        ({"refresh_every": 0}, "refresh_every=0 is not a positive count"),
        ({"eps": 0.0}, "eps=0.0 is not > 0"),
        ({"eps": math.nan}, "eps=nan is not a finite number"),
        ({"adagrad": "goe"}, "adagrad='goe' is unknown. Use one of: 'none', 'released', 'clean'"),
        ({"adagrad": "clean", "expected_batch_size": 60}, "not amplified by sampling. Use expected_batch_size=300"),
        ({"matrix_share": 1.0}, r"matrix_share=1.0 is outside \(0, 1\). Use"),
        ({"envelope": -0.1}, "envelope=-0.1 is out of range. Use a finite number >= 0"),
        ({"expected_batch_size": N + 1}, r"expected_batch_size=301 is outside \[1, 300\]"),
    ],
)
def test_settings_out_of_range_are_refused(changes, match):
    with pytest.raises(DPConfigError, match=match):
        make_subspace_plan(config(**changes), num_examples=N)


def test_public_records_that_do_not_fit_are_refused_before_anything_is_touched(tmp_path):
    asked = config()
    features, labels = clipped(asked, M, seed=7)
    for public, match in (
        (None, "no public records.*Pass public="),
        ((features[:, :-1], labels), r"Public features have shape \(20, 6\).*Use \(m, 7\)"),
        ((features, labels[1:]), r"the public labels \(19,\)"),
        ((features[0], labels[:1]), "public features have shape"),
        ((features[:3], labels[:3]), "3 public gradients span no subspace of rank 4"),
        ((features * 2, labels), "The public features are longer than feature_norm.*clip_features first"),
        ((features * math.nan, labels), "The public features are longer than feature_norm, or no numbers"),
        ((features, labels + 1), r"There are public labels outside \[0, 3\)"),
        ((features.half(), labels), "The public features are torch.float16"),
        ((torch.zeros_like(features), labels), "All public gradients are zero"),
    ):
        with pytest.raises(DPConfigError, match=match):
            begin(tmp_path, asked).train(*clipped(asked), K, public=public)
    assert not (tmp_path / "out").exists()


def test_a_head_by_projected_sgd_takes_no_public_records(tmp_path):
    with pytest.raises(DPConfigError, match="Leave public out, or use make_subspace_plan"):
        begin(tmp_path, plain()).train(*clipped(plain()), K, public=clipped(plain(), M))
    assert not (tmp_path / "out").exists()
