"""Users through the real trainer: whose gradient is clipped, what one user moves, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from hf_dpopt import DPConfigError, DPTrainer
from hf_dpopt.users import UserBatch, UserInParts, UsersBatch, choose_rows
from tests.helpers import tiny
from tests.reference import clipping as reference

NUM_USERS, HEAVY = 20, 47  # records of user 3


def _records(heavy=HEAVY):
    """Users of 1 to 4 records and a heavy one, in no order."""
    sizes = [heavy if u == 3 else 1 + u % 4 for u in range(NUM_USERS)]
    owners = np.random.default_rng(0).permutation(np.repeat(np.arange(NUM_USERS), sizes))
    return [{**r, "author": f"user{u}"} for r, u in zip(tiny.records(len(owners)), owners.tolist(), strict=True)]


def _trainer(folder, records=None, **changes):
    settings = dict(
        privacy_unit="user", user_id_column="author", records_per_user=3, expected_batch_size=5, noise_multiplier=0.0,
        max_steps=4, learning_rate=0.0, clipping_norm=0.3, private_state_dir=str(Path(folder).parent / "keys"),
    )  # fmt: skip
    model = changes.pop("model", None) or tiny.model(dropout=0.0)
    return tiny.trainer(folder, model=model, train_dataset=records or _records(), **{**settings, **changes})


def _of_user(trainer, user: int, step: int) -> list[int]:
    rows, limit = trainer._planned.users.index.rows(user), trainer._planned.users.records_per_user
    return choose_rows(rows, limit, trainer._session.run.chain.sampling_key, str(step), str(user)).tolist()


def _user_gradient(trainer, rows: list[int], weighting: str) -> dict:
    records = [{k: v for k, v in trainer.train_dataset[i].items() if k != "author"} for i in rows]
    found = reference.record_gradients(trainer.model, tiny.collate(records))
    weight = 1 / trainer._planned.users.records_per_user if weighting == "constant" else 1 / len(rows)
    return {name: sum(weight * grads[name] for grads in found) for name in found[0]}


def _want(trainer, step: int, weighting: str) -> dict:
    drawn = trainer._session.run.draw(step).tolist()
    users = [_user_gradient(trainer, _of_user(trainer, user, step), weighting) for user in drawn]
    return {name: total / 5 for name, total in reference.sum_of_clipped(users, 0.3).items()}


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("physical", [1, 2, 4, 64])
@pytest.mark.parametrize("weighting", ["constant", "mean"])
def test_without_noise_a_step_is_the_sum_of_clipped_users(tmp_path, weighting, physical):
    """Physical batches of one record, or two, take every larger user apart; of 64, hold all of them."""
    seen = tiny.Gradients()
    trainer = _trainer(
        tmp_path / "out", callbacks=[seen], user_weighting=weighting, per_device_train_batch_size=physical
    )
    trainer.train()
    drawn = [trainer._session.run.draw(step).tolist() for step in range(1, 5)]
    assert any(len(users) > 1 for users in drawn)
    for step, got in enumerate(seen.steps, start=1):
        if drawn[step - 1]:
            assert reference.relative_error(got, _want(trainer, step, weighting)) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_physical_batches_hold_whole_users_and_so_many_records_at_most(size):
    """A larger user comes alone, in parts; what users are filled up to stays within a quarter of what they have."""
    sizes = (1, 4, 2, 9, 1, 3, 1, 2)
    batch = UserBatch(tiny.records(sum(sizes)), 1, sizes, weight=None)
    found = list(batch.physical(size, tiny.collate))
    together = [b for b in found if isinstance(b, UsersBatch)]
    apart = [b for b in found if isinstance(b, UserInParts)]
    assert sorted(u for b in together for u in b.sizes) == sorted(u for u in sizes if u <= size)
    assert len(apart) == sum(u > size for u in sizes)
    assert all(len(part["labels"]) <= size for b in apart for part in b.batches)
    for b in together:
        assert len(b.batch["labels"]) == sum(b.sizes) <= size
        assert max(b.sizes) * len(b.sizes) <= 1.25 * sum(b.sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("num_records", "physical"), [(HEAVY, 4), (2378, 64)])
def test_a_heavy_user_is_one_user(tmp_path, num_records, physical):
    """All records take part, over 12 physical batches or 38, and move the step by the clipping norm at most."""
    seen, records = tiny.Gradients(), _records(num_records)
    options = dict(
        records_per_user=num_records, expected_batch_size=NUM_USERS, sampling="fixed_order",
        user_weighting="constant", per_device_train_batch_size=physical,
    )  # fmt: skip
    trainer = _trainer(tmp_path / "with", records, callbacks=[seen], max_steps=1, **options)
    trainer.train()
    assert trainer._planned.users.index.sizes().max() == num_records
    index = trainer._planned.users.index
    heavy = int(index.sizes().argmax())
    mine = _user_gradient(trainer, index.rows(heavy).tolist(), "constant")
    others = [r for r in records if r["author"] != records[index.rows(heavy)[0]]["author"]]
    without, rest = tiny.Gradients(), dict(options, expected_batch_size=NUM_USERS - 1)
    clip = 0.5 * reference.norm(mine).item()
    with_clip = tiny.Gradients()
    _trainer(tmp_path / "clipped", records, callbacks=[with_clip], max_steps=1, clipping_norm=clip, **options).train()
    _trainer(tmp_path / "rest", others, callbacks=[without], max_steps=1, clipping_norm=clip, **rest).train()
    moved = {
        n: NUM_USERS * with_clip.steps[0][n].double() - (NUM_USERS - 1) * without.steps[0][n].double()
        for n in with_clip.steps[0]
    }
    assert 0.99 * clip < reference.norm(moved).item() <= clip * (1 + 1e-4)


def test_users_without_targets_contribute_nothing(tmp_path):
    """A user whose records are all empty is drawn, charged, and adds zero."""
    from tests.grads.models import gpt2

    def collate(rows):
        batch = tiny.collate([{**row, "label": 0} for row in rows])
        batch["labels"] = torch.where(batch["attention_mask"] == 0, -100, batch["input_ids"])
        batch["labels"][[i for i, row in enumerate(rows) if row["empty"]]] = -100
        return batch

    records = [{**r, "author": u % 4, "empty": u % 4 == 1} for u, r in enumerate(tiny.records(12))]
    seen = tiny.Gradients()
    model = gpt2()
    trainer = _trainer(
        tmp_path / "out", records, model=model, callbacks=[seen], expected_batch_size=4, sampling="fixed_order",
        max_steps=1, clipping_norm=1e3, data_collator=collate,
    )  # fmt: skip
    trainer.train()
    rows = [{k: v for k, v in r.items() if k != "author"} for r in records if not r["empty"]]
    grads = reference.record_gradients(model, collate(rows))
    want = {n: sum(g[n] for g in grads) / 3 / 4 for n in grads[0]}
    assert reference.relative_error(seen.steps[0], want) < 1e-5


def test_a_dataset_keeps_its_ids_from_the_model_and_leaves_no_index(tmp_path):
    rows = _records()
    dataset = datasets.Dataset.from_list(rows).shuffle(seed=1)
    trainer = _trainer(tmp_path / "out", dataset, remove_unused_columns=True)
    trainer.train()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"user3" in path.read_bytes()]
    for user in range(NUM_USERS):
        mine = {dataset[int(i)]["author"] for i in trainer._planned.users.index.rows(user)}
        assert len(mine) == 1
    assert trainer.plan.num_examples == NUM_USERS and trainer.plan.record.to_json()["users"]["records_per_user"] == 3


class Shuffling(DPTrainer):
    """Prepares the dataset it is given, as some trainers do."""

    def __init__(self, *args, train_dataset=None, **kwargs):
        super().__init__(*args, train_dataset=train_dataset, **kwargs)
        self.train_dataset = train_dataset.shuffle(seed=7)


def test_records_in_another_order_than_their_users_are_refused(tmp_path):
    dataset = datasets.Dataset.from_list(_records())
    trainer = _trainer(tmp_path / "out", dataset)
    trainer.train_dataset = dataset.shuffle(seed=5)
    with pytest.raises(DPConfigError, match="not in the order.*make a new trainer"):
        trainer.train()
    shuffling = _trainer(tmp_path / "shuffling", dataset, cls=Shuffling)
    with pytest.raises(DPConfigError, match="not in the order"):
        shuffling.train()
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_an_index_is_that_of_the_ids_and_not_of_a_fingerprint(tmp_path):
    def run(records):
        dataset = datasets.Dataset.from_list(records)
        dataset._fingerprint = "the same"  # as of a map that reads a file which has changed
        return _trainer(tmp_path / "out", dataset)._planned.users.index

    before = run(_records())
    after = run([{**r, "author": f"user{i % 7}"} for i, r in enumerate(_records())])
    assert before.num_users == NUM_USERS and after.num_users == 7 and len(after.rows(0)) > 1


def test_a_run_is_not_continued_under_another_unit(tmp_path):
    records = [{**r, "thread": f"thread{i % NUM_USERS}"} for i, r in enumerate(_records())]
    options = dict(noise_multiplier=1.0, save_strategy="steps", save_steps=2)
    _trainer(tmp_path / "out", records, max_steps=2, **options).train()
    text = (tmp_path / "out" / "privacy" / "statement.md").read_text()
    assert "(column `author`)" in text
    with pytest.raises(DPConfigError, match="author.*thread"):
        again = _trainer(tmp_path / "out", records, user_id_column="thread", max_steps=4, **options)
        again.train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["auto", "capped_poisson"])
def test_how_many_records_there_are_is_in_no_file(tmp_path, caplog, sampling):
    """Users, or their places, are counted where the stock trainer counts samples: one user with many would show."""
    records = [*_records(), *({**r, "author": "user3"} for r in tiny.records(500))]
    trainer = _trainer(
        tmp_path / "out", records, noise_multiplier=1.0, max_steps=-1, num_train_epochs=2, sampling=sampling
    )
    trainer.train()
    (last,) = [entry for entry in trainer.state.log_history if "train_runtime" in entry]
    counted = last["train_samples_per_second"] * last["train_runtime"]
    limit = 3 if sampling == "capped_poisson" else 1
    assert counted == pytest.approx(2 * NUM_USERS * limit, rel=0.05) and trainer.plan.num_users == NUM_USERS
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    shown = re.sub(r"(?<=\d),(?=\d{3}\b)", "", "\n".join([*caplog.messages, *texts]))  # 1,188 is a number
    numbers = re.findall(r"(?<![\w.])\d+(?!\w|\.\d)", shown)  # whole ones, no part of a hash or a version
    capped = sum(min(3, sum(r["author"] == f"user{u}" for r in records)) for u in range(NUM_USERS))
    assert len(texts) >= 3 and capped != limit * NUM_USERS
    assert not {str(counted) for counted in (len(records), 2 * len(records), capped, 2 * capped)} & set(numbers)


@pytest.mark.slow
def test_records_in_another_order_are_found_at_a_resume(tmp_path):
    """Who takes part when is decided by numbers: in another order people would take part oftener and sooner."""
    options = {"save_strategy": "steps", "save_steps": 1, "noise_multiplier": 1.0, "max_steps": 4}
    options |= {"noise_mechanism": "nu_dpftrl", "expected_batch_size": 4}
    records = _records()
    _trainer(tmp_path / "out", records, callbacks=[tiny.StopAt(2)], **options).train()
    with pytest.raises(DPConfigError, match="not those that this run began with"):
        _trainer(tmp_path / "out", records[::-1], **options).train(resume_from_checkpoint=True)
    kept = [p for p in (tmp_path / "out").rglob("*") if p.suffix == ".data"]
    assert not kept  # it is made of private data
    _trainer(tmp_path / "out", list(records), **options).train(resume_from_checkpoint=True)


REFUSED = {
    "no column named": ({"user_id_column": None}, "user_id_column author"),
    "no such column": ({"user_id_column": "writer"}, "no column 'writer'.*author.*remove_columns"),
    "records_per_user 0": ({"records_per_user": 0}, "records_per_user=0.*integer >= 1"),
    "a column without the unit": ({"privacy_unit": "example", "records_per_user": None}, "privacy_unit user"),
    "records_per_user without the unit": (
        {"privacy_unit": "example", "user_id_column": None}, "records_per_user=3.*privacy_unit='user'"
    ),
    "more users in a step than there are": ({"expected_batch_size": 21}, "expected_batch_size=21"),
    "a weighting that is not known": ({"user_weighting": "sum"}, "user_weighting='sum'.*'mean'"),
    "no local learning rate": ({"local_training": {"batch_size": 4}}, "no learning_rate"),
    "a local learning rate of 0": ({"local_training": {"learning_rate": 0.0}}, "learning_rate of local_training=0.0 is not > 0"),
    "no local steps": ({"local_training": {"learning_rate": 0.1, "steps": 0}}, "steps of local_training=0"),
    "without users": (
        {"local_training": {"learning_rate": 0.1}, "privacy_unit": "example", "user_id_column": None, "records_per_user": None},
        "privacy_unit='user'",
    ),
    "sampled records": (
        {"local_training": {"learning_rate": 0.1}, "sampling": "capped_poisson"}, "any sampling but 'capped_poisson'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_touched(tmp_path, case):
    changes, message = REFUSED[case]
    with pytest.raises(DPConfigError, match=message):
        _trainer(tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "privacy").exists()


IDS = {
    "missing": (lambda i: None if i == 5 else f"u{i % 7}", "row 5 is the first.*id of their own"),
    "blank": (lambda i: " " if i == 5 else f"u{i % 7}", "row 5 is the first"),
    "nothing that is seen": (lambda i: "\u00ad\u200e" if i == 5 else f"u{i % 7}", "row 5 is the first"),
    "no number": (lambda i: float("nan") if i == 4 else float(i % 7), "row 4 is the first"),
    "one for all": (lambda i: "me", "one value in all rows.*user_id_column"),
    "lists": (lambda i: [f"u{i}", "u"], "cannot be compared.*one string or integer per row"),
    "all missing": (lambda i: None, "row 0 is the first"),
}


def test_ids_of_mixed_kinds_are_refused(tmp_path):
    """1 and "1" may be one person."""
    records = [{**r, "author": i % 5 if i % 2 else str(i % 5)} for i, r in enumerate(tiny.records(30))]
    with pytest.raises(DPConfigError, match="strings and numbers mixed"):
        _trainer(tmp_path / "out", records)


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("case", IDS)
def test_bad_ids_are_refused(tmp_path, case, as_dataset):
    make, message = IDS[case]
    records = [{**r, "author": make(i)} for i, r in enumerate(tiny.records(30))]
    with pytest.raises(DPConfigError, match=message):
        _trainer(tmp_path / "out", datasets.Dataset.from_list(records) if as_dataset else records)
    assert not (tmp_path / "out" / "privacy").exists()


STATEMENTS = {
    "users": ({}, (
        "at most 3 of their rows", "person with several ids", "users n, expected batch size",
        "one of them has one user more", "weight 1 / 3", "20 users",
    )),
    "sampled records": ({"sampling": "capped_poisson", "noise_multiplier": 5.0}, (
        "At most 3 rows of each user", "places for records n, expected", "users has 3 places for records",
    )),
    "local training": ({"local_training": {"learning_rate": 0.1}}, ("trained on the chosen rows of each user",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", STATEMENTS)
def test_the_statement_names_the_unit_the_cap_and_what_it_does_not_cover(tmp_path, case):
    options, parts = STATEMENTS[case]
    trainer = _trainer(tmp_path / "out", **{"noise_multiplier": 1.0, **options})
    trainer.train()
    text = (tmp_path / "out" / "privacy" / "statement.md").read_text()
    for part in ("One *user* is protected", *parts):
        assert part in text, part
    assert "One *example*" not in text
    local = {"learning_rate": 0.1} if case == "local training" else None
    assert trainer.plan.record.to_json()["users"].get("local_training") == local
