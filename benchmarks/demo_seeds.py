"""`python -m benchmarks.demo_seeds --seeds 1 2 3`: the demo learns with every seed, within its time, losing nothing."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.demo_process import DemoFailed, DemoProcess, figures, mean, shortfalls

MAX_SECONDS = 240.0
"""After set-up, on two cores."""


def main() -> int:
    """Run the demo once per seed; exit 1 when one falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arguments", nargs="*", default=[], help="further arguments of the demo")
    arguments = parser.parse_args()
    failures, lasts, seconds = 0, [], []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with DemoProcess(Path(folder) / "demo", "--seed", str(seed), *arguments.arguments) as demo:
                    report = demo.wait(timeout_s=2 * MAX_SECONDS)
            except DemoFailed as error:
                print(f"seed={seed} {error}")
                failures += 1
                continue
        took = sum(report["seconds"][phase] for phase in ("start", "train", "stop"))
        complaints = shortfalls(report) + ([f"took {took:.0f} s > {MAX_SECONDS:g}"] if took > MAX_SECONDS else [])
        print(f"seed={seed} {figures(report)} {'; '.join(complaints) or 'ok'}", flush=True)
        failures += bool(complaints)
        lasts.append(mean(report["mean_reward_by_version"][-5:]))
        seconds.append(took)
    print(
        f"demo_seeds: runs={len(arguments.seeds)} failures={failures} last5_min={min(lasts, default=0):.3f} "
        f"last5_max={max(lasts, default=0):.3f} seconds_max={max(seconds, default=0):.0f}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
