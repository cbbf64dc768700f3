"""The user as the unit of privacy: index of users and rows, choice of rows, batches, local training."""

from __future__ import annotations

from hf_dpopt.users.index import UserIndex, choose_rows
from hf_dpopt.users.training import UserData
from hf_dpopt.users.user_batches import UserBatch, UserInParts, UsersBatch

__all__ = ["UserBatch", "UserData", "UserInParts", "UserIndex", "UsersBatch", "choose_rows"]
