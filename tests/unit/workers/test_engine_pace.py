from __future__ import annotations

import asyncio
import math

import pytest

from tests.unit.workers.pool_fleet import GENERATE, running_fleet
from tests.unit.workers.pool_traffic import WAIT_S, Traffic
from workers.engine_pace import ALIKE, DECAY_S, QUICK_S, Pace, slownesses


def learn(pace: Pace, *answers: tuple[float, int], now: float = 0.0) -> float:
    """Answers one after the other, as (seconds, tokens); the time after them."""
    for seconds, tokens in answers:
        pace.asked("r", max_tokens=4096, now=now)
        now += seconds
        pace.ended("r", num_sampled=tokens, now=now)
    return now


@pytest.mark.parametrize("times", [2, 4])
async def test_a_slow_engine_gets_less_than_its_speed_s_share(times: int) -> None:
    traffic = Traffic(a=0.5, b=0.5, slow=0.5 * times)
    await traffic.flow(at_once=24, num_episodes=144)
    assert traffic.num.total() == 144 * 4
    assert 0 < times * traffic.num["slow"] < min(traffic.num["a"], traffic.num["b"])
    assert traffic.num_moves <= 10


async def test_a_slow_engine_is_used_for_what_the_fast_ones_have_no_time_for() -> None:
    traffic = Traffic(a=0.5, b=0.5, slow=2.0)
    await traffic.flow(at_once=96, num_episodes=240)
    assert 1 / 16 < traffic.num["slow"] / traffic.num["a"] < 1 / 3


async def test_equal_engines_share_alike_and_nothing_moves() -> None:
    traffic = Traffic(a=0.5, b=0.6, c=0.55)
    await traffic.flow(at_once=24, num_episodes=96)
    assert traffic.num_moves == 0
    assert max(traffic.num.values()) - min(traffic.num.values()) <= 4 * 4


async def test_engines_that_are_slow_by_turns_keep_their_episodes() -> None:
    traffic = Traffic(a=0.5, b=0.5)
    traffic.weather = lambda url, now: 3.0 if (int(now) // 2) % 2 == (url == "a") else 1.0
    await traffic.flow(at_once=24, num_episodes=96)
    assert traffic.num_moves <= 0.05 * traffic.num.total()


async def test_a_slow_engine_that_recovers_gets_its_share_again() -> None:
    traffic = Traffic(a=0.5, b=0.5, c=5.0)
    await traffic.flow(at_once=24, num_episodes=96)
    traffic.seconds["c"] = 0.5
    await traffic.flow(at_once=24, num_episodes=480)
    traffic.num.clear()
    await traffic.flow(at_once=24, num_episodes=96)
    assert traffic.num["c"] >= traffic.num["a"] / 2


async def test_a_slow_engine_is_tried_again_however_little_there_is_to_do() -> None:
    traffic = Traffic(a=0.5, slow=50.0)
    await traffic.flow(at_once=1, num_episodes=300)
    assert 1 < traffic.num["slow"] < 20


async def test_a_new_engine_gets_work_at_once() -> None:
    traffic = Traffic(a=0.5, b=0.5)
    await traffic.flow(at_once=8, num_episodes=24)
    traffic.seconds["new"] = 0.5
    traffic.now += 1.0
    assert (await traffic.ask(1000))[1] == "new"


async def test_an_episode_leaves_an_engine_that_became_slow_but_not_one_with_some_more_to_do() -> None:
    traffic = Traffic(a=0.5, b=0.5)
    for url, episode in (("a", 1), ("b", 2)):
        await traffic.visit(url, episode=episode)
    under_way = [await traffic.ask(1) for _ in range(3)]
    assert {url for _, url in under_way} == {"a"}
    traffic.seconds["a"] = 5.0
    traffic.now += 5.0
    for turn, url in under_way:
        traffic.answer(turn, url)
    assert (await traffic.ask(1))[1] == "b"


async def test_turns_wait_for_a_fast_engine_rather_than_take_a_slow_one() -> None:
    traffic = Traffic(max_in_flight=1, a=0.5, slow=2.5)
    for number in range(6):
        await traffic.visit(("a", "slow")[number % 2], episode=number)
    first = await traffic.ask(10)
    assert first[1] == "a"
    second = await traffic.ask_and_wait(11)
    traffic.answer(*first)
    assert (await second)[1] == "a"


async def test_turns_take_a_slow_engine_when_the_fast_one_s_line_is_long() -> None:
    traffic = Traffic(max_in_flight=1, a=0.5, slow=2.5)
    for number in range(6):
        await traffic.visit(("a", "slow")[number % 2], episode=number)
    first = await traffic.ask(10)
    waiting = await traffic.ask_and_wait(11)
    assert (await traffic.ask(12))[1] == "slow"
    traffic.answer(*first)
    assert (await waiting)[1] == "a"


async def test_nobody_waits_longer_for_a_fast_engine_than_half_the_time_there_is() -> None:
    traffic = Traffic(max_in_flight=1, a=0.5, slow=2.5)
    for number in range(6):
        await traffic.visit(("a", "slow")[number % 2], episode=number)
    await traffic.ask(10)
    waiting = await traffic.ask_and_wait(11)
    asked = traffic.now
    traffic.serve_at(asked + 1)
    assert not waiting.done()
    traffic.serve_at(asked + WAIT_S / 2 + 1)
    assert (await waiting)[1] == "slow"


def test_slowness_is_relative_to_the_fastest() -> None:
    paces = {url: Pace() for url in ("a", "b", "c", "new")}
    for url, seconds in (("a", 1.0), ("b", 1.3), ("c", 4.0)):
        now = max(learn(paces[url], *[(seconds, 84)] * 20), 80.0)
    found = slownesses({**paces, "a": paces["a"]}, 80.0)
    assert now == 80.0
    assert (found["a"], found["b"], found["new"]) == (1.0, 1.0, 1.0)
    assert 3.0 < found["c"] < 4.0


def test_a_long_generation_makes_no_engine_slow() -> None:
    paces = {"long": Pace(), "short": Pace()}
    learn(paces["long"], *[(20.0, 1000)] * 5)
    learn(paces["short"], *[(0.6, 14)] * 5, now=97.0)
    assert slownesses(paces, 100.0) == {"long": 1.0, "short": 1.0}


def test_answers_too_quick_to_compare_are_alike() -> None:
    paces = {"a": Pace(), "b": Pace()}
    learn(paces["a"], *[(QUICK_S / 100, 20)] * 5)
    now = learn(paces["b"], *[(QUICK_S, 20)] * 5)
    assert slownesses(paces, now) == {"a": 1.0, "b": 1.0}


def test_a_request_that_failed_says_nothing_of_the_pace() -> None:
    paces = {"a": Pace(), "fails": Pace(), "never answers": Pace()}
    now = learn(paces["fails"], *[(4.0, 84)] * 20)
    now = max(now, learn(paces["a"], *[(1.0, 84)] * 20, now=now - 20))
    before = slownesses(paces, now)["fails"]
    for url in ("fails", "never answers"):
        learn(paces[url], *[(0.001, 0)] * 50, now=now)
    after = slownesses(paces, now + 0.05)
    assert before > 2
    assert after["fails"] == pytest.approx(before, rel=0.01)
    assert after["never answers"] == 1.0


def test_minutes_in_which_an_engine_hung_do_not_make_it_good_again() -> None:
    pace = Pace()
    now = learn(pace, *[(4.0, 84)] * 20)
    fastest = 1.0 / 100
    before = pace.slowness(fastest, now)
    now = learn(pace, (600.0, 0), now=now)
    assert before > 3
    assert pace.slowness(fastest, now) == pytest.approx(before)


def test_an_engine_that_does_not_answer_is_slow_before_it_does() -> None:
    paces = {"a": Pace(), "hangs": Pace()}
    now = learn(paces["a"], *[(1.0, 84)] * 20)
    paces["hangs"].asked("r", max_tokens=84, now=now)
    assert slownesses(paces, now + 1)["hangs"] == 1.0
    assert slownesses(paces, now + 40)["hangs"] > 5


def test_one_lucky_answer_is_no_measure_for_the_others() -> None:
    paces = {"a": Pace(), "b": Pace(), "lucky": Pace()}
    for url in ("a", "b"):
        now = learn(paces[url], *[(1.0, 84)] * 20)
    now = learn(paces["lucky"], (0.7, 84), now=now)
    assert slownesses(paces, now) == {"a": 1.0, "b": 1.0, "lucky": 1.0}


def test_an_engine_with_nothing_to_do_is_forgotten() -> None:
    pace = Pace()
    now = learn(pace, *[(4.0, 84)] * 20)
    ratios = [pace.slowness(0.01, now + idle * DECAY_S) for idle in range(8)]
    assert ratios[0] > 3
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 1.0
    learn(pace, (1.0, 84), now=now + 7 * DECAY_S)
    assert pace.slowness(0.01, now + 7 * DECAY_S + 1) < ALIKE
    learn(pace, (0.0, 0), now=now + 1e6)
    assert pace.doubted == math.inf


async def test_the_pool_learns_from_answers_alone() -> None:
    async with running_fleet(2) as fleet:
        fast, slow = fleet.engines
        slow.token_s = 1.0
        for first in (0, 100):
            turns = [fleet.turn(episode=first + number, group=first + number) for number in range(8)]
            urls = [url for _, url in await asyncio.gather(*turns)]
        assert 4 < urls.count(fast.url) <= 8
        assert slow.calls.count(GENERATE) < fast.calls.count(GENERATE)
