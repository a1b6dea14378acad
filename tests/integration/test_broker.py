"""Classic and quorum queues on a real RabbitMQ node: killed workers, poison, other kinds, what a user may do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from celery import Celery
from kombu.connection import Connection
from sqlalchemy import text
from typer.testing import CliRunner

from common.db import runs
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import Stage
from common.errors import SetupError
from common.queues import QueueKind
from common.settings import Settings
from deploy.broker_queues import check_queues, dead_letters, make_queues
from deploy.cli import app
from tests.integration.broker_stack import Node, Processes, run_config, sampled_episode, wait_until
from workers.app import celery_config
from workers.broker import check_held, prepare_broker
from workers.publishing import publisher

KINDS = list(QueueKind)


def announce(given: Settings, *wakeups: Wakeup) -> None:
    celery = Celery("test")
    celery.config_from_object(celery_config(given))
    prepare_broker(celery, given, wait_s=0)
    publisher(celery)(wakeups)
    celery.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_hands_its_message_back_at_once(
    node: Node, kind: QueueKind, database: Database, database_url: str, tmp_path: Path
) -> None:
    given = node.fresh_queues(kind)
    wakeup = sampled_episode(database, handler="tests.integration.deadly:Endless")
    announce(given, wakeup)
    with Processes(folder=tmp_path, env=node.env(kind, database_url, tmp_path)) as processes:
        worker = processes.start("eval", "workers.fleet", "eval", "--concurrency", "1")
        wait_until(lambda: is_claimed(database), timeout_s=60, what=f"claimed: {processes.logs()}")
        assert node.num_messages("eval") == 0
        worker.kill()
        wait_until(lambda: node.num_messages("eval") == 1, timeout_s=3, what="handed back")
    assert dead_letters(given, purge=False) == {"init.dead": 0, "run.dead": 0, "eval.dead": 0}


def is_claimed(database: Database) -> bool:
    with database.begin() as conn:
        return bool(conn.execute(text("SELECT count(*) FROM episode WHERE claim_token IS NOT NULL")).scalar_one())


def test_poison_ends_as_a_dead_letter_and_its_episode_as_failed_with_its_error(
    node: Node, database: Database, database_url: str, tmp_path: Path
) -> None:
    given = node.fresh_queues(QueueKind.QUORUM)
    wakeup = sampled_episode(database, handler="tests.integration.deadly:Poison")
    announce(given, wakeup)
    env = node.env(QueueKind.QUORUM, database_url, tmp_path) | {
        "ROLLMILL_LEASE_S": "1",
        "ROLLMILL_HEARTBEAT_S": "0.3",
        "ROLLMILL_REAP_EVERY_S": "0.2",
        "ROLLMILL_MAX_ATTEMPTS": "5",
        # A message that comes before the episode's time is acknowledged without effect, and the next one begins anew.
        "ROLLMILL_RETRY_BACKOFF_S": "0",
    }
    with Processes(folder=tmp_path, env=env) as processes:
        processes.start("reaper", "workers.reaper")
        for _ in range(5):
            processes.start("eval", "workers.fleet", "eval", "--concurrency", "1").wait(60)
            wait_until(lambda: not is_claimed(database), timeout_s=20, what=f"taken back: {processes.logs()}")
    with database.begin() as conn:
        found = conn.execute(
            text("SELECT state, outcome, failures, detail FROM episode WHERE id = :id"), {"id": wakeup.episode_id}
        ).one()
    assert tuple(found) == ("FAILED", "lease_lost", 5, "the worker died or stalled: its lease ran out")
    # The broker moves a message there by itself, some time after the last worker's end.
    wait_until(lambda: dead_letters(given, purge=False)["eval.dead"] > 0, timeout_s=20, what="the dead letter")
    assert dead_letters(given, purge=True) == {"init.dead": 0, "run.dead": 0, "eval.dead": 1}
    assert dead_letters(given, purge=False)["eval.dead"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_no_task_is_a_dead_letter(
    node: Node, kind: QueueKind, database_url: str, tmp_path: Path
) -> None:
    given = node.fresh_queues(kind)
    with Connection(node.url) as connection:
        connection.Producer(serializer="json").publish({"what": 1}, exchange="rollmill.eval", routing_key="eval")
    with Processes(folder=tmp_path, env=node.env(kind, database_url, tmp_path)) as processes:
        processes.start("eval", "workers.fleet", "eval")
        wait_until(lambda: node.num_messages("eval.dead") == 1, timeout_s=60, what="dead")
    assert dead_letters(given, purge=False) == {"init.dead": 0, "run.dead": 0, "eval.dead": 1}


def test_a_fleet_for_queues_of_another_kind_ends_with_one_line_that_says_what_to_do(
    node: Node, database_url: str, tmp_path: Path
) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    quorum = node.settings(QueueKind.QUORUM)
    with Processes(folder=tmp_path, env=node.env(QueueKind.QUORUM, database_url, tmp_path)) as processes:
        for name, module in (("fleet eval", ("workers.fleet", "eval")), ("feeder", ("workers.feeder",))):
            assert processes.start(name, *module).wait(60) == 2
            line = processes.log(name).splitlines()[-1]
            assert line.startswith(f"rollmill {name}: queue init.dead of broker amqp://rollmill:***@")
            assert "received 'quorum' but current is 'classic'" in line
            assert "run `rollmill broker queues --recreate`" in line
    assert [queue.trouble is not None for queue in check_queues(quorum).queues] == [True] * 6
    assert make_queues(quorum, recreate=True) == 0
    assert make_queues(quorum, recreate=False) is None
    assert [queue.trouble for queue in check_queues(quorum).queues] == [None] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_shows_the_node_as_it_is(node: Node, kind: QueueKind) -> None:
    state = check_queues(node.fresh_queues(kind))
    assert state.troubles == ()
    assert state.server.startswith("RabbitMQ 3.")
    assert state.consumer_timeout == "86400 s, as the node says"
    assert [(queue.name, queue.num_messages, queue.num_consumers) for queue in state.queues] == [
        (name, 0, 0) for name in ("init", "run", "eval", "init.dead", "run.dead", "eval.dead")
    ]
    assert {queue.arguments["x-queue-type"] for queue in state.queues} == {kind}


def test_the_check_names_a_missing_queue_and_a_timeout_that_is_not_the_nodes(node: Node) -> None:
    given = node.fresh_queues(QueueKind.CLASSIC).model_copy(update={"broker_consumer_timeout_s": 100_000.0})
    with Connection(node.url) as connection, connection.channel() as channel:
        channel.queue_delete("run.dead")
    missing, timeout = check_queues(given).troubles
    assert missing == "queue run.dead: is missing: run `rollmill broker queues`"
    assert timeout == "ROLLMILL_BROKER_CONSUMER_TIMEOUT_S=100000, but consumer_timeout of the node is 86400 s"


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_holds_as_many_messages_as_it_works_on(
    node: Node, kind: QueueKind, database: Database, database_url: str, tmp_path: Path
) -> None:
    given = node.fresh_queues(kind)
    wakeup = sampled_episode(database, handler="tests.integration.deadly:Endless")
    with database.begin() as conn:
        prepared = '{"messages": [], "tools": [], "sandbox": null}'
        conn.execute(
            text("UPDATE episode SET state = 'SAMPLED', outcome = 'finished', prepared = CAST(:prepared AS jsonb)"),
            {"prepared": prepared},
        )
        ids = conn.execute(text("SELECT id FROM episode ORDER BY id")).scalars().all()
    announce(given, *(Wakeup(stage=wakeup.stage, episode_id=number, attempt=1) for number in [*ids, *ids]))
    with Processes(folder=tmp_path, env=node.env(kind, database_url, tmp_path)) as processes:
        processes.start("eval", "workers.fleet", "eval", "--concurrency", "1")
        wait_until(lambda: is_claimed(database), timeout_s=60, what=f"claimed: {processes.logs()}")
        assert node.num_messages("eval") == 3


def test_a_fleet_refuses_a_broker_that_is_known_to_take_messages_back_too_early(
    node: Node, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with database.begin() as conn:
        runs.open_run(conn, run_config("run-a"))
    # 120 s of the agent's own, 90 s until an engine is there, 5 s of grace.
    known = node.settings(QueueKind.CLASSIC, broker_consumer_timeout_s=214)
    line = r"after 214 s, but run may hold one for 215 s: put `consumer_timeout = 86400000` into rabbitmq.conf"
    with pytest.raises(SetupError, match=line):
        check_held(Stage.RUN, database, known, (3, 10, 8))
    with pytest.raises(SetupError, match="eval may hold one for 305 s"):
        check_held(Stage.EVAL, database, known, (3, 10, 8))
    check_held(Stage.RUN, database, node.settings(QueueKind.CLASSIC, broker_consumer_timeout_s=215), (3, 10, 8))
    check_held(Stage.RUN, database, node.settings(QueueKind.CLASSIC), (3, 12, 0))
    assert not caplog.records
    check_held(Stage.RUN, database, node.settings(QueueKind.CLASSIC), (3, 10, 8))
    (record,) = caplog.records
    assert "put `consumer_timeout = 86400000` into rabbitmq.conf, and set ROLLMILL_BROKER" in record.getMessage()


def test_queues_that_somebody_takes_from_are_deleted_only_by_force(node: Node) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    given = node.settings(QueueKind.CLASSIC)
    refused = r"run has 2 consumers, eval has 1 consumer\. Stop the fleets first, or --force it"
    with Connection(node.url) as connection:
        for name in ("run", "run", "eval"):
            connection.channel().basic_consume(name, on_cancel=lambda _: None)
        with pytest.raises(SetupError, match=refused):
            make_queues(node.settings(QueueKind.QUORUM), recreate=True)
        assert [queue.num_consumers for queue in check_queues(given).queues] == [0, 2, 1, 0, 0, 0]
        assert make_queues(given, recreate=True, force=True) == 0
    assert [queue.num_consumers for queue in check_queues(given).queues] == [0] * 6


def test_the_commands_say_what_they_found_and_their_exit_code_too(node: Node) -> None:
    node.fresh_queues(QueueKind.CLASSIC)
    env = {name: None for name in os.environ if name.startswith("ROLLMILL_")} | {
        "ROLLMILL_BROKER_URL": node.url,
        "ROLLMILL_DATA_DIR": str(node.data_dir),
        "COLUMNS": "200",
    }
    runner = CliRunner(env=env)
    good = runner.invoke(app, ["broker", "check"])
    assert good.exit_code == 0
    assert "consumer_timeout  86400 s, as the node says" in good.stdout
    wrong = runner.invoke(app, ["broker", "check"], env={"ROLLMILL_BROKER_QUEUES": "quorum"})
    assert wrong.exit_code == 1
    assert "queue run: PRECONDITION_FAILED" in wrong.stderr
    again = runner.invoke(app, ["broker", "queues", "--recreate"], env={"ROLLMILL_BROKER_QUEUES": "quorum"})
    assert "made the quorum queues anew; 0 messages are gone" in again.stdout
    assert runner.invoke(app, ["broker", "dead"], env=env).stdout.split("\n")[:3] == [
        "init.dead 0",
        "run.dead 0",
        "eval.dead 0",
    ]
