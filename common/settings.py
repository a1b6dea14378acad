"""Settings of the processes, from `ROLLMILL_*` variables: frozen, bounded, unknown names refused, secrets masked."""

from __future__ import annotations

import difflib
import os
import re
import socket
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.config import by_its_name
from common.errors import SetupError
from common.queues import QueueKind
from common.storable import MAX_SMALL_COUNT, check_time

PREFIX = "ROLLMILL_"
NODE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _host() -> str:
    """This machine's name, with what a node's name cannot have replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return name[:63] or "localhost"


class Settings(BaseSettings):
    """One instance per process; `settings()` makes it."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False)

    database_url: str | None = None
    """postgresql://user:password@host:port/name; None = the embedded server of the one-machine stack."""
    broker_url: str | None = None
    """amqp:// (RabbitMQ) or redis:// (valkey); None = the embedded broker of the one-machine stack."""
    broker_queues: QueueKind = QueueKind.CLASSIC
    """RabbitMQ only: `classic` for one node, `quorum` for a cluster. `rollmill broker queues --recreate` changes it."""
    broker_consumer_timeout_s: float | None = Field(default=None, gt=0)
    """How long RabbitMQ lets a worker hold a message. Before version 3.12: what rabbitmq.conf says, as nobody can ask
    for it, None = unknown; from then on it is an argument of the queues, None = a day."""
    data_dir: Path = Path(".rollmill")
    """Weights, checkpoints, sandboxes, logs; the embedded database too. Shared by the fleets and the trainer."""
    node: str = Field(default_factory=_host)
    """Name of the machine, or whatever else shares its sandboxes: the fleets, data folder and processes that see one
    another. RUN plays an episode on the node on which INIT made its sandbox. Unset = the host's name."""
    node_lost_after_s: float = Field(default=120.0, gt=0)
    """How long no RUN fleet may live on a node, while one lives on another, before episodes whose sandbox lies on that
    node start a new attempt elsewhere. Counted from when its leases would have run out."""
    weights_url: str | None = Field(default=None, pattern="^[a-z][a-z0-9+.-]*://")
    """Where the trainer publishes versions, such as s3://bucket/prefix, through fsspec and the driver that it names
    (s3fs, gcsfs, …, installed in trainer and RUN); None = folder `weights` in data_dir."""
    weights_cache_dir: Path | None = None
    """Where RUN puts versions that it fetches from such a store, for engines to load: a folder that keepers and
    engines see under this path, and no other database uses. None = folder `weights-cache` in data_dir."""
    lease_s: float = Field(default=15.0, gt=0)
    """How long a claim holds without a heartbeat. Work of a dead worker is taken up again after it."""
    heartbeat_s: float = Field(default=3.0, gt=0)
    """How often a worker process renews its leases."""
    resend_after_s: float = Field(default=15.0, gt=0)
    """An unclaimed episode is announced on its queue again after this; longer than a usual wait in the queue."""
    reap_every_s: float = Field(default=1.0, gt=0)
    feed_every_s: float = Field(default=0.1, gt=0)
    max_episodes_in_flight: int | None = Field(default=None, ge=1)
    """Episodes that all runs together may have in flight, which is not final; the feeder shares them out by the runs'
    weights. Runs with a weight may have one group each even if that is more. None = no common bound."""
    max_attempts: int = Field(default=5, ge=1, le=MAX_SMALL_COUNT)
    """Attempts of an episode, before it is FAILED."""
    retry_backoff_s: float = Field(default=1.0, ge=0)
    """How long an episode waits after its second failure of infrastructure, twice as long after each further one.
    After the first it is tried again at once."""
    retry_backoff_max_s: float = Field(default=60.0, ge=0)
    """The longest such wait."""
    stage_grace_s: float = Field(default=5.0, gt=0)
    """How long work that was told to stop may take to end, before it is given up."""
    engine_wait_s: float = Field(default=90.0, gt=0)
    """How long a turn waits for an engine with a fresh enough version, before the attempt fails."""
    keeper_poll_s: float = Field(default=1.0, gt=0)
    """How often the weight keeper compares engines with the newest version when no announcement comes."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one generate request."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the trainer serves its metrics for Prometheus; None = it does not."""
    metrics_host: str = "127.0.0.1"
    """Address of that port; 0.0.0.0 = all of this machine's, where Prometheus runs elsewhere."""
    sandbox: Annotated[
        Literal["auto", "bubblewrap", "docker", "apptainer", "subprocess"], BeforeValidator(by_its_name)
    ] = "auto"
    """Where agents' commands run, unless their run or task says otherwise. `auto` = docker where an image is
    named, else bubblewrap where it works, else `subprocess`, which has no walls and warns; the other names are for that
    kind and no other."""
    sandbox_image: str | None = None
    """Image of `docker` or `apptainer` for tasks and runs that name none. It needs bash and python3."""
    sandbox_pull: Literal["missing", "always", "never"] = "missing"
    """When `docker` pulls an image: when the engine has none of that name, once a process, or never."""
    sandbox_runtime: str | None = None
    """Runtime of `docker`, such as runsc (gVisor); None = the engine's own."""
    sandbox_starts: int = Field(default=4, ge=1, le=MAX_SMALL_COUNT)
    """Containers that the processes of a node start at once."""
    sandbox_cgroup: Path | None = None
    """Folder of control groups v2 that is delegated to the workers, where each sandbox of bubblewrap gets a group.
    None = the one around the group of a worker that is not root; else a sandbox's server watches its limits."""
    docker_url: str = Field(default="unix:///var/run/docker.sock", pattern="^(unix|tcp)://.+")
    """Docker Engine, or Podman's service: unix:///run/podman/podman.sock, unix:///run/user/1000/podman/podman.sock."""
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @field_validator("*")
    @classmethod
    def _can_be_waited_for(cls, value: object, info: ValidationInfo) -> object:
        check_time(info.field_name, value)
        return value

    @field_validator("node")
    @classmethod
    def _is_node(cls, value: str) -> str:
        if not NODE_PATTERN.fullmatch(value):
            raise ValueError(
                "must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit: gpu-3, say"
            )
        return value

    @property
    def weights_cache(self) -> Path:
        """Folder of the versions that were fetched."""
        return (self.weights_cache_dir or self.data_dir / "weights-cache").resolve()

    def require_database_url(self) -> str:
        if self.database_url is None:
            raise SetupError("ROLLMILL_DATABASE_URL is not set: give postgresql://user:password@host:port/name")
        return self.database_url

    def require_broker_url(self) -> str:
        if self.broker_url is None:
            raise SetupError("ROLLMILL_BROKER_URL is not set: give amqp://user:password@host:port//")
        return self.broker_url


def masked(url: str) -> str:
    """The URL with its password replaced, for logs and messages."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


def load_settings() -> Settings:
    """Read the environment. Raises SetupError for an unknown or wrong `ROLLMILL_*` variable."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise SetupError(f"unknown variable {name}: {hint}")
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + ".".join(str(part) for part in first["loc"]).upper()
        raise SetupError(f"{name}={first['input']!r}: {first['msg'].removeprefix('Value error, ')}") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read at the first call."""
    return load_settings()
