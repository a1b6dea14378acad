from __future__ import annotations

import json
from typing import Any

import pytest

from common.episode import FinishReason, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.engine_errors import EngineUnavailable, Unversioned
from workers.engine_reply import parse_adapters_in_use, parse_sampled


def choice(**changes: Any) -> dict[str, Any]:
    usual = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 8, 9],
        "weight_versions": [
            {"version": "run-a/000003", "start": 0, "end": 2},
            {"version": "run-a/000004", "start": 2, "end": 3},
        ],
        "logprobs": {"content": [entry(7, -0.5), entry(8, -1.5), entry(9, 0.0)]},
    }
    return usual | changes


def entry(token_id: int, logprob: float) -> dict[str, Any]:
    likelier = {"token_id": 512, "logprob": -0.1, "rank": 1}
    return {"token_id": token_id, "logprob": logprob, "rank": 3, "top_logprobs": [likelier]}


def parse(*choices: dict[str, Any], max_tokens: int = 10) -> Any:
    body = json.dumps({"request_id": "r", "choices": list(choices), "usage": {}}).encode()
    return parse_sampled(body, run="run-a", max_tokens=max_tokens, stop_ids=(2, 9), engine="http://e")


def test_takes_ids_their_own_logprobs_and_versions() -> None:
    sampled = parse(choice())
    assert sampled.ids == (7, 8, 9)
    assert sampled.logprobs == (-0.5, -1.5, 0.0)
    assert sampled.spans == (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    assert sampled.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "3 ids but 0 log-probs"),
        ({"logprobs": {"content": None}}, "3 ids but 0 log-probs"),
        ({"logprobs": {"content": [entry(7, -1.0)]}}, "3 ids but 1 log-probs"),
        (
            {"logprobs": {"content": [entry(7, -1.0), entry(512, -0.1), entry(9, -1.0)]}},
            "at 1 id 8 was sampled, the log-prob is of 512",
        ),
        ({"logprobs": {"content": [entry(7, -1.0), entry(8, float("nan")), entry(9, -1.0)]}}, "logprob"),
        ({"logprobs": {"content": [entry(7, -1.0), entry(8, float("-inf")), entry(9, -1.0)]}}, "logprob"),
        ({"logprobs": {"content": [entry(7, -1.0), entry(8, 0.7), entry(9, -1.0)]}}, "log-prob of id 8 at 1 is 0.7"),
        ({"weight_versions": None}, "version spans cover 0 of 3"),
        ({"weight_versions": [{"version": "run-a/000003", "start": 0, "end": 2}]}, "version spans cover 2 of 3"),
        ({"weight_versions": [{"version": "run-a/000003", "start": 1, "end": 3}]}, "does not continue at 0"),
        ({"weight_versions": [{"version": "run-a/000003", "start": 0, "end": 4}]}, "version spans cover 4 of 3"),
        ({"token_ids": [], "logprobs": {"content": []}}, "no ids, though it finished by stop"),
        ({"token_ids": None}, "token_ids"),
    ],
)
def test_incomplete_capture_is_an_error_of_the_episode(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EpisodeError) as caught:
        parse(choice(**changes))
    assert caught.value.outcome is Outcome.CAPTURE_INCOMPLETE
    assert message in caught.value.detail or message == "logprob"


def test_a_stop_where_nobody_asked_for_one_is_refused() -> None:
    with pytest.raises(EpisodeError, match=r"stopped at id 8, which is none of the run's ends \[2, 9\]") as caught:
        parse(
            choice(
                token_ids=[7, 8],
                weight_versions=[{"version": "run-a/000003", "start": 0, "end": 2}],
                logprobs={"content": [entry(7, -0.5), entry(8, -1.5)]},
            )
        )
    assert caught.value.outcome is Outcome.CAPTURE_INCOMPLETE


def test_more_ids_than_asked_for_are_refused() -> None:
    with pytest.raises(EpisodeError, match="3 ids, 2 were asked for"):
        parse(choice(), max_tokens=2)


@pytest.mark.parametrize("num_choices", [0, 2])
def test_one_choice_is_expected(num_choices: int) -> None:
    with pytest.raises(EpisodeError, match=f"{num_choices} choices"):
        parse(*[choice()] * num_choices)


def test_no_json_is_an_incomplete_capture() -> None:
    with pytest.raises(EpisodeError, match="capture_incomplete"):
        parse_sampled(b"<html>", run="run-a", max_tokens=1, stop_ids=(), engine="http://e")


@pytest.mark.parametrize("version", ["default", "loading", "run-b/000003", "run-a/new", "run-a"])
def test_tokens_of_other_weights_are_not_taken(version: str) -> None:
    with pytest.raises(Unversioned, match=version):
        parse(choice(weight_versions=[{"version": version, "start": 0, "end": 3}]))


def test_a_run_with_a_slash_like_name_is_not_confused() -> None:
    with pytest.raises(Unversioned):
        parse(choice(weight_versions=[{"version": "other/run-a/000003", "start": 0, "end": 3}]))


def test_an_aborted_request_without_ids_is_empty() -> None:
    sampled = parse(choice(finish_reason="abort", token_ids=[], weight_versions=[], logprobs={"content": []}))
    assert sampled.ids == ()
    assert sampled.finish_reason is FinishReason.ABORT


def test_the_engines_own_failure_is_retryable() -> None:
    with pytest.raises(EngineUnavailable, match="'error'"):
        parse(choice(finish_reason="error"))


def parse_adapter(*, model: str | None, **changes: Any) -> Any:
    base = [{"version": "default", "start": 0, "end": 3}]
    body = {"model": model, "choices": [choice(**{"weight_versions": base} | changes)]}
    raw = json.dumps(body).encode()
    return parse_sampled(raw, run="run-a", max_tokens=10, stop_ids=(9,), engine="http://e", adapter=7)


def test_tokens_of_an_adapter_are_of_the_version_that_it_is() -> None:
    assert parse_adapter(model="run-a/000007").spans == (VersionSpan(version=7, start=0, end=3),)
    nothing = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": [], "finish_reason": "abort"}
    assert parse_adapter(model="run-a/000007", **nothing).spans == ()


@pytest.mark.parametrize("model", ["run-a/000006", "run-b/000007", "policy", None])
def test_another_model_than_the_adapter_asked_for_is_never_trained(model: str | None) -> None:
    with pytest.raises(Unversioned, match=f"sampled with {model!r}, adapter run-a/000007 was asked for"):
        parse_adapter(model=model)


@pytest.mark.parametrize("name", ["run-b/000001", "loading"])
def test_an_adapter_over_other_weights_than_the_start_is_never_trained(name: str) -> None:
    spans = [{"version": "default", "start": 0, "end": 2}, {"version": name, "start": 2, "end": 3}]
    with pytest.raises(Unversioned, match=f"has weights {name} under adapter run-a/000007"):
        parse_adapter(model="run-a/000007", weight_versions=spans)


def test_adapters_in_use_are_those_of_the_newest_line() -> None:
    name = "vllm:lora_requests_info"
    metrics = f"""
# TYPE vllm:lora_requests_info gauge
{name}{{max_lora="4",running_lora_adapters="run-a/000001",waiting_lora_adapters=""}} 1.7000e+09
{name}{{running_lora_adapters="run-a/000002,run-a/000003",waiting_lora_adapters="run-a/000004"}} 1.8e+09
vllm:num_requests_running{{engine="0"}} 3.0
"""
    assert parse_adapters_in_use(metrics) == {"run-a/000002", "run-a/000003", "run-a/000004"}
    assert parse_adapters_in_use("vllm:num_requests_running 1.0") == set()
