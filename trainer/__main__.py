"""Entry point of the trainer: `python -m trainer --config run.toml`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from common.config import load_run_config
from common.errors import SetupError
from common.log import setup_logging
from common.settings import settings


def main() -> int:
    """Train one run to its end. Exit code 0 = finished or told to stop, 2 = something outside has to be mended."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains one run from its scored episodes.")
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        setup_logging(settings().log_level)
        run_trainer(arguments.config, stop)
    except SetupError as error:
        sys.stderr.write(f"trainer: {error}\n")
        return 2
    return 0


def run_trainer(config_path: Path, stop: threading.Event) -> None:
    """Connect everything and train."""
    config = load_run_config(config_path)
    database_url, broker_url = settings().require_database_url(), settings().require_broker_url()

    # Loading torch takes seconds: after the checks that need none of it.
    from transformers.utils.logging import disable_progress_bar

    from common.db import runs
    from common.db.session import Database, check_schema
    from common.episode import RunState
    from common.weights import WeightStore
    from trainer.checkpoint import CheckpointStore
    from trainer.loop import Trainer
    from trainer.policy import Policy

    disable_progress_bar()  # type: ignore[no-untyped-call]
    data_dir = settings().data_dir.resolve()
    database = Database.connect(database_url, pool_size=2)
    try:
        check_schema(database)
        with database.begin() as conn:
            run = runs.open_run(conn, config)
        if run.state in (RunState.FINISHED, RunState.STOPPED):
            return
        Trainer(
            run=run,
            database=database,
            policy=Policy.load(config),
            weights=WeightStore(data_dir / "weights"),
            checkpoints=CheckpointStore(data_dir / "checkpoints", run.name),
            broker_url=broker_url,
        ).train(stop)
    finally:
        database.dispose()


if __name__ == "__main__":
    sys.exit(main())
