"""Public data in private training: gradients of records that need no protection, and the subspaces they span.

Nothing here looks at a private record. A record is public if it may be printed, label included; held-out records of
the private dataset may not.
"""

from __future__ import annotations

from hf_dpopt.public.public_gradients import PublicGradients

__all__ = ["PublicGradients"]
