"""A finding of the release scan, its kinds, and the refusal that names all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hf_dpopt.common.errors import DPConfigError

SECRET, LINK_OUT, UNCHECKED = "secret", "link out", "unchecked"  # kinds of findings


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in ``path`` (relative to the scanned folder) that must not be published, and the fix.

    Attributes:
        path: file or folder.
        what: what is wrong with it.
        fix: what to do about it.
        kind: `SECRET`; `LINK_OUT` for a link that leads out of the folder; `UNCHECKED` for what could not be read.
    """

    path: str
    what: str
    fix: str
    kind: str = SECRET

    def __str__(self) -> str:
        return f"{self.path}: {self.what} ({self.fix})"


def refuse_release(findings: Sequence[Finding]) -> None:
    """Raise if there is any finding.

    Raises:
        DPConfigError: naming every file, what is in it, and the way out.
    """
    if findings:
        listing = "; ".join(map(str, findings))
        raise DPConfigError(
            f"Nothing was published, {len(findings)} finding(s) contradict the privacy statement: {listing}. "
            "A release may hold noised values only. Fix each as said, then save or push again."
        )
