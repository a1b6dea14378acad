"""How often the garbage collector goes through the objects of a process in which thousands of requests are open."""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000
"""Containers made and not yet freed, between two rounds through the new ones. Python's own 700 are eight requests.

Every hundredth round goes through all containers, if a quarter of them is new: garbage in cycles that outlived two
rounds may grow to a million containers, 100 to 200 MB, before it is found.
"""


def collect_seldom() -> None:
    """Leave all that exists now out of later rounds, and make rounds rarer.

    An open request is some 90 containers, none of which becomes garbage in a cycle. With Python's own settings all of
    them are gone through again and again: at 5,000 that was half of a request's CPU time, and it stops the loop.
    Call it when a process is wired and has no work yet: what becomes garbage of what it had by then is never freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
