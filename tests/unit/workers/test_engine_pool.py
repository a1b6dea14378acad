from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.db.engines import EngineRow
from common.episode import EngineState, FinishReason, Sampled, VersionSpan
from common.errors import DatabaseUnavailable, EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.pool_fleet import GENERATE, Fleet, make_claim, row, running_fleet, until_a_reading_is_old
from tests.unit.workers.waiting import until
from workers.agent import OutOfTime
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow
from workers.engine_list import fresh_enough
from workers.engine_places import EPISODE_SLACK, GROUP_SLACK
from workers.engine_pool import EnginePool, joined
from workers.scripted_engine import Fault, ScriptedEngine


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with running_fleet() as fleet:
        yield fleet


async def until_open(engine: ScriptedEngine, number: int) -> None:
    await until(lambda: len(engine.open) == number)


async def test_an_episode_stays_with_its_engine(fleet: Fleet) -> None:
    homes = {episode: (await fleet.turn(episode=episode, group=episode))[1] for episode in range(6)}
    for _ in range(2):
        for episode in reversed(range(6)):
            assert (await fleet.turn(episode=episode, group=episode))[1] == homes[episode]


async def test_idle_engines_take_turns(fleet: Fleet) -> None:
    used = [(await fleet.turn(episode=episode, group=episode))[1] for episode in range(6)]
    assert used == [fleet.urls[0], fleet.urls[1]] * 3


async def test_siblings_share_an_engine_while_it_is_not_much_busier(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.pause()
    tasks = []
    for episode in range(GROUP_SLACK + 2):
        tasks.append(asyncio.create_task(fleet.turn(episode=episode, group=1)))
        await until(lambda: sum(len(engine.open) for engine in fleet.engines) == len(tasks))
    assert [len(engine.open) for engine in fleet.engines] == [GROUP_SLACK + 1, 1]
    for engine in fleet.engines:
        engine.resume()
    await asyncio.gather(*tasks)


async def test_an_episode_leaves_an_overloaded_engine(fleet: Fleet) -> None:
    first, second = fleet.engines
    assert (await fleet.turn(episode=1, group=1))[1] == first.url
    first.pause()
    fleet.rows = [row(0, first.url)]
    await until_a_reading_is_old()
    others = [asyncio.create_task(fleet.turn(episode=10 + i, group=10 + i)) for i in range(EPISODE_SLACK + 1)]
    await until_open(first, EPISODE_SLACK + 1)
    fleet.rows = [row(0, first.url), row(1, second.url)]
    await until_a_reading_is_old()
    assert (await fleet.turn(episode=1, group=1))[1] == second.url
    first.resume()
    await asyncio.gather(*others)


async def test_load_is_given_back_whatever_the_end(fleet: Fleet) -> None:
    first, _ = fleet.engines
    fleet.rows = fleet.rows[:1]
    first.fail_next(GENERATE, Fault.CUT)
    await fleet.turn(max_tokens=3)
    first.pause()
    task = asyncio.create_task(fleet.turn())
    await until_open(first, 1)
    assert fleet.pool.uses[first.url].outstanding == 4
    task.cancel()
    await until_open(first, 0)
    assert fleet.pool.uses[first.url].outstanding == 0


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_a_failed_request_goes_to_another_engine(fleet: Fleet, fault: Fault) -> None:
    first, second = fleet.engines
    first.fail_next(GENERATE, fault)
    sampled, url = await fleet.turn()
    assert (sampled.ids, url) == ((10, 11, 12), second.url)


async def test_a_failed_engine_is_avoided_and_then_tried_again(fleet: Fleet) -> None:
    first, second = fleet.engines
    first.fail_next(GENERATE, Fault.ERROR)
    await fleet.turn(episode=1)
    used = {(await fleet.turn(episode=episode, group=episode))[1] for episode in range(2, 8)}
    assert used == {second.url}
    fleet.rows = fleet.rows[:1]
    await until_a_reading_is_old()
    assert (await fleet.turn(episode=9, group=9))[1] == first.url


async def test_unversioned_tokens_are_thrown_away(fleet: Fleet) -> None:
    first, second = fleet.engines
    first.version = "default"
    sampled, url = await fleet.turn()
    assert url == second.url
    assert sampled.spans == (VersionSpan(version=3, start=0, end=3),)


async def test_waits_for_an_engine_that_serves_the_run(fleet: Fleet) -> None:
    rows = fleet.rows
    fleet.rows = [replace(rows[0], version=None), replace(rows[1], state=EngineState.QUARANTINED)]
    task = asyncio.create_task(fleet.turn())
    await until(lambda: fleet.num_reads >= 2)
    assert not task.done()
    fleet.rows = rows
    assert (await task)[0].ids == (10, 11, 12)


async def test_gives_up_after_the_wait(fleet: Fleet) -> None:
    async with EngineClient(timeout_s=1) as client:
        pool = EnginePool(client, lambda run_id: [], wait_s=0.3)
        started = time.monotonic()
        with pytest.raises(EpisodeError, match=r"no engine serves run run-a, for 0\.3 s") as caught:
            await pool.generate(make_claim(), [1], request_id="r", stop_ids=())
    assert caught.value.outcome is Outcome.ENGINE_LOST
    assert 0.3 <= time.monotonic() - started < 2


async def test_a_request_is_cut_off_when_the_agents_time_is_used_up(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.fail_next(GENERATE, Fault.HANG)
    with pytest.raises(OutOfTime, match="had not answered when the agent's time was used up"):
        await fleet.pool.generate(make_claim(), [1], request_id="r", stop_ids=(), limit_s=0.2)


async def test_waiting_for_an_engine_is_not_the_agents_time(fleet: Fleet) -> None:
    rows, fleet.rows = fleet.rows, []
    started = time.monotonic()
    waiting = asyncio.create_task(fleet.pool.generate(make_claim(), [1], request_id="r", stop_ids=(), limit_s=1.0))
    await until(lambda: time.monotonic() - started > 1.1)
    fleet.rows = rows
    assert (await waiting).sampled.ids == (10, 11, 12)


async def test_engines_that_all_fail_name_the_last_reason(fleet: Fleet) -> None:
    for engine in fleet.engines:
        await engine.stop()
    async with EngineClient(timeout_s=1) as client:
        pool = EnginePool(client, fleet.read, wait_s=0.3)
        with pytest.raises(EpisodeError, match=r"http://127.*Connect.*, for 0\.3 s"):
            await pool.generate(make_claim(), [1], request_id="r", stop_ids=())


async def test_an_engine_that_comes_back_ends_the_wait(fleet: Fleet) -> None:
    first, _ = fleet.engines
    fleet.rows = fleet.rows[:1]
    await first.stop()
    task = asyncio.create_task(fleet.turn())
    await until(lambda: first.url in fleet.pool.uses and fleet.pool.uses[first.url].failures == 1)
    await first.start()
    assert (await task)[1] == first.url
    assert fleet.pool.uses[first.url].failures == 0


async def test_an_aborted_request_goes_on_within_its_budget(fleet: Fleet) -> None:
    first, _ = fleet.engines
    first.token_s = 0.01
    task = asyncio.create_task(fleet.turn(max_tokens=8))
    await until(lambda: first.num_tokens == 3)
    async with EngineClient(timeout_s=1) as client:
        first.pause()
        first.version = "run-a/000004"
        assert await client.abort(first.url, [next(iter(first.open)).removeprefix("generate-tokens-")]) == 1
        first.resume()
    sampled, url = await task
    assert url == first.url
    assert sampled.ids == tuple(range(10, 18))
    assert len(sampled.logprobs) == 8
    assert [(span.version, span.end) for span in sampled.spans] == [(3, 3), (4, 8)]
    assert sampled.finish_reason is FinishReason.LENGTH


async def test_a_turn_has_its_whole_budget_however_many_came_before(fleet: Fleet) -> None:
    prompt = [1]
    for number in range(3):
        claim = make_claim(max_tokens=3)
        generated = await fleet.pool.generate(claim, prompt, request_id=f"turn-{number}", stop_ids=(29,))
        assert len(generated.sampled.ids) == 3
        prompt += generated.sampled.ids


async def test_an_abort_with_the_whole_budget_ends_by_length() -> None:
    span = {"version": "run-a/000003", "start": 0, "end": 3}
    logprobs = {"content": [{"token_id": token_id, "logprob": -1.0} for token_id in (5, 6, 7)]}
    choice = {"finish_reason": "abort", "token_ids": [5, 6, 7], "weight_versions": [span], "logprobs": logprobs}

    async def abort_late(_: web.Request) -> web.Response:
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post(GENERATE, abort_late)
    async with TestServer(app) as server, EngineClient(timeout_s=1) as client:
        rows = [row(0, str(server.make_url("")))]
        pool = EnginePool(client, lambda run_id: rows, wait_s=1)
        whole = (await pool.generate(make_claim(max_tokens=3), [1], request_id="r", stop_ids=())).sampled
    assert whole.ids == (5, 6, 7)
    assert whole.finish_reason is FinishReason.LENGTH


async def test_an_abort_before_the_first_token_is_tried_again(fleet: Fleet) -> None:
    first, second = fleet.engines
    first.pause()
    task = asyncio.create_task(fleet.turn())
    await until_open(first, 1)
    async with EngineClient(timeout_s=1) as client:
        await client.abort(first.url, [next(iter(first.open)).removeprefix("generate-tokens-")])
    assert (await task)[1] == second.url


async def test_a_prompt_that_is_too_long_is_not_tried_elsewhere(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.max_model_len = 1
    with pytest.raises(ContextOverflow):
        await fleet.turn()
    assert sum(engine.calls.count(GENERATE) for engine in fleet.engines) == 1


async def test_readers_share_one_reading(fleet: Fleet) -> None:
    await asyncio.gather(*[fleet.turn(episode=episode) for episode in range(50)])
    assert fleet.num_reads == 1


async def test_a_reading_that_hangs_ends_with_the_wait() -> None:
    released = threading.Event()

    def hang(run_id: int) -> list[EngineRow]:
        released.wait(10)
        return []

    async with EngineClient(timeout_s=1) as client:
        pool = EnginePool(client, hang, wait_s=0.1)
        with pytest.raises(EpisodeError, match="could not be read in time"):
            await pool.generate(make_claim(), [1], request_id="r", stop_ids=())
        released.set()


async def test_the_databases_absence_is_passed_on() -> None:
    def fail(run_id: int) -> list[EngineRow]:
        raise DatabaseUnavailable("gone")

    async with EngineClient(timeout_s=1) as client:
        pool = EnginePool(client, fail, wait_s=0.1)
        with pytest.raises(DatabaseUnavailable):
            await pool.generate(make_claim(), [1], request_id="r", stop_ids=())


def test_lagging_engines_get_no_new_work() -> None:
    rows = [
        row(0, "a", version=7),
        row(1, "b", version=6),
        row(2, "c", version=5),
        row(3, "d", version=None),
        row(4, "e", version=9, state=EngineState.QUARANTINED),
    ]
    assert fresh_enough(rows, 1) == ["a", "b"]
    assert fresh_enough(rows, 0) == ["a"]
    assert fresh_enough([], 0) == []


def test_engines_that_all_lag_get_no_new_work() -> None:
    """What they would sample is dropped as stale: the newest version counts, not the newest that some engine has."""
    rows = [replace(row(0, "a", version=5), newest=7), replace(row(1, "b", version=6), newest=7)]
    assert fresh_enough(rows, 2) == ["a", "b"]
    assert fresh_enough(rows, 1) == ["b"]
    assert fresh_enough(rows, 0) == []


def sampled(*spans: tuple[int, int], reason: FinishReason = FinishReason.ABORT) -> Sampled:
    """One id a position; spans as (version, end)."""
    starts = [0, *[end for _, end in spans]]
    end = starts[-1]
    return Sampled(
        ids=tuple(range(end)),
        logprobs=(-1.0,) * end,
        spans=tuple(
            VersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, spans, strict=False)
        ),
        finish_reason=reason,
    )


@pytest.mark.parametrize(
    ("first", "rest", "spans"),
    [
        ([(3, 2)], [(3, 1)], [(3, 0, 3)]),
        ([(3, 2)], [(4, 1)], [(3, 0, 2), (4, 2, 3)]),
        ([(3, 1), (4, 2)], [(4, 1), (5, 4)], [(3, 0, 1), (4, 1, 3), (5, 3, 6)]),
    ],
)
def test_joined_parts_read_as_one_request(
    first: list[tuple[int, int]], rest: list[tuple[int, int]], spans: list[tuple[int, int, int]]
) -> None:
    a, b = sampled(*first), sampled(*rest, reason=FinishReason.STOP)
    whole = joined(a, b)
    assert whole.ids == a.ids + b.ids
    assert [(span.version, span.start, span.end) for span in whole.spans] == spans
    assert whole.finish_reason is FinishReason.STOP


async def test_a_turn_gets_no_more_ids_than_its_row_has_room_for(fleet: Fleet) -> None:
    claim = make_claim(max_tokens=9)
    rollout = claim.config.rollout.model_copy(update={"max_row_tokens": 6})
    claim = replace(claim, config=claim.config.model_copy(update={"rollout": rollout}))
    for prompt, num in (([1], 5), ([1, 10, 11, 12], 2)):
        generated = await fleet.pool.generate(claim, prompt, request_id=f"row-{num}", stop_ids=(29,))
        assert (len(generated.sampled.ids), generated.sampled.finish_reason) == (num, FinishReason.LENGTH)
