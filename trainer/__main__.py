"""Entry point of the trainer: `python -m trainer --config run.toml`, or that as torchrun's module for several ranks.

`python -m trainer sft` is supervised training, `python -m trainer merge` makes a whole model of an adapter.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import RunConfig, load_run_config
from common.errors import EXIT_AWAY, DatabaseUnavailable, SetupError
from common.log import setup_logging
from common.model_folder import read_model_shape
from common.plan import check_fits_model, plan
from common.settings import settings
from trainer.sinks import tracking
from trainer.tracking import check_installed, leave

if TYPE_CHECKING:
    from trainer.ranks import Ranks

ENGINES = "those that others start for the run; their weight keepers load each version"
UNSET = "none named: the trainer will not start"
CHECKED = f"{'start':<13} checked: "
STOPPED = 128 + signal.SIGTERM


def main() -> int:
    """Train one run to its end.

    Exit code 0 = the run is over, STOPPED = told to stop before that, 2 = something outside has to be mended,
    75 = something outside is away for too long: started again, it goes on.
    """
    if sys.argv[1:2] == ["sft"]:
        from trainer import sft

        _on_stop(lambda: sys.exit(STOPPED))
        return sft.main(sys.argv[2:])
    if sys.argv[1:2] == ["merge"]:
        from trainer import merge

        return merge.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Trains one run from its scored episodes.",
        epilog="also: python -m trainer sft --help, supervised training; python -m trainer merge --help, for adapters",
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    parser.add_argument("--dry-run", action="store_true", help="say what will be done and which memory it takes")
    parser.add_argument("--check", action="store_true", help="say only what of the start was checked")
    arguments = parser.parse_args()
    _on_stop(lambda: sys.exit(STOPPED))
    try:
        only_says = arguments.dry_run or arguments.check
        # What libraries log as they are loaded is no answer.
        setup_logging("WARNING" if only_says else settings().log_level)
        config = load_run_config(arguments.config)
        if only_says:
            _say_before(config, with_plan=arguments.dry_run)
            return 0
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return 0 if (run_rank(config) if num_ranks > 1 else run_trainer(config)) else STOPPED
    except (SetupError, DatabaseUnavailable) as error:
        sys.stderr.write(f"trainer: {error}\n")
        return error.exit_code if isinstance(error, SetupError) else EXIT_AWAY


def _say_before(config: RunConfig, *, with_plan: bool) -> None:
    """What will be done, if asked, and what of the start was checked; nothing at all where something is amiss."""
    planned = plan(config, settings=settings(), engines=ENGINES, unset=UNSET) if with_plan else ""
    from trainer.preflight import check_start

    checked = [f"{CHECKED if with_plan else ''}{line}\n" for line in check_start(config)]
    sys.stdout.write(planned + "".join(checked))


def run_rank(config: RunConfig) -> bool:
    """Train the run as one of torchrun's processes; the first alone is the trainer, the others compute for it."""
    from trainer.policy import Policy
    from trainer.ranks import Ranks

    ranks = Ranks.join()
    try:
        if ranks.rank == 0:
            return run_trainer(config, ranks=ranks)
        # The launcher passes a stop on to all; when the step is over, the first rank ends the others.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ranks.follow(Policy.load(config, ranks=ranks))
        return True
    finally:
        ranks.leave()


def run_trainer(config: RunConfig, *, ranks: Ranks | None = None) -> bool:
    """Connect to the database and train the run, unless it is over. False = stopped before its end."""
    check_installed(config.tracking)
    database_url, broker_url = settings().require_database_url(), settings().require_broker_url()

    from common.db import runs
    from common.db.run_lock import RunLock
    from common.db.session import WORKER_WAIT_S, Database, check_schema
    from common.episode import RunState

    database = Database.connect(database_url, pool_size=2, wait_s=WORKER_WAIT_S)
    try:
        check_schema(database)
        with database.begin() as conn:
            run = runs.open_run(conn, config)
        if run.state in (RunState.FINISHED, RunState.STOPPED):
            return True
        check_fits_model(config, read_model_shape(config.model))
        data_dir = settings().data_dir.resolve()
        with (
            RunLock(database, run) as lock,
            tracking(
                run.config, data_dir=data_dir, host=settings().metrics_host, port=settings().metrics_port
            ) as tracker,
        ):
            # Importing torch takes seconds: after the checks that do without.
            from trainer.loop import make_trainer

            trainer = make_trainer(
                run,
                database,
                data_dir=data_dir,
                weights_url=settings().weights_url,
                broker_url=broker_url,
                lock=lock,
                ranks=ranks,
                tracker=tracker,
            )
            stop = threading.Event()
            _on_stop(stop.set)
            return trainer.train(stop)
    finally:
        database.dispose()


def _on_stop(action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: action())


if __name__ == "__main__":
    leave(main())
