"""`python -m benchmarks.demo_kills`: SIGKILL each process of a running demo; it still learns, and counts the same."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.demo_process import DemoFailed, DemoProcess, figures, shortfalls

VICTIMS = ("fleet-run", "fleet-init", "fleet-eval", "engine", "trainer", "feeder", "reaper")
TIMEOUT_S = 600.0


def run_with_kills(demo: DemoProcess, *, num_versions: int) -> tuple[dict[str, Any], int]:
    """Kill one process every few versions while the demo runs; returns the report and the number of kills."""
    every = max(1, (num_versions - 4) // len(VICTIMS))
    kills = 0
    for index, victim in enumerate(VICTIMS):
        demo.wait_for_version(2 + index * every, timeout_s=TIMEOUT_S)
        pid = demo.pid_of(victim)
        if pid is None:
            raise DemoFailed(f"{victim} does not run\n{demo.tail()}")
        os.kill(pid, signal.SIGKILL)
        kills += 1
    return demo.wait(TIMEOUT_S), kills


def main() -> int:
    """Run a demo with kills; exit 1 when it falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--versions", type=int, default=40)
    arguments = parser.parse_args()
    options = ("--seed", str(arguments.seed), "--versions", str(arguments.versions))
    with tempfile.TemporaryDirectory() as folder, DemoProcess(Path(folder) / "demo", *options) as demo:
        report, kills = run_with_kills(demo, num_versions=arguments.versions)
    complaints = shortfalls(report)
    restarts = sum(report["restarts"].values())
    if restarts < kills:
        complaints.append(f"{restarts} restarts for {kills} kills")
    print("; ".join(complaints) or "ok")
    print(f"demo_kills: kills={kills} restarts={restarts} {figures(report)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
