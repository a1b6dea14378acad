"""`python -m benchmarks.learning`: does a policy learn with episodes of any age, with every seed, and with which loss.

Every run is appended to a file as it ends, and a later call goes on from there; pictures are drawn at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.learning_pictures import draw_ablation, draw_curves
from benchmarks.learning_run import HANDLERS, RECIPES, Learned, Setup, learn, setups

RESULTS = Path(__file__).parent / "results"
MAX_START = 0.35
"""Of the mean reward of the first three versions: there must be something to learn."""
MIN_END = {0: 0.85, 1: 0.80, 2: 0.80, 3: 0.75, 4: 0.75}
"""Lag -> least mean over the seeds of the reward of the last five versions."""
COLLAPSED = 0.5
"""A seed whose last five versions have less has collapsed, or never learned."""
RECOMMENDED = "behaviour"


def main() -> int:
    """Run what is missing; exit 1 when the recommended loss falls short anywhere."""
    arguments = _parse()
    wanted = list(setups(arguments.tasks, arguments.recipes, arguments.lags, arguments.seeds))
    done = _read(arguments.file)
    _run([setup for setup in wanted if setup not in done], arguments.file, processes=arguments.processes)
    found = {setup: run for setup, run in _read(arguments.file).items() if setup in set(wanted)}
    _print_table(found)
    draw_curves(_of_recipe(found, RECOMMENDED), arguments.pictures / "learning.png")
    draw_ablation(found, arguments.pictures / "ablation.png")
    complaints = list(_complaints(_of_recipe(found, RECOMMENDED)))
    for complaint in complaints:
        print(complaint)
    recommended = _of_recipe(found, RECOMMENDED)
    ends = " ".join(f"end_lag{lag}={_mean_end(recommended, lag):.3f}" for lag in sorted({s.lag for s in recommended}))
    worst = min((run.end for run in recommended.values()), default=0.0)
    print(f"learning: runs={len(found)} shortfalls={len(complaints)} {ends} worst_seed={worst:.3f}")
    return 1 if complaints or not recommended else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(HANDLERS), choices=list(HANDLERS))
    parser.add_argument("--recipes", nargs="+", default=[RECOMMENDED], choices=list(RECIPES))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--file", type=Path, default=RESULTS / "learning.jsonl", help="the runs, one a line")
    parser.add_argument("--pictures", type=Path, default=RESULTS, help="the pictures' folder")
    return parser.parse_args()


def _run(missing: Sequence[Setup], file: Path, *, processes: int) -> None:
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        shown = progress.add_task("runs", total=len(missing))
        futures = {pool.submit(learn, setup): setup for setup in missing}
        for future in as_completed(futures):
            _append(file, futures[future], future.result())
            progress.advance(shown)


def _append(file: Path, setup: Setup, run: Learned) -> None:
    rewards = [round(reward, 4) for reward in run.rewards]
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({**asdict(setup), "cpu_s": round(run.cpu_s, 1), "rewards": rewards}) + "\n")


def _read(file: Path) -> dict[Setup, Learned]:
    runs: dict[Setup, Learned] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line:
                fields = json.loads(line)
                rewards, cpu_s = tuple(fields.pop("rewards")), fields.pop("cpu_s")
                runs[Setup(**fields)] = Learned(rewards=rewards, cpu_s=cpu_s)
    return runs


def _of_recipe(runs: Mapping[Setup, Learned], recipe: str) -> dict[Setup, Learned]:
    return {setup: run for setup, run in runs.items() if setup.recipe == recipe}


def _mean_end(runs: Mapping[Setup, Learned], lag: int) -> float:
    return float(np.mean([run.end for setup, run in runs.items() if setup.lag == lag]))


def _complaints(runs: Mapping[Setup, Learned]) -> Iterable[str]:
    for setup, run in runs.items():
        if run.start > MAX_START:
            yield f"{setup}: starts at {run.start:.2f}, above {MAX_START}"
        if run.end < COLLAPSED:
            yield f"{setup}: ends at {run.end:.2f}: collapsed"
    for task, lag in sorted({(setup.task, setup.lag) for setup in runs}):
        end = _mean_end({setup: run for setup, run in runs.items() if setup.task == task}, lag)
        if lag in MIN_END and end < MIN_END[lag]:
            yield f"{task} at lag {lag} ends at {end:.3f} in the mean, below {MIN_END[lag]}"


def _print_table(runs: Mapping[Setup, Learned]) -> None:
    table = Table(title="Mean reward of the last five versions")
    for column in ("task", "loss", "lag", "seeds", "start", "end", "worst", "collapsed", "cpu_s"):
        table.add_column(column, justify="left" if column in ("task", "loss") else "right")
    for task, recipe, lag in sorted({(setup.task, setup.recipe, setup.lag) for setup in runs}):
        found = [run for setup, run in runs.items() if (setup.task, setup.recipe, setup.lag) == (task, recipe, lag)]
        ends = [run.end for run in found]
        start, cpu_s = np.mean([run.start for run in found]), np.mean([run.cpu_s for run in found])
        collapsed = sum(end < COLLAPSED for end in ends)
        figures = (f"{start:.2f}", f"{np.mean(ends):.3f}", f"{min(ends):.3f}", str(collapsed), f"{cpu_s:.0f}")
        table.add_row(task, recipe, str(lag), str(len(found)), *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
