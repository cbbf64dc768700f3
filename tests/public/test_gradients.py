"""Public gradients against a loop of plain backwards; and that nothing of the model or the generators is left changed."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.public import PublicGradients
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny
from tests.helpers.ranks import launch


def _source(model=None, num: int = 10, batch_size: int = 4, **options) -> PublicGradients:
    model = tiny.model() if model is None else model
    return PublicGradients(
        model, RecordLosses(model), tiny.records(num), tiny.collate, batch_size=batch_size, **options
    )


def _slow(model, records) -> list[dict[str, torch.Tensor]]:
    """Each record alone, in evaluation mode."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    out = []
    for record in records:
        loss = torch.nn.functional.cross_entropy(
            model(**{k: v for k, v in tiny.collate([record]).items() if k != "labels"}).logits,
            torch.tensor([record["label"]]),
        )
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        named = zip(model.named_parameters(), grads, strict=True)
        out.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in named})
    for m, mode in modes.items():
        m.training = mode
    return out


class _Seen:
    """Records that say which of them were asked for."""

    def __init__(self, records):
        self.records, self.asked = records, []

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.records[i]


def _watched(model, **options) -> tuple[PublicGradients, _Seen]:
    seen = _Seen(tiny.records(10))
    public = PublicGradients(model, RecordLosses(model), seen, tiny.collate, **{"batch_size": 4, **options})
    return public, seen


def test_mean_and_rows_are_those_of_a_loop():
    model = tiny.model(dropout=0.5).double().train()
    public, seen = _watched(model)
    got, rows = public.mean(), public.per_record(3)
    assert len(seen.asked) == 7
    want = _slow(model, [seen.records[i] for i in seen.asked])
    for name, p in model.named_parameters():
        mean = torch.stack([g[name] for g in want[:4]]).mean(dim=0)
        torch.testing.assert_close(got[name], mean, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(rows[name], torch.stack([g[name] for g in want[4:]]), rtol=1e-10, atol=1e-14)
        assert got[name].dtype == torch.float64 and rows[name].shape == (3, *p.shape)


def test_an_epoch_shows_every_record_once_and_no_draw_shows_one_twice():
    public, seen = _watched(tiny.model(), batch_size=3)
    epochs = set()
    for _ in range(3):  # 3 + 3 + 3 of 10: what comes tenth is skipped
        seen.asked.clear()
        for _ in range(3):
            public.mean()
        assert len(set(seen.asked)) == 9
        epochs.add(tuple(seen.asked))
    assert len(epochs) == 3
    orders = set()
    for _ in range(4):
        seen.asked.clear()
        public.per_record(10)
        assert sorted(seen.asked) == list(range(10))
        orders.add(tuple(seen.asked))
    assert len(orders) == 4


def test_the_model_and_the_generators_are_left_as_they_were():
    model = tiny.model(dropout=0.3).train()
    model.bert.embeddings.eval()  # a part that was put into evaluation mode stays there
    modes = [m.training for m in model.modules()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    want = random.random(), np.random.rand(), torch.rand(3)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    public = _source(model)
    public.mean(), public.per_record(2)
    got = random.random(), np.random.rand(), torch.rand(3)
    assert got[:2] == want[:2] and torch.equal(got[2], want[2])
    assert modes == [m.training for m in model.modules()]
    for name, p in model.named_parameters():
        assert (p.grad == 7.0).all() and torch.equal(p, before[name]) and p.requires_grad


def test_the_state_of_other_public_records_is_refused():
    model = tiny.model()
    first = _source(model, seed=5)
    with pytest.raises(DPConfigError, match="same public records and seed"):
        _source(model, seed=6).load_state_dict(first.state_dict())
    with pytest.raises(DPConfigError, match="same public records and seed"):
        _source(model, num=11, seed=5).load_state_dict(first.state_dict())


def test_frozen_parameters_have_no_gradient_and_unused_ones_zeros():
    model = tiny.model()
    model.bert.embeddings.requires_grad_(False)
    model.unused = torch.nn.Linear(2, 2)
    grads = _source(model).mean()
    assert not any("embeddings" in name for name in grads)
    assert not grads["unused.weight"].any()
    assert grads["classifier.weight"].any()


def test_refusals():
    model = tiny.model()
    with pytest.raises(DPConfigError, match="more public records"):
        _source(model, batch_size=11)
    with pytest.raises(DPConfigError, match="smaller batch_size or num_public"):
        _source(model).per_record(11)
    with pytest.raises(DPConfigError, match="batch_size=0"):
        _source(model, batch_size=0)
    with pytest.raises(DPConfigError, match="integer >= 0"):
        _source(model, seed=-1)
    one_loss = PublicGradients(
        model, lambda b: RecordLosses(model)(b).mean(), tiny.records(4), tiny.collate, batch_size=4
    )
    with pytest.raises(DPConfigError, match="one value per record"):
        one_loss.mean()
    bad = PublicGradients(
        model, lambda b: RecordLosses(model)(b) * float("nan"), tiny.records(4), tiny.collate, batch_size=2
    )
    with pytest.raises(DPConfigError, match="not finite"):
        bad.mean()
    with pytest.raises(DPConfigError, match="not finite"):
        bad.per_record(2)


def test_not_inside_a_private_backward():
    """There the layers hand their gradients to the engine, and autograd would see zeros."""
    model = tiny.model()
    public, engine = _source(model), make_engine(model, make_clipping("flat", 1.0))
    with engine.capture.recording(2, lambda name, use: None), pytest.raises(AssertionError, match="private backward"):
        public.mean()


def _worker(world: int, folder: str) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    public = _source(tiny.model(dropout=0.3).double().train(), batch_size=5)
    found = [public.mean(), public.per_record(3), public.per_record(1), public.mean()]
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.two_process
def test_two_processes_have_the_bits_of_each_other_and_the_values_of_one(tmp_path):
    launch(lambda: _worker(2, str(tmp_path)), 2, tmp_path)
    rank0, rank1 = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    public = _source(tiny.model(dropout=0.3).double().train(), batch_size=5)
    alone = [public.mean(), public.per_record(3), public.per_record(1), public.mean()]
    for a, b, want in zip(rank0, rank1, alone, strict=True):
        for name in want:
            assert torch.equal(a[name], b[name])
            torch.testing.assert_close(a[name], want[name], rtol=1e-10, atol=1e-14)
