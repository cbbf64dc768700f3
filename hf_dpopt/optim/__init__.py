"""torch optimizers that know how loud the noise in their gradients is.

They see released values alone, so nothing here costs privacy. A new one is one file and one line in `OPTIMIZERS`, from
which command lines (`--optim`), documentation and the contract tests read.
"""

from __future__ import annotations

import torch

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {}
