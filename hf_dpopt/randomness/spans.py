"""Elements of a tensor that noise is drawn for."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Consecutive elements of a flattened, unsharded tensor, which noise is added to."""

    tensor: int  #: number of the tensor within the step
    first: int  #: number of the first element
    total: torch.Tensor  #: the elements, float32, contiguous, (num,)
