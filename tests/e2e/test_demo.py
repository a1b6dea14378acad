"""The whole loop as a user runs it: it learns, survives the death of each process, and goes on where it stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from benchmarks.demo_kills import run_with_kills
from benchmarks.demo_process import DemoProcess, shortfalls
from tests.demo_processes import processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def wait_until_gone(data_dir: Path, timeout_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (alive := processes_of(data_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def test_learns_on_real_rabbitmq_and_postgres(tmp_path: Path, database_url: str, rabbitmq_url: str):
    env = {"ROLLMILL_DATABASE_URL": database_url, "ROLLMILL_BROKER_URL": rabbitmq_url}
    with DemoProcess(tmp_path / "demo", "--seed", "11", env=env) as demo:
        report = demo.wait(timeout_s=540)
    assert shortfalls(report) == []
    assert report["episodes_trained"] == 40 * 16 * 8
    assert query(database_url, "SELECT count(*) FROM episode WHERE state <> 'SCORED'") == 0
    assert query(database_url, "SELECT count(*) - count(DISTINCT episode_id) FROM trained_episode") == 0


def query(url: str, statement: str) -> Any:
    connection = psycopg2.connect(url)
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            (value,) = cursor.fetchone() or (None,)
            return value
    finally:
        connection.close()


def test_killing_each_process_once_changes_no_count(tmp_path: Path):
    with DemoProcess(tmp_path / "demo", "--seed", "12", "--versions", "24") as demo:
        report, kills = run_with_kills(demo, num_versions=24)
    assert shortfalls(report, learns=False) == []
    assert report["episodes_trained"] == 24 * 16 * 8
    assert sum(report["restarts"].values()) >= kills
    assert wait_until_gone(tmp_path / "demo") == []


def test_goes_on_where_it_stopped_and_leaves_nothing_behind(tmp_path: Path):
    options = ("--seed", "13", "--versions", "8")
    with DemoProcess(tmp_path / "demo", *options) as demo:
        demo.wait_for_version(3, timeout_s=180)
        assert demo.interrupt(signal.SIGINT) == 130
    assert wait_until_gone(tmp_path / "demo") == []

    with DemoProcess(tmp_path / "demo", *options) as demo:
        report = demo.wait(timeout_s=300)

    assert shortfalls(report, learns=False) == []
    assert report["resumed_from_version"] >= 3
    assert report["episodes_trained"] == 8 * 16 * 8
    assert wait_until_gone(tmp_path / "demo") == []


def test_a_killed_supervisor_takes_its_processes_along(tmp_path: Path):
    options = ("--seed", "14", "--versions", "4")
    with DemoProcess(tmp_path / "demo", *options) as demo:
        demo.wait_for_version(1, timeout_s=180)
        demo.interrupt(signal.SIGKILL)
    assert wait_until_gone(tmp_path / "demo") == []

    with DemoProcess(tmp_path / "demo", *options) as demo:
        assert shortfalls(demo.wait(timeout_s=300), learns=False) == []
