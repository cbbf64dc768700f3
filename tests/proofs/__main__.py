"""`python -m tests.proofs` lists pages whose code has changed; with `--write`, after they were read, renews the pins."""

from __future__ import annotations

import sys

from tests import proofs

if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        proofs.write()
    else:
        before, now = proofs.recorded(), proofs.pins()
        for page, functions in now.items():
            for name, digest in functions.items():
                if before.get(page, {}).get(name) != digest:
                    print(f"{page}: {name} has changed")
