from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from common.db.engines import EngineRow
from common.episode import EngineState, Sampled
from common.errors import DatabaseUnavailable, EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.pool_fleet import GENERATE, Fleet, make_claim, row, running_fleet, until_a_reading_is_old
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_line import HOME_PATIENCE_S, OVERTAKE_S, Line, Waiter
from workers.engine_list import EngineList
from workers.engine_places import EnginePlaces, TurnRequest
from workers.engine_pool import EnginePool
from workers.engine_pressure import CUT, MAX_IN_FLIGHT, START_LIMIT
from workers.scripted_engine import Fault

Turning = asyncio.Task[tuple[Sampled, str]]


@pytest.fixture
async def narrow() -> AsyncIterator[Fleet]:
    """Two engines that take one request each."""
    async with running_fleet(2, max_in_flight=1) as fleet:
        yield fleet


def start(fleet: Fleet, episode: int, group: int | None = None) -> Turning:
    return asyncio.create_task(fleet.turn(episode=episode, group=episode if group is None else group))


async def start_and_wait_for(fleet: Fleet, episode: int, reached: int) -> Turning:
    """Start a turn; `reached` turns are then under way or in the line."""
    task = start(fleet, episode)
    await until(lambda: fleet.pool.num_waiting + sum(use.flight.num for use in fleet.pool.uses.values()) == reached)
    return task


async def fill(fleet: Fleet) -> list[Turning]:
    """A turn that does not end on each engine."""
    for engine in fleet.engines:
        engine.pause()
    return [await start_and_wait_for(fleet, 100 + number, number + 1) for number in range(len(fleet.engines))]


def assert_idle(fleet: Fleet) -> None:
    """Nothing is held, whatever the ends were."""
    assert fleet.pool.num_waiting == 0
    assert [(use.flight.num, use.outstanding, use.queued) for use in fleet.pool.uses.values()] == [
        (0, 0, 0) for _ in fleet.pool.uses
    ]


async def test_those_who_wait_are_served_in_the_order_in_which_they_came(narrow: Fleet) -> None:
    first, _ = narrow.engines
    narrow.rows = narrow.rows[:1]
    first.pause()
    ends: list[int] = []
    tasks = []

    def note(episode: int, _: Turning) -> None:
        ends.append(episode)

    for episode in range(6):
        tasks.append(await start_and_wait_for(narrow, episode, episode + 1))
        tasks[-1].add_done_callback(partial(note, episode))
    assert (len(first.open), narrow.pool.num_waiting) == (1, 5)
    first.resume()
    await asyncio.gather(*tasks)
    assert ends == list(range(6))
    assert_idle(narrow)


async def test_a_first_turn_goes_where_there_is_room(narrow: Fleet) -> None:
    first, second = narrow.engines
    first.pause()
    busy = await start_and_wait_for(narrow, 1, 1)
    assert (await start(narrow, 2, group=1))[1] == second.url
    first.resume()
    assert (await busy)[1] == first.url


async def test_an_episode_waits_a_moment_for_its_own_engine(narrow: Fleet) -> None:
    first, second = narrow.engines
    assert (await start(narrow, 1))[1] == first.url
    assert (await start(narrow, 2))[1] == second.url
    first.pause()
    busy = await start_and_wait_for(narrow, 3, 1)
    waiting = await start_and_wait_for(narrow, 1, 2)
    first.resume()
    assert (await waiting)[1] == first.url
    await busy


async def test_another_engine_takes_it_when_its_own_stays_full(narrow: Fleet) -> None:
    first, second = narrow.engines
    assert (await start(narrow, 1))[1] == first.url
    assert (await start(narrow, 2))[1] == second.url
    first.pause()
    busy = await start_and_wait_for(narrow, 3, 1)
    asked = time.monotonic()
    assert (await start(narrow, 1))[1] == second.url
    assert HOME_PATIENCE_S <= time.monotonic() - asked < HOME_PATIENCE_S + 2
    first.resume()
    await busy


async def test_waiting_for_a_place_ends_at_the_deadline(narrow: Fleet) -> None:
    busy = await fill(narrow)
    async with EngineClient(timeout_s=1) as client:
        pool = EnginePool(client, narrow.read, wait_s=0.3, max_in_flight=1)
        held = [
            asyncio.create_task(pool.generate(make_claim(episode=i, group=i), [1], request_id=f"a{i}", stop_ids=()))
            for i in range(2)
        ]
        await until(lambda: sum(use.flight.num for use in pool.uses.values()) == 2)
        with pytest.raises(EpisodeError, match=r"all engines of run run-a are full, for 0\.3 s") as caught:
            await pool.generate(make_claim(), [1], request_id="b", stop_ids=())
        assert pool.num_waiting == 0
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    assert caught.value.outcome is Outcome.ENGINE_LOST
    for engine in narrow.engines:
        engine.resume()
    await asyncio.gather(*busy)


async def test_waiting_for_a_place_is_not_the_agents_time(narrow: Fleet) -> None:
    busy = await fill(narrow)
    asked = time.monotonic()
    waiting = asyncio.create_task(
        narrow.pool.generate(make_claim(episode=7), [1], request_id="r", stop_ids=(), limit_s=0.4)
    )
    await until(lambda: time.monotonic() - asked > 0.6)
    assert narrow.pool.num_waiting == 1
    for engine in narrow.engines:
        engine.resume()
    generated = await waiting
    assert generated.latency_ms < 400
    await asyncio.gather(*busy)


async def test_a_turn_that_is_cancelled_leaves_the_line(narrow: Fleet) -> None:
    busy = await fill(narrow)
    waiting = [await start_and_wait_for(narrow, episode, 3 + episode) for episode in range(3)]
    waiting[1].cancel()
    await until(lambda: narrow.pool.num_waiting == 2)
    for engine in narrow.engines:
        engine.resume()
    await asyncio.gather(*busy, waiting[0], waiting[2])
    assert waiting[1].cancelled()
    assert_idle(narrow)


@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_place_that_comes_at_the_moment_of_the_cancel_is_given_back(cancel_first: bool) -> None:
    places = EnginePlaces(EngineList(lambda run_id: [row(0, "a")]), wait_s=5, max_in_flight=1)
    deadline = time.monotonic() + 5
    turns = [
        TurnRequest(claim=make_claim(), prompt_ids=(1,), request_id=f"r{number}", stop_ids=(), max_tokens=3)
        for number in range(2)
    ]
    await places.wait_for(turns[0], deadline, "")
    waiting = asyncio.create_task(places.wait_for(turns[1], deadline, ""))
    await until(lambda: places.num_waiting == 1)
    if cancel_first:
        waiting.cancel()
        places.give_back(turns[0], "a")
    else:
        places.give_back(turns[0], "a")
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (places.uses["a"].flight.num, places.uses["a"].load, places.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_those_in_a_failed_engines_line_go_to_another(narrow: Fleet, fault: Fault) -> None:
    first, second = narrow.engines
    first.fail_next(GENERATE, fault, fault, fault)
    turns = await asyncio.gather(*(start(narrow, episode, group=1) for episode in range(8)))
    assert {url for _, url in turns} <= {first.url, second.url}
    assert {sampled.ids for sampled, _ in turns} == {(10, 11, 12)}
    assert_idle(narrow)


async def test_a_drained_engine_finishes_what_it_has_and_gets_nothing_new(narrow: Fleet) -> None:
    first, second = narrow.engines
    first.pause()
    under_way = await start_and_wait_for(narrow, 1, 1)
    narrow.rows = [row(0, first.url, state=EngineState.DRAINING), row(1, second.url)]
    await until_a_reading_is_old()
    waiting = [start(narrow, episode, group=1) for episode in range(2, 6)]
    assert {url for _, url in await asyncio.gather(*waiting)} == {second.url}
    first.resume()
    assert (await under_way)[1] == first.url
    assert (await start(narrow, 1))[1] == second.url
    assert first.calls.count(GENERATE) == 1


async def test_an_engine_back_from_quarantine_serves_those_who_wait(narrow: Fleet) -> None:
    first, second = narrow.engines
    narrow.rows = [row(0, first.url), row(1, second.url, state=EngineState.QUARANTINED)]
    first.pause()
    busy = await start_and_wait_for(narrow, 1, 1)
    waiting = await start_and_wait_for(narrow, 2, 2)
    narrow.rows = [row(0, first.url), row(1, second.url)]
    assert (await waiting)[1] == second.url
    first.resume()
    await busy


async def test_many_who_wait_hold_up_nobody_under_way(narrow: Fleet) -> None:
    narrow.rows = narrow.rows[:1]
    first, _ = narrow.engines
    first.token_s = 0.002
    turns = await asyncio.gather(*(start(narrow, episode) for episode in range(100)))
    assert len(turns) == 100
    assert first.calls.count(GENERATE) == 100
    assert_idle(narrow)


async def test_the_databases_absence_is_told_to_all_who_wait(narrow: Fleet) -> None:
    busy = await fill(narrow)
    rows = narrow.rows
    waiting = [await start_and_wait_for(narrow, episode, 3 + episode) for episode in range(3)]
    narrow.rows = []

    def fail(run_id: int) -> list[EngineRow]:
        raise DatabaseUnavailable("gone")

    narrow.failing = fail
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [
        DatabaseUnavailable
    ] * 3
    narrow.failing = None
    narrow.rows = rows
    for engine in narrow.engines:
        engine.resume()
    await asyncio.gather(*busy)
    assert_idle(narrow)


def page(*, waiting: int = 0, kv_usage: float = 0.1, preemptions: int = 0) -> str:
    figures = {
        "num_requests_waiting": waiting,
        "num_requests_running": 8,
        "kv_cache_usage_perc": kv_usage,
        "num_preemptions_total": preemptions,
    }
    return "".join(f'vllm:{name}{{engine="0",model_name="policy"}} {value}\n' for name, value in figures.items())


async def test_engines_limits_follow_their_own_pages() -> None:
    """Too much, nothing to say, no answer at all: each engine is judged by itself, and none holds up the others."""
    async with running_fleet(3) as fleet:
        pressed, silent, stuck = fleet.engines
        pressed.metrics = page(kv_usage=0.99)
        stuck.fail_next("/metrics", *[Fault.HANG] * 10)
        for engine in fleet.engines:
            engine.pause()
        tasks = [await start_and_wait_for(fleet, number, number + 1) for number in range(30)]
        await until(lambda: [len(engine.open) for engine in fleet.engines] == [10, 10, 10], within_s=60)
        watch = asyncio.create_task(fleet.pool.watch_pressure(every_s=0.01))
        limits = {engine.url: fleet.pool.uses[engine.url].flight for engine in fleet.engines}
        await until(lambda: limits[pressed.url].limit == int(CUT * 10) and limits[silent.url].limit == MAX_IN_FLIGHT)
        assert limits[stuck.url].limit == START_LIMIT
        watch.cancel()
        for engine in fleet.engines:
            engine.resume()
        await asyncio.gather(*tasks)


async def test_new_turns_keep_away_from_an_engine_under_pressure() -> None:
    async with running_fleet(2) as fleet:
        pressed, idle = fleet.engines
        pressed.metrics = page(preemptions=0, kv_usage=0.99)
        idle.metrics = page()
        pressed.pause()
        held = [await start_and_wait_for(fleet, 0, 1)]
        watch = asyncio.create_task(fleet.pool.watch_pressure(every_s=0.01))
        await until(lambda: fleet.pool.uses[pressed.url].flight.limit == 1)
        used = [(await fleet.turn(episode=episode, group=0))[1] for episode in range(1, 20)]
        assert used == [idle.url] * 19
        watch.cancel()
        pressed.resume()
        await asyncio.gather(*held)


def in_line(line: Line[str], name: str, home: str | None, *, since: float = 0.0, settled: bool = True) -> None:
    line.join(Waiter(turn=name, home=home, settled=settled, since=since, choosy_until=0.0))


async def test_who_is_served_next() -> None:
    line: Line[str] = Line()
    in_line(line, "a1", "a", since=0.0)
    in_line(line, "b1", "b", since=1.0)
    in_line(line, "b2", "b", since=OVERTAKE_S + 2.0)
    assert (own := line.next_at("b")) is not None
    assert own.turn == "b1"
    assert line.next_at("c") is None
    assert line.leave(own)
    assert not line.leave(own)
    assert (oldest := line.next_at("b")) is not None
    assert oldest.turn == "a1"
    assert len(line) == 2


async def test_who_may_be_taken_by_any_engine() -> None:
    line: Line[str] = Line()
    in_line(line, "settled", "a", since=10.0)
    in_line(line, "new", "b", since=10.1, settled=False)
    now = 10.2
    taken = line.next_anywhere(["a", "b"], now)
    assert taken is not None
    assert taken.turn == "new"
    line.leave(taken)
    assert line.next_anywhere(["a", "b"], now) is None
    for urls, when in ((["b"], now), (["a", "b"], 10.0 + HOME_PATIENCE_S)):
        taken = line.next_anywhere(urls, when)
        assert taken is not None
        assert taken.turn == "settled"


async def test_an_episode_that_evaluates_a_version_plays_only_where_it_is_served_however_old() -> None:
    async with running_fleet(2) as fleet:
        fleet.rows[0] = row(0, fleet.urls[0], version=9)
        fleet.rows[1] = row(1, fleet.urls[1], version=3)
        training, evaluating = make_claim(episode=1), make_claim(episode=2, eval_version=3)
        for claim, url in ((training, fleet.urls[0]), (evaluating, fleet.urls[1])):
            for number in range(3):
                request_id = f"{claim.episode_id}-{number}"
                generated = await fleet.pool.generate(claim, [1], request_id=request_id, stop_ids=(29,))
                assert generated.engine == url
        assert_idle(fleet)


async def test_an_episode_that_evaluates_waits_for_an_engine_with_its_version() -> None:
    async with running_fleet(1) as fleet:
        claim = make_claim(eval_version=4)
        task = asyncio.create_task(fleet.pool.generate(claim, [1], request_id="r", stop_ids=(29,)))
        await until(lambda: fleet.pool.num_waiting == 1)
        assert (await fleet.turn(episode=7))[1] == fleet.urls[0]
        assert not task.done()
        fleet.rows[0] = row(0, fleet.urls[0], version=4)
        assert (await task).engine == fleet.urls[0]
        assert_idle(fleet)
