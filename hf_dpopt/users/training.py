"""Users in a training run: from the arguments to the index, the choice of records, and the batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.local_training import LocalTraining
from hf_dpopt.randomness.source import derive_key
from hf_dpopt.run.batches import LogicalBatch, StepIndices
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.users.index import UserIndex, choose_rows
from hf_dpopt.users.local import LocalUserBatch
from hf_dpopt.users.user_batches import UserBatch, of_rows


class UserData:
    """The users of a training set.

    Args:
        index: whose rows are whose.
        column: column of the ids, which no model sees.
        config: says how many records of a user take part in a step, and what is made of them.
    """

    def __init__(self, index: UserIndex, column: str, config: PrivacyConfig):
        assert config.records_per_user is not None
        self.index, self.column, self.records_per_user = index, column, config.records_per_user
        self.weight = 1 / config.records_per_user if config.user_weighting == "constant" else None
        self.samples_records = config.samples_records_of_users
        self.local_training = LocalTraining.of(dict(config.local_training)) if config.local_training else None

    @classmethod
    def of(cls, dataset: Any, column: str, config: PrivacyConfig) -> UserData:
        """Read the ids of a training set.

        Args:
            dataset: the training set.
            column: column of the ids.
            config: configuration of the run; its unit is the user.

        Raises:
            DPConfigError: for ids that are missing, all the same or no plain values; see `UserIndex.build`.
        """
        index = UserIndex.build(dataset, column)
        made = cls(index, column, config)
        logger.info(
            f"{index.num_users} users, by the column {column!r}. If that is the number of rows, the column does not "
            "tell people apart. How much each of them wrote is data (--log_unprivatized prints it)."
        )
        return made

    def describe_unprivatized(self) -> str:
        """Describe how many records there are, and how many users have more than take part."""
        over = float((self.index.sizes() > self.records_per_user).mean())
        return (
            f"UNPRIVATIZED (exact values of private data, this console only): {self.index.num_rows} records of "
            f"{self.index.num_users} users; {over:.1%} of them have more than records_per_user={self.records_per_user}"
        )

    def check(self, dataset: Any) -> None:
        """Refuse a dataset to train on that is not the one of the index."""
        if len(dataset) != self.index.num_rows:
            raise DPConfigError(
                "The trainer made other training records of those it was given (packing, splitting or filtering), so "
                "nobody can say whose they are. Prepare the dataset before the trainer."
            )
        self.index.check_is_of(dataset, self.column)

    def records_in_places(self, key: bytes, places: np.ndarray) -> np.ndarray:
        """The records that stand in some of the places of a chain of steps that samples records, (B,), int64.

        Every user has `records_per_user` places, and place p is one of user p // records_per_user. Records of a user
        who has more are chosen anew for every chain; they are those of a table of all places, which would take 8 bytes
        a place and a moment for each user.

        Args:
            key: 32 secret bytes of the chain.
            places: numbers of places, (B,).

        Returns:
            A record for each place, or -1 where the user has fewer than that.
        """
        limit = self.records_per_user
        users_B, ranks_B = np.divmod(np.asarray(places, dtype=np.int64), limit)
        rows_B = self.index.rows_at(users_B, ranks_B)
        chosen: dict[int, np.ndarray] = {}
        for i in np.flatnonzero(self.index.sizes(users_B) > limit).tolist():  # the others have no choice
            u = int(users_B[i])
            if u not in chosen:
                chosen[u] = choose_rows(self.index.rows(u), limit, key, "capped", str(u))
            rows_B[i] = chosen[u][ranks_B[i]]
        return rows_B

    @property
    def num_sampled(self) -> int:
        """Users, or the places that are sampled instead: how many records there are is data, and decides nothing."""
        return self.index.num_users * (self.records_per_user if self.samples_records else 1)

    def choose(self, run: PrivateRun, step: int, drawn: np.ndarray) -> StepIndices:
        """The records of the users that were drawn, on this rank."""
        key, limit = run.chain.sampling_key, self.records_per_user
        if self.samples_records:
            rows_B = self.records_in_places(key, drawn)
            return StepIndices(rows_B[rows_B >= 0].tolist(), step)
        rows = [choose_rows(self.index.rows(u), limit, key, str(step), str(u)) for u in drawn.tolist()]
        chosen = np.concatenate(rows).tolist() if rows else []
        local = drawn.tolist() if self.local_training is not None else ()
        seeds = [int.from_bytes(derive_key(key, "local", str(step), str(u)), "little") for u in local]
        return StepIndices(chosen, step, [len(r) for r in rows], seeds)

    def batch(self, records: list[Any], indices: StepIndices) -> LogicalBatch:
        """Make a logical batch of the records that a loader read."""
        if self.samples_records:
            return of_rows(records, indices)
        if self.local_training is not None:
            return LocalUserBatch(records, indices.step, indices.sizes, indices.seeds, self.local_training)
        return UserBatch(records, indices.step, indices.sizes, self.weight)

    def without_id(self, record: Any) -> dict[str, Any]:
        """The part of a record that the collator and the model may see."""
        return {name: value for name, value in record.items() if name != self.column}
