"""Docker Engine and Podman's service, started by the tests on folders of their own and ended after them. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.unit.workers.sandbox import image
from workers.sandbox.container_engine import ContainerEngine

START_S = 60.0
END_S = 30.0
DATA_BYTES = 1 << 30

# The engine's disk is memory, in a mount namespace that ends with it: nothing of it is left.
DISK = 'mount -t tmpfs -o "size=$1" engine "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running engine that has the images AGENT and NO_PYTHON."""

    kind: str
    client: ContainerEngine
    process: subprocess.Popen[bytes]
    """The service itself."""
    data: Path
    """Where it keeps its data, as it sees it itself."""
    prefix: str
    """Before the images' names."""

    @property
    def agent(self) -> str:
        """Bash, the usual programs and Python."""
        return f"{self.prefix}agent:1"

    @property
    def no_python(self) -> str:
        """The same without Python."""
        return f"{self.prefix}no-python:1"


def missing(kind: str) -> str | None:
    """Why the engine can't be started here; None = it can."""
    if os.geteuid() != 0:
        return f"{kind}: only root starts an engine of its own"
    program = {"docker": "dockerd", "podman": "podman"}[kind]
    return None if shutil.which(program) else f"{program} is not installed: apt-get install {kind}.io or podman"


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Engine]:
    """Raises RuntimeError with its log where it does not come up."""
    data = folder / "data"
    data.mkdir()
    argv, environment = (_docker if kind == "docker" else _podman)(folder)
    log = folder / "log"
    outside = ("setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation=private", "sh", "-c", DISK, "sh")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*outside, str(DATA_BYTES), str(data), *argv],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            url = f"unix://{folder}/sock"
            client = _wait(url, process, log)
            prefix = "" if kind == "docker" else "localhost/"
            _load(client, folder, prefix)
            yield Engine(kind=kind, client=client, process=process, data=data, prefix=prefix)
            client.close()
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _docker(folder: Path) -> tuple[list[str], dict[str, str]]:
    own = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/run", "--pidfile", f"{folder}/pid"]
    network = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
    return ["dockerd", "-H", f"unix://{folder}/sock", *own, *network], {}


def _podman(folder: Path) -> tuple[list[str], dict[str, str]]:
    engine = f'cgroup_manager="cgroupfs"\nevents_logger="file"\nruntime="runc"\ntmp_dir="{folder}/libpod"\n'
    limits = 'default_ulimits=["nofile=4096:4096","nproc=4096:4096"]'
    (folder / "containers.conf").write_text(f"[engine]\n{engine}[containers]\n{limits}\n")
    roots = f'graphroot="{folder}/data/graph"\nrunroot="{folder}/run"\n'
    (folder / "storage.conf").write_text(f'[storage]\ndriver="overlay"\n{roots}')
    environment = {
        "CONTAINERS_CONF": f"{folder}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
    }
    return ["podman", "system", "service", "--time=0", f"unix://{folder}/sock"], environment


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> ContainerEngine:
    deadline = time.monotonic() + START_S
    engine = ContainerEngine(url)
    while True:
        try:
            engine.facts()
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.1)
        else:
            return engine


def _load(engine: ContainerEngine, folder: Path, prefix: str) -> None:
    client = engine._client()
    for name, with_python in (("agent", True), ("no-python", False)):
        tar = folder / f"{name}.tar"
        image.make(tar, with_python=with_python)
        said = client.import_image_from_file(str(tar))
        client.tag(json.loads(said.splitlines()[0])["status"], f"{prefix}{name}", "1")
        tar.unlink()
