"""A private RabbitMQ node from the installed package: own folder, ports, cookie and password, on loopback only.

It needs neither root nor the package's own service, and does not touch that service's data.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.errors import SetupError
from deploy.broker import BrokerServer
from deploy.folder import DataFolder, kept_password, write_private
from deploy.ports import HOST, answers, kept_port, listens
from deploy.process import ProcessSpec

USER = "rollmill"
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Not the one on PATH, which is a wrapper that refuses all users but root and rabbitmq."""
CONTROL = SERVER.with_name("rabbitmqctl")
CONSUMER_TIMEOUT_MS = 86_400_000
"""A message stays unacknowledged as long as its episode lasts; at the default of 30 min the node ends the worker."""
PORTS = ("amqp", "api", "node", "names")
SHUTDOWN_MS = 1000
"""The node's data is safe within milliseconds of SIGTERM, but its Erlang machine then idles for 7 s."""
AMQP_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"


def prepare_rabbitmq(folder: DataFolder) -> BrokerServer:
    """Write the node's configuration and describe it. Raises SetupError where RabbitMQ is not installed."""
    epmd = shutil.which("epmd")
    if not SERVER.exists() or epmd is None:
        raise SetupError(
            "RabbitMQ is not installed: `apt-get install --no-install-recommends rabbitmq-server`, "
            "or leave BROKER unset for the embedded broker, or set ROLLMILL_BROKER_URL to a running one"
        )
    home = folder.path / "rabbitmq"
    for part in (home, home / "home", home / "mnesia", home / "log"):
        part.mkdir(mode=0o700, exist_ok=True)
    ports = {name: kept_port(home / f"{name}.port") for name in PORTS}
    password = kept_password(home / "password")
    _configure(home, password=password, ports=ports)
    names = ProcessSpec(
        name="rabbitmq-names",
        # In the foreground under us: the one that the node would start for itself outlives everybody.
        argv=(epmd, "-address", HOST, "-port", str(ports["names"])),
        ready=listens(ports["names"]),
    )
    node = ProcessSpec(
        name="rabbitmq",
        argv=(str(SERVER),),
        env=_environment(home, ports),
        ready=answers(ports["amqp"], send=AMQP_HEADER, expect=METHOD_FRAME),
        ready_timeout_s=90.0,
        stop_timeout_s=15.0,
    )
    return BrokerServer(
        url=f"amqp://{USER}:{password}@{HOST}:{ports['amqp']}//",
        api_url=f"http://{USER}:{password}@{HOST}:{ports['api']}/api/",
        consumer_timeout_s=CONSUMER_TIMEOUT_MS / 1000,
        helpers=(names,),
        process=node,
    )


def running_environment(data_dir: Path) -> dict[str, str] | None:
    """What RabbitMQ's own commands need to find the private node of a data folder; None = it has none."""
    home = data_dir.absolute() / "rabbitmq"
    try:
        return _environment(home, {name: int((home / f"{name}.port").read_text()) for name in PORTS})
    except (OSError, ValueError):
        return None


def _configure(home: Path, *, password: str, ports: dict[str, int]) -> None:
    """The user is made at the node's first start, when its data folder is still empty."""
    cookie = home / "home" / ".erlang.cookie"
    write_private(cookie, kept_password(home / "cookie"), mode=0o400)
    write_private(
        home / "rabbitmq.conf",
        f"listeners.tcp.1 = {HOST}:{ports['amqp']}\n"
        f"management.tcp.ip = {HOST}\n"
        f"management.tcp.port = {ports['api']}\n"
        f"consumer_timeout = {CONSUMER_TIMEOUT_MS}\n"
        f"default_user = {USER}\n"
        f"default_pass = {password}\n",
    )
    (home / "enabled_plugins").write_text("[rabbitmq_management].\n")


def _environment(home: Path, ports: dict[str, int]) -> dict[str, str]:
    return {
        "HOME": str(home / "home"),
        "RABBITMQ_NODENAME": "rollmill@localhost",
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(home / "none.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
        "RABBITMQ_NODE_PORT": str(ports["amqp"]),
        "RABBITMQ_DIST_PORT": str(ports["node"]),
        "ERL_EPMD_PORT": str(ports["names"]),
        "ERL_EPMD_ADDRESS": HOST,
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            f"-kernel inet_dist_use_interface {{127,0,0,1}} -start_epmd false -shutdown_time {SHUTDOWN_MS}"
        ),
        # The start script then becomes the node instead of waiting for it, so signals and exit codes are the node's.
        "RUNNING_UNDER_SYSTEMD": "1",
    }
