"""Episodes whose sandbox lies on one node: who may claim them, where their messages go, what if the node is gone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from kombu.connection import Connection
from pydantic import JsonValue
from sqlalchemy import text

from common.broker import declare_queues
from common.config import TINY_MODELS
from common.db import episodes, groups, nodes, retries, sandboxes, sharing, tasks
from common.db.episodes import Claim, Wakeup
from common.episode import EpisodeState, Stage
from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from common.queues import QueueKind
from common.settings import Settings
from deploy.broker_queues import check_queues, make_queues
from deploy.status import status_table
from deploy.tables import table_console
from tests.integration.broker_stack import Node
from tests.integration.test_broker import announce
from tests.integration.world import World
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.handlers.shell import Shell
from workers.init import Init
from workers.reaper import Reaper
from workers.render import Renderer
from workers.run import Run
from workers.sandbox import open_backend
from workers.sandbox.protocol import OPEN, SandboxSession, SandboxSpec


def bind(world: World, wakeup: Wakeup, node: str) -> Wakeup:
    """INIT has made its sandbox on the node."""
    claim = world.must_claim(wakeup)
    prepared = {"messages": [], "tools": [], "sandbox": f"{wakeup.episode_id}-{wakeup.attempt}"}
    with world.database.begin() as conn:
        moved = episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared=prepared, node=node)
    assert moved is not None
    return moved


def claim_on(world: World, wakeup: Wakeup, node: str | None) -> Claim | None:
    with world.database.begin() as conn:
        return episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=30, configs={}, node=node)


def beat(world: World, *names: str) -> None:
    with world.database.begin() as conn:
        for name in names:
            nodes.beat(conn, name, every_s=0)


def test_run_takes_a_bound_episode_on_its_node_alone(world: World) -> None:
    first, second = world.feed()
    bound, free = bind(world, first, "a"), world.prepare(second)
    assert (bound.node, free.node) == ("a", None)
    assert claim_on(world, bound, "b") is None
    assert claim_on(world, bound, None) is None
    assert claim_on(world, bound, "a") is not None
    assert claim_on(world, free, "b") is not None


def test_a_message_that_is_sent_again_goes_to_the_node_and_a_new_attempt_to_any(world: World) -> None:
    first, second = world.feed()
    bound = {bind(world, wakeup, "a") for wakeup in (first, second)}
    with world.database.begin() as conn:
        assert set(episodes.resend(conn, after_s=0)) == bound
    claim = claim_on(world, bound.pop(), "a")
    assert claim is not None
    with world.database.begin() as conn:
        (again,) = retries.release(conn, [claim.token], why="ends")
    assert (again.stage, again.attempt, again.node) == (Stage.INIT, 2, None)
    assert bind(world, again, "b").node == "b"


def test_a_second_sandbox_is_made_on_a_node_where_run_lives(world: World) -> None:
    first, second = world.feed()
    claim = claim_on(world, bind(world, first, "a"), "a")
    assert claim is not None
    with world.database.begin() as conn:
        (again,) = retries.release(conn, [claim.token], why="ends")
    beat(world, "b")
    assert claim_on(world, again, "a") is None
    assert claim_on(world, second, "a") is not None
    assert claim_on(world, again, "b") is not None


class FarEngine:
    """A backend of containers at an engine that every node reaches; there is no image any more when RUN comes."""

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        return SandboxSpec(kind="docker", image="agent:1", endpoint="tcp://engine.example:2375")

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        assert spec.endpoint is not None

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        assert spec.files == FILES
        raise EpisodeError(Outcome.SANDBOX_FAILED, "no such image")

    def destroy(self, handle: str) -> None:
        raise AssertionError(handle)

    def sweep(self) -> None:
        raise AssertionError


FILES = {"maple12": "code 34\n"}
PAYLOAD: dict[str, JsonValue] = {"question": "Find the code of maple.", "answer": 34, "files": dict(FILES)}


async def test_a_sandbox_at_an_engine_that_all_reach_is_played_anywhere_and_swept_there(world: World) -> None:
    with world.database.begin() as conn:
        tasks.load(conn, dataset="shell", handler="shell", payloads=[("0", PAYLOAD)])
        (wakeup, _) = groups.create(conn, run_id=world.run.id, task_ids=tasks.ids(conn, "shell"), size=2)
    claim = world.must_claim(wakeup)
    done = Init(world.database, handler=lambda _: Shell(), backend=FarEngine(), node="a")(claim)
    with world.database.begin() as conn:
        moved = episodes.move(conn, claim, done.to, why=done.why, prepared=done.prepared, node=done.node)
        assert conn.execute(text("SELECT count(*) FROM sandbox")).scalar_one() == 0
    assert moved == Wakeup(stage=Stage.RUN, episode_id=wakeup.episode_id, attempt=1)
    playing = claim_on(world, moved, "b")
    assert playing is not None
    run = Run(
        database=world.database,
        engines=EnginePool(EngineClient(timeout_s=1), lambda _: [], wait_s=0),
        handler=lambda _: Shell(),
        renderer=lambda _: Renderer.from_folder(TINY_MODELS / "tiny-shell"),
        backend=FarEngine(),
        node="b",
    )
    with pytest.raises(EpisodeError, match="no such image"):
        await run(playing)
    with world.database.begin() as conn:
        (again,) = retries.release(conn, [playing.token], why="ends")
        assert [row.handle for row in sandboxes.orphans(conn, node="b")] == [f"{wakeup.episode_id}-1"]
    beat(world, "b")
    assert claim_on(world, again, "a") is not None


def test_only_a_node_is_silent_for_which_episodes_wait_while_run_lives_elsewhere(world: World) -> None:
    first, second = world.feed()
    bind(world, first, "a")
    bind(world, second, "b")
    with world.database.begin() as conn:
        assert nodes.silent(conn, silent_s=60) == {}
    beat(world, "b")
    with world.database.begin() as conn:
        assert nodes.silent(conn, silent_s=60) == {"a": 1}
        assert retries.leave_node(conn, "b", silent_s=60, max_attempts=5) == []
        conn.execute(text("UPDATE node SET seen_at = now() - interval '2 minutes'"))
        assert nodes.silent(conn, silent_s=60) == {}
    beat(world, "c")
    with world.database.begin() as conn:
        assert nodes.silent(conn, silent_s=60) == {"a": 1, "b": 1}
        conn.execute(text("DELETE FROM engine"))
        assert nodes.silent(conn, silent_s=60) == {}


def test_the_reaper_starts_episodes_of_a_lost_node_over_and_fails_those_that_failed_too_often(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = world.feed()
    bind(world, first, "gone")
    bind(world, second, "gone")
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET failures = 4 WHERE id = :id"), {"id": second.episode_id})
    given = Settings(data_dir=tmp_path, node="here", node_lost_after_s=0.001)
    sent: list[Wakeup] = []
    reaper = Reaper(world.database, given, open_backend(given), sent.extend)
    reaper.round()
    beat(world, "here")
    reaper.round()
    assert sent == []
    reaper.round()
    assert sent == [Wakeup(stage=Stage.INIT, episode_id=first.episode_id, attempt=2)]
    assert "lost node=gone: no RUN fleet there, episodes=2 start over elsewhere" in caplog.text
    with world.database.begin() as conn:
        rows = conn.execute(text("SELECT state, outcome, reward, node, failures FROM episode ORDER BY id")).all()
        why = conn.execute(text("SELECT why FROM episode_event ORDER BY id DESC LIMIT 1")).scalar_one()
    assert [tuple(row) for row in rows] == [("NEW", None, None, None, 1), ("FAILED", "node_lost", None, "gone", 5)]
    assert why == "node_lost: its sandbox lies on node gone, where no RUN fleet lives any more"


def test_dead_sandboxes_of_a_node_that_is_gone_take_no_room(world: World) -> None:
    first, second = world.feed()
    for wakeup in (first, second):
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            conn.execute(
                text(
                    "INSERT INTO sandbox (episode_id, attempt, backend, node, handle) VALUES (:id, 1, 'b', 'gone', 'h')"
                ),
                {"id": wakeup.episode_id},
            )
            retries.release(conn, [claim.token], why="ends")
    beat(world, "gone")
    with world.database.begin() as conn:
        conn.execute(text("UPDATE run SET max_sandboxes = 8"))
        assert [load.sandboxes for load in sharing.loads(conn)] == [4]
        conn.execute(text("UPDATE node SET seen_at = now() - interval '6 minutes'"))
        assert [load.sandboxes for load in sharing.loads(conn)] == [2]


def test_status_names_the_nodes_where_there_are_several(world: World) -> None:
    first, second = world.feed()
    bind(world, first, "a")
    beat(world, "a")
    assert "waiting for RUN" not in shown(world)
    bind(world, second, "b")
    lines = [line.split() for line in shown(world).splitlines()]
    assert ["a", "1", "0", "s", "ago"] in lines
    assert ["b", "1", "never"] in lines


def shown(world: World) -> str:
    console = table_console()
    with console.capture() as captured:
        console.print(status_table(world.database))
    return captured.get()


@pytest.mark.parametrize("kind", list(QueueKind))
def test_messages_of_a_bound_episode_go_to_its_nodes_queue_alone(node: Node, kind: QueueKind, world: World) -> None:
    given = node.fresh_queues(kind).model_copy(update={"node": "a"})
    other = QueueKind.QUORUM if kind is QueueKind.CLASSIC else QueueKind.CLASSIC
    assert [queue.name for queue in check_queues(given).queues if "@" in queue.name] == []
    with Connection(node.url) as connection:
        connection.connect()
        # One of another kind that a fleet has left behind is made anew.
        declare_queues(connection, given, own=Stage.RUN)
        make_queues(node.settings(other), recreate=True)
        declare_queues(connection, node.settings(other, node="a"), own=Stage.INIT)
        make_queues(given, recreate=True)
        declare_queues(connection, given, own=Stage.INIT)
    first, second = world.feed()
    announce(given, bind(world, first, "a"), bind(world, second, "away"))
    assert {queue.name: queue.num_messages for queue in check_queues(given).queues if queue.num_messages} == {
        "run@a": 1
    }
    with Connection(node.url) as connection, connection.channel() as channel:
        channel.basic_consume("run@a", on_cancel=lambda _: None)
        with pytest.raises(SetupError, match="run@a has 1 consumer"):
            make_queues(given, recreate=True)
    assert make_queues(given, recreate=True, force=True) == 1


def test_over_redis_a_nodes_queue_is_a_list_of_its_own(valkey_url: str, world: World) -> None:
    first, second = world.feed()
    announce(Settings(broker_url=valkey_url, node="c"), bind(world, first, "a"), world.prepare(second))
    with redis.from_url(valkey_url) as client:
        assert {name: client.llen(name) for name in ("run", "run@a", "run@c")} == {"run": 1, "run@a": 1, "run@c": 0}
