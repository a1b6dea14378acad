"""How often the garbage collector goes through the objects of a process in which thousands of requests are open."""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000
"""Containers made and not yet freed, between two rounds through the new ones. Python's own 700 are six requests.

Every hundredth round goes through all containers, if a quarter of them is new: garbage in cycles that outlived two
rounds may grow to a million containers, 100 to 200 MB, before it is found.
"""


def collect_seldom() -> None:
    """Leave all that exists now out of later rounds, and make rounds rarer.

    An open request is some 120 containers. Among thousands, Python's own thresholds go through all of them again and
    again while none is garbage: at 5,000 that is half of the CPU time of a request, and stops the loop each time.
    Call it when a process is wired and has no work yet: what becomes garbage of what it had by then is never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
