"""Tests against real vLLM (`make engine`). Their figures are the last line of the output."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from common.config import TINY_MODELS
from tests.vllm.gate import Gate
from tests.vllm.serving import require_vllm, serving
from workers.engine_client import EngineClient

FIGURES = pytest.StashKey[dict[str, object]]()
REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = {}
    config.stash[REPORT] = []


def pytest_unconfigure(config: pytest.Config) -> None:
    for line in config.stash.get(REPORT, []):
        sys.stdout.write(f"vllm: {line}\n")
    if figures := config.stash.get(FIGURES, {}):
        sys.stdout.write("vllm: " + " ".join(f"{name}={value}" for name, value in figures.items()) + "\n")


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, object]:
    """What the last line shows."""
    return pytestconfig.stash[FIGURES]


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines to show before the last one."""
    return pytestconfig.stash[REPORT]


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    torch.set_num_threads(1)
    require_vllm()


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The demo's start model: it calls tools, and its embeddings are tied."""
    return TINY_MODELS / "tiny-calculator"


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on the demo's model."""
    with serving(tiny, log_file=tmp_path_factory.mktemp("vllm") / "engine.log") as url:
        yield url


@pytest.fixture
async def gate(engine: str) -> AsyncIterator[Gate]:
    """What stands before that server."""
    async with Gate(engine) as gate:
        yield gate
