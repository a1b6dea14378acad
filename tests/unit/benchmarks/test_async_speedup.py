"""The comparison of ways to train: the same episodes in each, and figures that count what was thrown away."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.speedup_report import best, figures
from benchmarks.speedup_ways import Shape, Trained, Way, batches, lengths, synchronous_s
from benchmarks.tailed_engine import LONG_TOKENS, MEAN_TOKENS, MEDIAN_TOKENS, MODEL, NumberedTask, drawn_tokens, policy
from workers.render import Renderer

SHAPE = Shape(num_versions=2, groups_per_step=3, group_size=4, token_s=0.1, load_s=0.5)


def test_siblings_get_the_lengths_that_were_drawn_for_their_task() -> None:
    renderer = Renderer.from_folder(MODEL)
    reply = policy(renderer, seed=3, group_size=4)
    task = NumberedTask()
    prompts = {number: renderer.first_prompt(task.init({"number": number}).messages, []) for number in (7, 8)}
    said = [reply(prompts[number]) for number in (7, 8, 7, 8, 7, 7)]
    drawn = [drawn_tokens(3, number, sibling) for number, sibling in ((7, 0), (8, 0), (7, 1), (8, 1), (7, 2), (7, 3))]
    assert [len(ids) for ids in said] == drawn
    assert {ids[-1] for ids in said} <= set(renderer.stop_ids)


def test_lengths_have_the_median_the_mean_and_the_tail_that_they_are_said_to_have() -> None:
    drawn = sorted(drawn_tokens(0, number, 0) for number in range(20_000))
    assert abs(drawn[10_000] - MEDIAN_TOKENS) <= 1
    assert sum(drawn) / len(drawn) == pytest.approx(MEAN_TOKENS, rel=0.05)
    assert sum(length >= LONG_TOKENS for length in drawn) / len(drawn) == pytest.approx(0.02, abs=0.004)


def test_the_least_time_of_the_synchronous_ways_is_that_of_the_longest_episodes_steps_and_loads() -> None:
    first, second = batches(5, SHAPE)
    assert len({*first, *second}) == 6
    longest = max(lengths(first, 5, SHAPE)) + max(lengths(second, 5, SHAPE))
    assert synchronous_s(5, SHAPE) == pytest.approx(0.1 * longest + 2 * (0.1 * MEAN_TOKENS + 0.5))


def made(bound: int | None, *, seed: int, seconds: float, sampled: int = 100, late: str = "drop") -> Trained:
    way = Way(max_staleness=bound, late_groups="wait" if late == "wait" else "drop", seed=seed, port=1)
    lags = Counter({0: 20, bound or 0: 4} if bound else {0: 24})
    return Trained(
        way=way,
        seconds=seconds,
        sampled_tokens=sampled,
        trained_tokens=80,
        long_episodes=6,
        dropped=Counter({"stale": 2}),
        lags=lags,
    )


def test_figures_compare_the_same_seed_and_count_what_was_dropped() -> None:
    trained = [
        *(made(None, seed=seed, seconds=seconds) for seed, seconds in ((0, 40.0), (1, 60.0))),
        *(made(0, seed=seed, seconds=30.0) for seed in (1, 0)),
        *(made(2, seed=seed, seconds=10.0, sampled=160) for seed in (0, 1)),
        *(made(4, seed=seed, seconds=12.0, late="wait") for seed in (0, 1)),
    ]
    found = figures(trained, SHAPE)
    two = found["staleness-2"]
    assert (two.over_coupled.low, two.over_coupled.mean, two.over_coupled.high) == (4.0, 5.0, 6.0)
    assert two.over_synchronous.mean == 3.0
    assert two.episodes_per_s == pytest.approx(2.4)
    assert two.engine_busy == pytest.approx(160 * 0.1 / 12 / 10)
    assert two.trainer_idle == pytest.approx(1 - 2 * 0.1 * MEAN_TOKENS / 10)
    assert (two.tokens_wasted, two.groups_dropped, two.long_share) == (0.5, 2.0, 0.25)
    assert (best(found, wait=False), best(found, wait=True)) == ("staleness-2", "staleness-4-wait")
