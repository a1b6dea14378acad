from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.config import RolloutConfig, RunConfig, TrainConfig
from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, FinishReason, Sampled, Stage, VersionSpan
from common.errors import DatabaseUnavailable, EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.waiting import until
from workers.agent import OutOfTime
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow
from workers.engine_pool import EPISODE_SLACK, GROUP_SLACK, EnginePool, fresh_enough, joined
from workers.scripted_engine import Fault, ScriptedEngine

GENERATE = "/inference/v1/generate"
ALPHABET = list(range(10, 30))
"""What the scripted policy writes after any prompt of one id; a longer prompt is continued from where it stands."""


def go_on(prompt: list[int]) -> list[int]:
    return ALPHABET[len(prompt) - 1 :]


class Fleet:
    """Engines, their rows, and a pool over them."""

    def __init__(self, client: EngineClient, engines: list[ScriptedEngine]) -> None:
        self.engines = engines
        self.rows = [row(number, engine.url) for number, engine in enumerate(engines)]
        self.num_reads = 0
        self.pool = EnginePool(client, self.read, wait_s=5)

    def read(self, run_id: int) -> list[EngineRow]:
        self.num_reads += 1
        return [row for row in self.rows if row.run_id == run_id]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    async def turn(self, *, episode: int = 1, group: int = 1, max_tokens: int = 3) -> tuple[Sampled, str]:
        claim = make_claim(episode=episode, group=group, max_tokens=max_tokens)
        generated = await self.pool.generate(claim, [1], request_id=uuid4().hex, stop_ids=(29,))
        return generated.sampled, generated.engine


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    engines = [ScriptedEngine(go_on) for _ in range(2)]
    for engine in engines:
        engine.version = "run-a/000003"
        await engine.start()
    async with EngineClient(timeout_s=5) as client:
        yield Fleet(client, engines)
    for engine in engines:
        await engine.stop()


def row(number: int, url: str, *, version: int | None = 3, state: EngineState = EngineState.SERVING) -> EngineRow:
    return EngineRow(id=number, url=url, run_id=5, state=state, version=version)


def make_claim(*, episode: int = 1, group: int = 1, max_tokens: int = 3) -> Claim:
    return Claim(
        stage=Stage.RUN,
        episode_id=episode,
        attempt=1,
        token=uuid4(),
        worker="w",
        group_id=group,
        run_id=5,
        config=RunConfig(
            name="run-a",
            model=Path("model"),
            rollout=RolloutConfig(max_tokens_per_turn=max_tokens),
            train=TrainConfig(max_staleness=1),
        ),
        handler="calculator",
        payload={},
        prepared=None,
        num_turns=0,
        outcome=None,
        transcript=[],
    )


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


async def until_a_reading_is_old() -> None:
    due = time.monotonic() + 0.21
    await until(lambda: time.monotonic() >= due)


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
