"""RabbitMQ's own administration command, where it reaches the very node that the broker URL names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import SetupError
from deploy.rabbitmq import CONTROL, running_environment

TIMEOUT_S = 60.0
NO_LIMIT = float("inf")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_PORT = 5672
_ASK = (
    "{application:get_env(rabbit, consumer_timeout), "
    "[element(6, L) || L <- rabbit_networking:active_listeners(), element(3, L) =:= amqp]}."
)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A running node that the command reaches from here."""

    command: str
    env: Mapping[str, str] = field(repr=False)
    """Beside this process's own."""
    consumer_timeout_s: float
    """How long a consumer may hold a message; NO_LIMIT = for ever."""

    def import_definitions(self, definitions: str) -> None:
        """Give the node users and permissions, as JSON. Raises SetupError with what it says against them."""
        done = _run(self.command, self.env, "import_definitions", given=definitions)
        if done is None or done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split()) if done else f"no answer within {TIMEOUT_S:g} s"
            raise SetupError(f"rabbitmqctl import_definitions: {said}")


def find_node(broker_url: str, data_dir: Path) -> Node | None:
    """The node of the URL, if it runs on this machine and the command may speak with it; None otherwise."""
    parts = urlsplit(broker_url)
    if parts.hostname not in LOOPBACK:
        return None
    on_path = shutil.which("rabbitmqctl")
    private = running_environment(data_dir)
    for command, env in ((str(CONTROL), private), (on_path, {})):
        if command is None or env is None:
            continue
        answer = _run(command, env, "eval", _ASK)
        if answer is None or answer.returncode != 0:
            continue
        timeout, _, ports = answer.stdout.rpartition("[")
        if str(parts.port or DEFAULT_PORT) in re.findall(r"\d+", ports):
            limit_ms = re.search(r"\{ok,(\d+)\}", timeout)
            return Node(command=command, env=env, consumer_timeout_s=int(limit_ms[1]) / 1000 if limit_ms else NO_LIMIT)
    return None


def _run(
    command: str, env: Mapping[str, str], *arguments: str, given: str | None = None
) -> subprocess.CompletedProcess[str] | None:
    """None = it cannot be run, or does not answer."""
    try:
        return subprocess.run(
            [command, *arguments],
            env={**os.environ, **env},
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
