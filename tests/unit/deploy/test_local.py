from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import SetupError
from common.settings import PREFIX, Settings
from deploy.flower import flower_password, flower_spec
from deploy.folder import DataFolder, write_private
from deploy.local import LocalStack, StackAddresses, StackPlan, addresses_file, read_addresses, work_specs
from deploy.ports import HOST, free_port
from deploy.process import ProcessSpec, Restart

ADDRESSES = StackAddresses(
    database_url="postgresql://rollmill:secret-1@127.0.0.1:20001/rollmill",
    broker_url="amqp://rollmill:secret-2@127.0.0.1:20002//",
    broker_api_url="http://rollmill:secret-2@127.0.0.1:20003/api/",
    engine_url="http://127.0.0.1:20004",
)
PLAN = StackPlan(model_dir=Path("/models/tiny"), trainer_config=Path("/data/run.toml"))


def specs() -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in work_specs(ADDRESSES, plan=PLAN, data_dir=Path("/data"))}


def test_the_stack_has_an_engine_three_fleets_and_their_servants() -> None:
    assert list(specs()) == ["engine", "fleet-init", "fleet-run", "fleet-eval", "feeder", "reaper", "trainer"]
    assert specs()["engine"].argv[1:] == (
        "-m", "workers.engine", "--model", "/models/tiny", "--port", "20004", "--served-model-name", "policy",
    )  # fmt: skip
    assert specs()["trainer"].argv[1:] == ("-m", "trainer", "--config", "/data/run.toml")


def test_only_the_trainer_may_finish() -> None:
    assert [name for name, spec in specs().items() if spec.restart is Restart.ON_FAILURE] == ["trainer"]


def test_addresses_go_by_environment_under_known_names_and_never_by_argv() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for spec in specs().values():
        assert not any("secret" in argument for argument in spec.argv)
        assert spec.env["ROLLMILL_DATABASE_URL"] == ADDRESSES.database_url
        assert spec.env["ROLLMILL_BROKER_URL"] == ADDRESSES.broker_url
        assert spec.env["ROLLMILL_DATA_DIR"] == "/data"
        assert spec.env["OMP_NUM_THREADS"] == "1"
        assert {name for name in spec.env if name.startswith(PREFIX)} <= known


def test_other_commands_find_a_running_stack(folder: DataFolder) -> None:
    with pytest.raises(SetupError, match=f"no stack runs on data folder {folder.path}: start one with `rollmill up`"):
        read_addresses(folder.path)
    write_private(addresses_file(folder.path), ADDRESSES.to_json())
    assert read_addresses(folder.path) == ADDRESSES


def test_flower_gets_its_passwords_by_environment(folder: DataFolder) -> None:
    port = free_port()
    spec = flower_spec(ADDRESSES, data_dir=folder.path, port=port)
    assert spec.argv[1:5] == ("-m", "celery", "-A", "workers.app")
    assert f"--address={HOST}" in spec.argv
    assert f"--port={port}" in spec.argv
    assert spec.env["FLOWER_BASIC_AUTH"] == f"admin:{flower_password(folder.path)}"
    assert spec.env["FLOWER_BROKER_API"] == ADDRESSES.broker_api_url
    assert not any("secret" in part or flower_password(folder.path) in part for part in spec.argv)


def test_a_disk_that_fills_up_at_work_ends_the_stack_with_a_line_that_says_so(tmp_path: Path) -> None:
    free = {tmp_path: 100_000_000}
    with LocalStack(Settings(data_dir=tmp_path), PLAN, free_bytes=free.__getitem__) as stack:
        stack.poll()
    free[tmp_path] = 99_000_000
    with (
        LocalStack(Settings(data_dir=tmp_path), PLAN, free_bytes=free.__getitem__) as stack,
        pytest.raises(SetupError, match=rf"^only 99 MB free for data folder {tmp_path}: make room; the same command"),
    ):
        stack.poll()
