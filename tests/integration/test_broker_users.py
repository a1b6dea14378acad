"""A whole run where each process has a broker user of its own, and what these users may not do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tomli_w
from amqp.exceptions import AccessRefused
from celery import Celery
from kombu.connection import Connection
from kombu.entity import Exchange, Queue

from common.broker import declare_queues
from common.db import runs
from common.db.session import Database
from common.episode import RunState, Stage
from common.errors import SetupError
from common.queues import QueueKind
from deploy.broker_queues import check_queues
from deploy.broker_users import BrokerUser, make_users
from deploy.ports import free_port
from deploy.roles import read_passwords
from tests.integration.broker_stack import Node, Processes, open_run, run_config, wait_until, with_user
from workers.app import celery_config

RUN_TIMEOUT_S = 120.0


@pytest.fixture
def urls(node: Node, tmp_path: Path) -> dict[BrokerUser, str]:
    """The broker URL of each user; the users are made by the command's own function."""
    file = tmp_path / "broker-users"
    given = node.settings(QueueKind.CLASSIC)
    assert make_users(given, prefix="rollmill", passwords_file=file, apply=True).applied
    assert file.with_name("broker-users.json").stat().st_mode & 0o777 == 0o600
    known = read_passwords(file)
    return {user: with_user(node.url, f"rollmill_{user}", known[f"rollmill_{user}"]) for user in BrokerUser}


@pytest.mark.parametrize("kind", list(QueueKind))
def test_a_whole_run_works_with_each_process_on_its_own_user(
    node: Node, kind: QueueKind, urls: dict[BrokerUser, str], database: Database, database_url: str, tmp_path: Path
) -> None:
    node.fresh_queues(kind)
    config, port = run_config("run-a"), free_port()
    open_run(database, config, engine_url=f"http://127.0.0.1:{port}", weights=tmp_path / "weights")
    config_file = tmp_path / "run.toml"
    config_file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    commands = {
        BrokerUser.INIT: ("workers.fleet", "init"),
        BrokerUser.RUN: ("workers.fleet", "run"),
        BrokerUser.EVAL: ("workers.fleet", "eval"),
        BrokerUser.FEEDER: ("workers.feeder",),
        # What is lost on the way shows as a run that does not end: nobody announces it again in this time.
        BrokerUser.REAPER: ("workers.reaper", "--resend-all"),
        BrokerUser.TRAINER: ("trainer", "--config", str(config_file)),
    }
    env = node.env(kind, database_url, tmp_path) | {"ROLLMILL_RESEND_AFTER_S": "600"}
    with Processes(folder=tmp_path, env=env) as processes:
        processes.start("engine", "benchmarks.scripted_policy", "noop", "--port", str(port))
        for user, command in commands.items():
            if user is not BrokerUser.TRAINER:
                processes.start(user, *command, ROLLMILL_BROKER_URL=urls[user])
        user = BrokerUser.TRAINER
        trainer = processes.start(user, *commands[user], ROLLMILL_BROKER_URL=urls[user])
        wait_until(
            lambda: is_finished(database) or trainer.poll() is not None,
            timeout_s=RUN_TIMEOUT_S,
            what=f"finished: {processes.logs()}",
        )
        assert is_finished(database), processes.logs()
        for user in commands:
            assert "ACCESS_REFUSED" not in processes.log(user)
        assert "not announced" not in processes.log("trainer")
        assert "broker away" not in processes.log("run")
    assert check_queues(node.settings(kind)).troubles == ()


def is_finished(database: Database) -> bool:
    with database.begin() as conn:
        return runs.require(conn, "run-a").state is RunState.FINISHED


def take(url: str, queue: str) -> None:
    with Connection(url) as connection, connection.channel() as channel:
        channel.basic_get(queue)


def send(url: str, exchange: str, routing_key: str) -> None:
    with Connection(url) as connection, connection.channel() as channel:
        connection.Producer(channel).publish("x", exchange=exchange, routing_key=routing_key)
        # The refusal comes with the next answer on the channel.
        channel.queue_declare("init", passive=True)


def listen(url: str, exchange: str, queue: str) -> None:
    with Connection(url) as connection, connection.channel() as channel:
        Queue(queue, Exchange(exchange, type="direct", durable=True), routing_key="run", exclusive=True)(
            channel
        ).declare()


def test_each_fleet_takes_from_its_own_queue_alone(node: Node, urls: dict[BrokerUser, str]) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    for user in BrokerUser:
        for stage in Stage:
            if user.value == stage.value:
                take(urls[user], stage)
            else:
                with pytest.raises(AccessRefused, match=f"access to queue '{stage}'"):
                    take(urls[user], stage)


def test_each_process_announces_to_the_stages_it_hands_on_to_and_to_no_other(
    node: Node, urls: dict[BrokerUser, str]
) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    may = {
        BrokerUser.INIT: {"init", "run"},
        BrokerUser.RUN: {"init", "run", "eval"},
        BrokerUser.EVAL: {"eval"},
        BrokerUser.FEEDER: {"init"},
        BrokerUser.REAPER: {"init", "run", "eval"},
        BrokerUser.TRAINER: set(),
        BrokerUser.FLOWER: set(),
    }
    for user, stages in may.items():
        for stage in Stage:
            if stage in stages:
                send(urls[user], f"rollmill.{stage}", stage)
            else:
                with pytest.raises(AccessRefused, match=f"access to exchange 'rollmill.{stage}'"):
                    send(urls[user], f"rollmill.{stage}", stage)
        with pytest.raises(AccessRefused, match=r"'amq\.default'"):
            send(urls[user], "", "run")
    with pytest.raises(AccessRefused, match=r"'rollmill\.weights'"):
        send(urls[BrokerUser.RUN], "rollmill.weights", "")


def test_nobody_makes_queues_or_listens_in_on_a_stage(node: Node, urls: dict[BrokerUser, str]) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    for user in BrokerUser:
        with pytest.raises(AccessRefused, match=r"exchange 'rollmill\.run'|queue 'mine'"):
            listen(urls[user], "rollmill.run", "mine")
    with pytest.raises(AccessRefused, match=r"exchange 'rollmill\.run'"):
        listen(urls[BrokerUser.FLOWER], "rollmill.run", "celeryev.mine")


def test_a_user_that_may_not_make_the_queues_must_find_them(node: Node, urls: dict[BrokerUser, str]) -> None:
    given = node.fresh_queues(QueueKind.CLASSIC)
    mine = given.model_copy(update={"broker_url": urls[BrokerUser.EVAL]})
    with Connection(urls[BrokerUser.EVAL]) as connection:
        connection.connect()
        assert not declare_queues(connection, mine, own=Stage.EVAL).may_declare
        other = mine.model_copy(update={"broker_queues": QueueKind.QUORUM})
        with pytest.raises(SetupError, match=r"queue eval of .*received 'quorum' but current is 'classic'.*--recreate"):
            declare_queues(connection, other, own=Stage.EVAL)
        with Connection(node.url) as owner, owner.channel() as channel:
            channel.queue_delete("run")
        missing = r"queue run of .* is missing, and user rollmill_eval may not make it: run `rollmill broker queues`"
        with pytest.raises(SetupError, match=missing):
            declare_queues(connection, mine, own=Stage.EVAL)
    node.fresh_queues(QueueKind.CLASSIC)


def test_run_alone_makes_its_nodes_queue(node: Node, urls: dict[BrokerUser, str]) -> None:
    given = node.fresh_queues(QueueKind.CLASSIC).model_copy(update={"node": "a"})
    for user, num_queues in ((BrokerUser.INIT, 6), (BrokerUser.RUN, 7)):
        with Connection(urls[user]) as connection:
            connection.connect()
            mine = given.model_copy(update={"broker_url": urls[user]})
            assert not declare_queues(connection, mine, own=Stage(user)).may_declare
        assert len(check_queues(given).queues) == num_queues
    send(urls[BrokerUser.INIT], "rollmill.run", "run@a")
    assert check_queues(given).queues[-1].num_messages == 1
    take(urls[BrokerUser.RUN], "run@a")
    with pytest.raises(AccessRefused, match="access to queue 'run@a'"):
        take(urls[BrokerUser.INIT], "run@a")


def test_a_node_that_is_not_here_gets_a_file_to_import(node: Node, tmp_path: Path) -> None:
    given = node.settings(QueueKind.CLASSIC).model_copy(update={"broker_url": "amqp://a:b@broker.invalid//"})
    file = tmp_path / "users"
    with pytest.raises(SetupError, match=rf"run `rabbitmqctl import_definitions < {file}.json` on the node's machine"):
        make_users(given, prefix="rollmill", passwords_file=file, apply=True)
    passwords = read_passwords(file)
    assert not any(password in file.with_name("users.json").read_text() for password in passwords.values())


def test_flower_hears_the_workers_and_may_ask_them(
    node: Node, urls: dict[BrokerUser, str], database_url: str, tmp_path: Path
) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    app = Celery("test")
    app.config_from_object(celery_config(node.settings(QueueKind.CLASSIC, broker_url=urls[BrokerUser.FLOWER])))
    heard: list[str] = []
    with (
        Processes(folder=tmp_path, env=node.env(QueueKind.CLASSIC, database_url, tmp_path)) as processes,
        app.connection_for_read() as connection,
    ):
        processes.start("eval", "workers.fleet", "eval", ROLLMILL_BROKER_URL=urls[BrokerUser.EVAL])
        receiver = app.events.Receiver(connection, handlers={"*": lambda event: heard.append(event["type"])})
        events = receiver.consume(limit=None, timeout=60)
        while not heard:
            next(events)
        events.close()
        assert heard[0].startswith("worker-")
        deadline = time.monotonic() + 60
        # It says that it is there before it takes questions, and a question is not kept for it.
        while not (answers := app.control.ping(timeout=2, limit=1)) and time.monotonic() < deadline:
            pass
        assert [list(answer.values()) for answer in answers] == [[{"ok": "pong"}]]
    app.close()
