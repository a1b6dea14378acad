"""One draw: which token a uniform picks, and the log-prob and rank reported for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from workers.engine.sampling import SamplingParams, plan_sampling, sample

PROBS = [0.2, 0.5, 0.3]


def draw(uniform: float, *, probs: list[float] = PROBS, **params: Any) -> tuple[int, float, int]:
    """Sampled id, its probability and its rank."""
    logits = torch.tensor([probs]).log()
    plan = plan_sampling([SamplingParams(**params)], len(probs))
    ids, logprobs, ranks = sample(logits, plan, [uniform])
    return ids[0], round(math.exp(logprobs[0]), 5), ranks[0]


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, (0, 0.2, 3)), (0.19, (0, 0.2, 3)), (0.21, (1, 0.5, 1)), (0.69, (1, 0.5, 1)), (0.71, (2, 0.3, 2))],
)
def test_a_uniform_picks_the_token_whose_interval_it_falls_into(
    uniform: float, expected: tuple[int, float, int]
) -> None:
    assert draw(uniform) == expected


def test_temperature_reshapes_the_reported_distribution() -> None:
    # p ** (1 / 0.5), normalised: 0.04, 0.25, 0.09 over 0.38.
    assert draw(0.5, temperature=0.5) == (1, round(0.25 / 0.38, 5), 1)


def test_top_k_reports_probabilities_among_the_kept_tokens() -> None:
    assert draw(0.0, top_k=2) == (1, 0.625, 1)
    assert draw(0.99, top_k=2) == (2, 0.375, 2)
    assert draw(0.99, top_k=-1) == (2, 0.3, 2)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert draw(0.0, top_p=0.4) == (1, 1.0, 1)
    assert draw(0.0, top_p=0.6) == (1, 0.625, 1)
    assert draw(0.0, top_p=0.9) == (0, 0.2, 3)


def test_top_k_comes_before_top_p() -> None:
    # Among the two likeliest, token 1 has 0.625: enough for 0.6, though 0.5 alone would not be.
    assert draw(0.99, top_k=2, top_p=0.6) == (1, 1.0, 1)


def test_temperature_zero_takes_the_likeliest_and_reports_the_plain_distribution() -> None:
    assert draw(0.0, temperature=0, top_p=0.1, top_k=1) == (1, 0.5, 1)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    for uniform in (0.0, 0.5, math.nextafter(1, 0)):
        assert draw(uniform, probs=[0.0, 0.4, 0.0, 0.6, 0.0])[0] in (1, 3)


def test_rows_keep_their_own_parameters_in_one_batch() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=2)]
    logits = torch.tensor([PROBS] * 4).log()
    ids, logprobs, ranks = sample(logits, plan_sampling(params, 3), [0.0, 0.0, 0.0, 0.0])
    assert (ids, ranks) == ([0, 1, 1, 0], [3, 1, 1, 3])
    flat = [p**0.5 for p in PROBS]
    expected = [0.2, 0.5, 1.0, flat[0] / sum(flat)]
    assert [math.exp(logprob) for logprob in logprobs] == pytest.approx(expected, abs=1e-6)


def test_many_draws_follow_the_distribution() -> None:
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]
    logits = torch.tensor([PROBS] * 1000).log()
    ids, _, _ = sample(logits, plan_sampling([SamplingParams()] * 1000, 3), uniforms)
    assert [ids.count(token_id) for token_id in range(3)] == [200, 500, 300]
