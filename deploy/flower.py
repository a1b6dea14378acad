"""Flower, Celery's web page, beside a running stack: the fleets, their tasks, and on RabbitMQ the queues."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.folder import kept_password
from deploy.local import StackAddresses
from deploy.ports import HOST, http_ok, require_free
from deploy.process import ProcessSpec

DEFAULT_PORT = 5555
USER = "admin"
MAX_TASKS = 20_000
SAVE_EVERY_MS = 5000


def flower_spec(addresses: StackAddresses, *, data_dir: Path, port: int = DEFAULT_PORT) -> ProcessSpec:
    """How to run Flower. Raises SetupError when the port is taken.

    Passwords go by environment, argv is for everybody. /metrics and /healthcheck need no password: keep to loopback.
    """
    require_free(port, what="Flower")
    env = {
        "ROLLMILL_BROKER_URL": addresses.broker_url,
        "ROLLMILL_DATA_DIR": str(data_dir),
        "FLOWER_BASIC_AUTH": f"{USER}:{flower_password(data_dir)}",
    }
    if addresses.broker_api_url is not None:
        env["FLOWER_BROKER_API"] = addresses.broker_api_url
    return ProcessSpec(
        name="flower",
        argv=(
            *(sys.executable, "-m", "celery", "-A", "workers.app", "flower"),
            *(f"--address={HOST}", f"--port={port}", "--persistent=True", f"--db={data_dir / 'flower' / 'state'}"),
            *(f"--max_tasks={MAX_TASKS}", f"--state_save_interval={SAVE_EVERY_MS}"),
        ),
        env=env,
        ready=http_ok(port, "/healthcheck"),
        ready_timeout_s=60.0,
    )


def flower_password(data_dir: Path) -> str:
    """The password of user `admin`, made at the first call."""
    home = data_dir / "flower"
    home.mkdir(mode=0o700, exist_ok=True)
    return kept_password(home / "password")
