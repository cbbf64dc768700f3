"""Before the clip: maps of one record's gradient (delayed preconditioners, scale-then-privatize).

None is there yet, so `PRECLIPS` is empty and a record reaches the clip as it is. A map belongs here only if it depends
on that record and on public or already released values; the clip and the sensitivity are then those of its output.
"""

from __future__ import annotations

PRECLIPS: dict[str, type] = {}
