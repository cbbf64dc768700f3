"""Started by `accelerate launch --num_processes 2`: audits with the faults that take ranks, each rank's own findings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hf_dpopt.common import collectives
from tests.audit.faults import FAULTS
from tests.audit.guard import RANKS, failed_findings


def main(folder: Path) -> None:
    seen = {"exact": failed_findings({})}
    for fault in FAULTS:
        if fault.num_ranks == RANKS:
            with pytest.MonkeyPatch.context() as patch:
                fault.plant(patch)
                seen[fault.what] = failed_findings(fault.settings)
    (folder / f"{collectives.rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
