"""The log-probs reported while decoding are transformers' own, in any company and for any shape of model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.engine.__main__ import Engine
from workers.engine.request import Completion, Request
from workers.engine.sampling import SamplingParams

DEADLINE_S = 20.0
Pending = tuple[list[int], SamplingParams, Future[Completion]]


def prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 576, (length,), generator=generator).tolist()


def submit(engine: Engine, ids: list[int], **params: Any) -> Pending:
    sampling = SamplingParams(ignore_eos=True, logprobs=0, **params)
    request = Request("r", ids, sampling, eos_ids=frozenset(), max_model_len=2048)
    return ids, sampling, engine.decoding.submit(request)


def assert_parity(reference: Any, folder: Path, pending: Pending, *, num_tokens: int) -> None:
    ids, sampling, future = pending
    done = future.result(DEADLINE_S)
    assert len(done.token_ids) == num_tokens
    expected_TV = reference.logprobs_TV(folder, ids + done.token_ids, sampling, start=len(ids))
    expected_T = expected_TV.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    assert done.logprobs == pytest.approx(expected_T.tolist(), abs=1e-4)
    # Two tokens this close may change places.
    best_T = (expected_TV > expected_T[:, None] + 1e-4).sum(dim=-1) + 1
    worst_T = (expected_TV > expected_T[:, None] - 1e-4).sum(dim=-1)
    for best, rank, worst in zip(best_T.tolist(), done.ranks, worst_T.tolist(), strict=True):
        assert best <= rank <= worst


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_logprobs_match_transformers_while_requests_join_and_leave(
    params: dict[str, Any], base: Path, reference: Any, start_engine: Callable[..., Engine]
) -> None:
    engine = start_engine(base, max_batch=4)  # so that the others join as the first ones leave
    sizes = [(1, 60), (2, 5), (37, 41), (150, 20), (90, 1), (300, 33), (2, 17), (220, 40), (64, 8)]
    pendings = [
        submit(engine, prompt(length, seed=i), max_tokens=new, seed=i, **params)
        for i, (length, new) in enumerate(sizes)
    ]
    for pending, (_, new) in zip(pendings, sizes, strict=True):
        assert_parity(reference, base, pending, num_tokens=new)


def test_different_parameters_in_one_batch_do_not_mix(
    base: Path, reference: Any, start_engine: Callable[..., Engine]
) -> None:
    engine = start_engine(base)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 3},
    ]
    pendings = [submit(engine, prompt(20 + i, seed=i), max_tokens=30, seed=i, **kinds[i % 4]) for i in range(16)]
    for pending in pendings:
        assert_parity(reference, base, pending, num_tokens=30)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "attention_bias": True},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 16},
        {"num_key_value_heads": 4, "hidden_size": 48, "intermediate_size": 80},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    ],
    ids=["untied and biased", "one key head", "no grouping", "yarn"],
)
def test_other_shapes_of_qwen3_match_too(
    changes: dict[str, Any],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    reference: Any,
    start_engine: Callable[..., Engine],
) -> None:
    folder = make_checkpoint(tmp_path, seed=5, **changes)
    engine = start_engine(folder)
    pendings = [submit(engine, prompt(length, seed=length), max_tokens=12, seed=length) for length in (3, 70)]
    for pending in pendings:
        assert_parity(reference, folder, pending, num_tokens=12)


def test_a_seed_gives_the_same_tokens_in_any_company(base: Path, start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(base)
    ids = prompt(40, seed=1)
    alone = submit(engine, ids, max_tokens=50, seed=9)[2].result(DEADLINE_S)
    others = [submit(engine, prompt(5 + 9 * i, seed=i), max_tokens=10 + i) for i in range(20)]
    crowded = submit(engine, ids, max_tokens=50, seed=9)[2].result(DEADLINE_S)
    assert crowded.token_ids == alone.token_ids
    assert crowded.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    other_seed = submit(engine, ids, max_tokens=50, seed=10)[2].result(DEADLINE_S)
    assert other_seed.token_ids != alone.token_ids
    for _, _, future in others:
        future.result(DEADLINE_S)


def test_without_a_seed_two_requests_differ(base: Path, start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(base)
    first, second = (submit(engine, [5, 6, 7], max_tokens=50)[2] for _ in range(2))
    assert first.result(DEADLINE_S).token_ids != second.result(DEADLINE_S).token_ids
