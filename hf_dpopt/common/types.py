"""The zones of a private step as types: the page to read first.

A step is three zones, and a value of one cannot be handed to another, or mypy says so::

    records --clip--> ClippedSums --Ranks.sum--> JointSums --PrivateRun.release--> Released --filters, ..--> weights
                      secret, of a rank          secret      noise, / batch size   public

`JointSums` become `Released` in `hf_dpopt.run.run.PrivateRun.release` and nowhere else. What stands after it is
given a `Released` and makes another of it, as any function of released values is released.

At run time all of these are plain dicts: the types cost nothing.
"""

from __future__ import annotations

from typing import NewType

import torch

SPOILT = "_changed_by_records"  # attribute of a module that holds what records made of its tensors, un-noised

# Parameter name -> tensor of its shape. Of no zone: gradients of public records, tensors inside an optimizer.
Gradients = dict[str, torch.Tensor]

# Secret: sums over records of what each contributes after its clip, before the noise. Only sums may be made of it.
ClippedSums = NewType("ClippedSums", Gradients)

# Secret: the clipped sums of all ranks together; only they meet the noise, which is the same on every rank.
JointSums = NewType("JointSums", Gradients)

# Public: noised, so it may be stored, logged, filtered and published at no further cost.
Released = NewType("Released", Gradients)


class Secret:
    """Values that a step saw before the noise: never logged unasked, never written to disk.

    Its text does not show it, so that a stray `print` or log line tells nothing; whoever is allowed to see a value
    reads the attribute by its name.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: secret>"
