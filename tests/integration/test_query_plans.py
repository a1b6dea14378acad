"""On the tables of a long run the queries of the loop read what is in flight, not what is long done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text

from benchmarks.big_run import GROUP_SIZE, GROUPS_PER_STEP, NUM_COMPLETE, NUM_OPEN, Size, fill
from common.config import RunConfig
from common.db import (
    engines,
    episodes,
    groups,
    late,
    nodes,
    retries,
    sandboxes,
    sharing,
    standstill,
    steps,
    stragglers,
    turns,
)
from common.db.episodes import Claim, Wakeup
from common.db.session import Database
from common.episode import STAGE_OF, EpisodeState
from common.outcomes import Outcome
from tests.conftest import clone
from tests.integration.lockstep import PUBLISHED
from tests.integration.plans import scans_of, times_of
from tests.integration.world import World, make_turn, make_world

BIG = {"episode", "episode_group", "episode_event", "turn", "turn_tokens", "sandbox"}
MAX_ROWS = 2_000
"""Rows of big tables that one call may read: some times what is in flight, a hundredth of what is stored."""

MAX_CLAIM_S = 0.005
NUM_STEPS = 3_108
SIZE = Size(num_steps=NUM_STEPS)
"""200,000 episodes."""


@pytest.fixture(scope="module")
def big(postgres_url: str, template_database: str) -> Iterator[World]:
    with clone(postgres_url, template_database) as url:
        database = Database.connect(url)
        world = make_world(database)
        fill(database, world.run.id, SIZE)
        yield world
        database.dispose()


def waiting(conn: Connection, state: EpisodeState, limit: int = 1) -> list[Wakeup]:
    rows = conn.execute(
        text("SELECT id FROM episode WHERE state = :state AND claim_token IS NULL ORDER BY id LIMIT :limit"),
        {"state": state, "limit": limit},
    )
    return [Wakeup(stage=STAGE_OF[state], episode_id=row.id, attempt=1) for row in rows]


def claim(conn: Connection, wakeup: Wakeup, configs: Mapping[int, RunConfig] = MappingProxyType({})) -> Claim:
    claim = episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=30, configs=dict(configs))
    assert claim is not None
    return claim


def claimed(conn: Connection, state: EpisodeState) -> Claim:
    return claim(conn, waiting(conn, state)[0])


def tokens(conn: Connection, limit: int = 100) -> list[Any]:
    query = text("SELECT claim_token FROM episode WHERE claim_token IS NOT NULL LIMIT :limit")
    return list(conn.execute(query, {"limit": limit}).scalars())


def _claim(conn: Connection, world: World) -> Callable[[], object]:
    (wakeup,) = waiting(conn, EpisodeState.READY)
    return lambda: claim(conn, wakeup)


def _claim_scored(conn: Connection, world: World) -> Callable[[], object]:
    (wakeup,) = waiting(conn, EpisodeState.SAMPLED)
    return lambda: claim(conn, wakeup)


def _claim_nothing(conn: Connection, world: World) -> Callable[[], object]:
    (wakeup,) = waiting(conn, EpisodeState.READY)
    claim(conn, wakeup)
    return lambda: episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=30, configs={})


def _claim_bound(conn: Connection, world: World) -> Callable[[], object]:
    (wakeup,) = bound(conn)[:1]
    return lambda: episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=30, configs={}, node="node")


def bound(conn: Connection) -> list[Wakeup]:
    """All that wait for RUN are bound to a node; another one lives."""
    conn.execute(text("UPDATE episode SET node = 'node' WHERE state = 'READY' AND claim_token IS NULL"))
    nodes.beat(conn, "other", every_s=1)
    return waiting(conn, EpisodeState.READY, 1_000)


def _silent(conn: Connection, world: World) -> Callable[[], object]:
    num = len(bound(conn))
    return lambda: _equal(nodes.silent(conn, silent_s=60), {"node": num})


def _equal(found: object, wanted: object) -> None:
    assert found == wanted


def _leave_node(conn: Connection, world: World) -> Callable[[], object]:
    bound(conn)
    return lambda: retries.leave_node(conn, "node", silent_s=60, max_attempts=3)


def _states(conn: Connection, world: World) -> Callable[[], object]:
    bound(conn)
    return lambda: nodes.states(conn, within_s=60)


def _renew(conn: Connection, world: World) -> Callable[[], object]:
    held = tokens(conn)
    return lambda: episodes.renew(conn, held, lease_s=30)


def _release(conn: Connection, world: World) -> Callable[[], object]:
    held = tokens(conn)
    return lambda: retries.release(conn, held, why="shutting down")


def _save(conn: Connection, world: World) -> Callable[[], object]:
    held = claimed(conn, EpisodeState.READY)
    return lambda: turns.save(conn, held, make_turn(0))


def _save_last(conn: Connection, world: World) -> Callable[[], object]:
    held = claimed(conn, EpisodeState.READY)
    return lambda: turns.save_last(conn, held, make_turn(0), outcome=Outcome.FINISHED)


def _load(conn: Connection, world: World) -> Callable[[], object]:
    return lambda: turns.load(conn, 1_000, 1)


def _move(conn: Connection, world: World) -> Callable[[], object]:
    """The move into a final state counts it in its group."""
    held = claimed(conn, EpisodeState.SAMPLED)
    return lambda: episodes.move(conn, held, EpisodeState.SCORED, why="scored", reward=1.0, reward_parts={})


def _cancel_rest(conn: Connection, world: World) -> Callable[[], object]:
    """A whole group in flight, which has as many scores as it wants: none."""
    group_id = claimed(conn, EpisodeState.NEW).group_id
    conn.execute(text("UPDATE episode_group SET wanted = 0 WHERE id = :id"), {"id": group_id})

    def both() -> None:
        stragglers.hold_siblings(conn, group_id)
        assert stragglers.cancel_rest(conn, group_id) == GROUP_SIZE

    return both


def _loads(conn: Connection, world: World) -> Callable[[], object]:
    conn.execute(text("UPDATE run SET max_sandboxes = 1000"))
    return lambda: sharing.loads(conn)


def _retry(conn: Connection, world: World) -> Callable[[], object]:
    held = claimed(conn, EpisodeState.NEW)
    return lambda: retries.retry(conn, held, outcome=Outcome.ENGINE_LOST, detail="", afresh=True, max_attempts=1)


def _pause_if_still(conn: Connection, world: World) -> Callable[[], object]:
    """Twenty groups came to nothing while the newest version was waited for, and as many for each before."""
    conn.execute(
        text(
            """
            UPDATE episode_group SET drop_reason = 'too_few_samples', dropped_version = id / 400
             WHERE state = 'DROPPED'
            """
        )
    )
    conn.execute(
        text(
            """
            UPDATE episode e SET state = 'FAILED', outcome = 'handler_failed', detail = 'boom', reward = NULL
              FROM episode_group g WHERE g.id = e.group_id AND g.state = 'DROPPED'
            """
        )
    )
    version = NUM_STEPS * GROUPS_PER_STEP // 400 - 1

    def both() -> None:
        found = standstill.find(conn, world.run.id, version=version)
        assert found is not None
        assert (found.num_groups, found.num_failed) == (20, 20 * GROUP_SIZE)
        assert standstill.pause_if_still(conn, world.run.id, version=version, max_dropped=20) == str(found)

    return both


def _step(conn: Connection, world: World) -> Callable[[], object]:
    taken = _take(conn, world)
    assert taken.step is not None
    step = taken.step
    return lambda: (
        steps.open_step(conn, world.run.id),
        steps.load_groups(conn, step.id),
        steps.finish_step(conn, step, published=PUBLISHED, metrics={}, trained=[]),
    )


def _take(conn: Connection, world: World) -> steps.Take:
    return steps.take_groups(
        conn, world.run.id, version_in=NUM_STEPS, num_groups=GROUPS_PER_STEP, max_staleness=NUM_STEPS
    )


def call(function: Callable[..., object], **arguments: object) -> Callable[[Connection, World], Callable[[], object]]:
    return lambda conn, world: lambda: function(conn, **arguments)


def call_for_run(function: Callable[..., object], **arguments: object) -> Callable[..., Callable[[], object]]:
    return lambda conn, world: lambda: function(conn, world.run.id, **arguments)


CALLS: dict[str, Callable[[Connection, World], Callable[[], object]]] = {
    "claim": _claim,
    "claim_for_eval": _claim_scored,
    "claim_nothing": _claim_nothing,
    "claim_bound": _claim_bound,
    "silent_nodes": _silent,
    "leave_node": _leave_node,
    "states_of_nodes": _states,
    "renew": _renew,
    "release": _release,
    "save_turn": _save,
    "save_last_turn": _save_last,
    "load_turns": _load,
    "move_and_count_final": _move,
    "cancel_rest": _cancel_rest,
    "retry": _retry,
    "reap": call(retries.reap, max_attempts=3),
    "resend": call(episodes.resend, after_s=60),
    "take_groups": lambda conn, world: lambda: _take(conn, world),
    "drop_groups": call_for_run(steps.take_groups, version_in=NUM_STEPS + 9, num_groups=1, max_staleness=1),
    "is_any_late": call_for_run(late.is_any_late, oldest=NUM_STEPS),
    "cancel_doomed": call(late.cancel_doomed),
    "load_and_finish_step": _step,
    "pause_if_still": _pause_if_still,
    "num_refilled": call_for_run(steps.num_refilled, version_in=NUM_STEPS),
    "loads": _loads,
    "num_in_flight": call_for_run(groups.num_in_flight, live_version=NUM_STEPS - 2),
    "num_not_dropped": call_for_run(groups.num_not_dropped),
    "live_version": call_for_run(engines.live_version),
    "serving": call_for_run(engines.serving),
    "orphans": call(sandboxes.orphans, node="node"),
}
"""From a connection and the world to the call that is looked at; what comes before it only prepares."""


@pytest.mark.parametrize("name", CALLS)
def test_a_query_of_the_loop_reads_by_index_and_only_what_is_in_flight(big: World, name: str) -> None:
    with big.database.engine.connect() as conn:
        function = CALLS[name](conn, big)
        with scans_of(conn) as scans:
            function()
        conn.rollback()
    assert scans
    on_big = [scan for scan in scans if scan.table in BIG]
    assert [scan for scan in on_big if scan.kind == "Seq Scan"] == []
    assert sum(scan.num_rows for scan in on_big) < MAX_ROWS, on_big


def test_the_feeder_counts_a_long_run_right(big: World) -> None:
    with big.database.begin() as conn:
        counted = conn.execute(text("SELECT count(*) FROM episode_group WHERE state <> 'DROPPED'")).scalar_one()
        assert groups.num_not_dropped(conn, big.run.id) == counted == SIZE.num_groups - SIZE.num_final // 20
        in_flight = NUM_COMPLETE + NUM_OPEN
        assert groups.num_in_flight(conn, big.run.id, live_version=NUM_STEPS) == in_flight > NUM_COMPLETE


def test_claims_are_fast_on_the_tables_of_a_long_run(big: World) -> None:
    """An empty statement before each claim tells what the machine is busy with apart from what the claim takes."""
    with big.database.engine.connect() as conn:
        wakeups = [*waiting(conn, EpisodeState.NEW, 100), *waiting(conn, EpisodeState.READY, 100)]
        with times_of(conn) as times:
            for wakeup in wakeups:
                conn.execute(text("SELECT 1"))
                claim(conn, wakeup, {big.run.id: big.run.config})
        conn.rollback()
    assert len(times) == 400
    floor_s, claim_s = (sorted(part)[189] for part in (times[::2], times[1::2]))
    assert claim_s - floor_s < MAX_CLAIM_S, f"p95 of a claim {claim_s:.4f} s, of an empty statement {floor_s:.4f} s"
