from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, weakref
from workers.garbage import collect_seldom

class Node:
    def __init__(self):
        self.itself = self

rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(info["generation"]) if phase == "stop" else None)

def kept(num):
    del rounds[:]
    return [[number] for number in range(num)]

gc.collect()
among = [kept(600_000), rounds.count(2)][1]
collect_seldom()
frozen = gc.get_freeze_count()
open_requests = kept(600_000)
seldom = rounds.count(2)
node = weakref.ref(Node())
more = kept(20_000)
print(json.dumps({"often": among, "seldom": seldom, "frozen": frozen, "found": node() is None}))
"""


def test_what_stays_is_not_gone_through_again_and_again_and_new_garbage_is_still_found() -> None:
    """600,000 containers are somewhat more than 5,000 open requests hold."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(done.stdout)
    assert seen["often"] >= 5
    assert seen["seldom"] == 0
    assert seen["frozen"] > 1000
    assert seen["found"]
