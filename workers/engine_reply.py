"""Turns an engine's answer to a generate request into a `Sampled`, or says why it can't be trained on."""

from __future__ import annotations

import math
import re

from pydantic import BaseModel, ConfigDict, ValidationError

from common.episode import FinishReason, Sampled, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.weights import parse_version_name, version_name
from workers.engine_errors import EngineUnavailable, Unversioned

_IN_USE = "vllm:lora_requests_info{"
_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


class Reply(BaseModel):
    """The parts of the wire that matter here; engines send more."""

    model_config = ConfigDict(frozen=True)

    choices: list[Choice]
    model: str | None = None
    """What the request was served with: the engine's name for its own weights, or an adapter's."""


class Choice(BaseModel):
    """One continuation of the prompt."""

    token_ids: list[int]
    finish_reason: str | None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None


class Logprobs(BaseModel):
    """One entry a sampled token."""

    content: list[Entry] | None


class Entry(BaseModel):
    """A sampled token; the alternatives beside it are of no use here."""

    token_id: int
    logprob: float


class Span(BaseModel):
    """Tokens start..end (end excluded) were sampled under this name."""

    version: str
    start: int
    end: int


def parse_sampled(body: bytes, *, run: str, max_tokens: int, engine: str, adapter: int | None = None) -> Sampled:
    """What was sampled, checked whole. `adapter` is the version whose adapter was asked for; None = none.

    Raises EpisodeError(CAPTURE_INCOMPLETE) for ids without their log-probs or versions, Unversioned for tokens of
    other weights than `run`'s, EngineUnavailable for a request that the engine itself gave up.
    """
    try:
        reply = Reply.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _incomplete(engine, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if len(reply.choices) != 1:
        raise _incomplete(engine, f"{len(reply.choices)} choices for one prompt")
    choice = reply.choices[0]
    reason = _finish_reason(choice, engine)
    if len(choice.token_ids) > max_tokens:
        raise _incomplete(engine, f"{len(choice.token_ids)} ids, {max_tokens} were asked for")
    if not choice.token_ids and reason is not FinishReason.ABORT:
        raise _incomplete(engine, f"no ids, though it finished by {reason}")
    if adapter is None:
        spans = _spans(choice, run, engine) if choice.token_ids else ()
    else:
        spans = _span_of_adapter(reply, choice, adapter=adapter, run=run, engine=engine)
    try:
        return Sampled(
            ids=tuple(choice.token_ids),
            logprobs=_logprobs(choice, engine),
            spans=spans,
            finish_reason=reason,
        )
    except ValueError as error:
        raise _incomplete(engine, str(error)) from None


def _finish_reason(choice: Choice, engine: str) -> FinishReason:
    if choice.finish_reason not in list(FinishReason):
        raise EngineUnavailable(f"engine {engine} ended a request by {choice.finish_reason!r}")
    return FinishReason(choice.finish_reason)


def _logprobs(choice: Choice, engine: str) -> tuple[float, ...]:
    """The log-prob of each sampled id itself: an entry for any other id is refused, not taken."""
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if len(entries) != len(choice.token_ids):
        raise _incomplete(engine, f"{len(choice.token_ids)} ids but {len(entries)} log-probs")
    for position, (token_id, entry) in enumerate(zip(choice.token_ids, entries, strict=True)):
        if entry.token_id != token_id:
            raise _incomplete(engine, f"at {position} id {token_id} was sampled, the log-prob is of {entry.token_id}")
        if not math.isfinite(entry.logprob):
            raise _incomplete(engine, f"the log-prob of id {token_id} at {position} is {entry.logprob}")
    return tuple(entry.logprob for entry in entries)


def _spans(choice: Choice, run: str, engine: str) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for span in choice.weight_versions or []:
        served = parse_version_name(span.version)
        if served is None or served[0] != run:
            raise Unversioned(f"engine {engine} sampled with weights {span.version!r}, not with a version of {run}")
        spans.append(VersionSpan(version=served[1], start=span.start, end=span.end))
    return tuple(spans)


def _span_of_adapter(reply: Reply, choice: Choice, *, adapter: int, run: str, engine: str) -> tuple[VersionSpan, ...]:
    """One span: a request keeps its adapter to its end. The engine's own spans are of the weights under it."""
    wanted = version_name(run, adapter)
    if reply.model != wanted:
        raise Unversioned(f"engine {engine} sampled with {reply.model!r}, adapter {wanted} was asked for")
    for span in choice.weight_versions or []:
        if parse_version_name(span.version) is not None:
            raise Unversioned(f"engine {engine} has weights {span.version} under adapter {wanted}, not the run's start")
    num_ids = len(choice.token_ids)
    return (VersionSpan(version=adapter, start=0, end=num_ids),) if num_ids else ()


def parse_adapters_in_use(metrics: str) -> set[str]:
    """Names in the newest `vllm:lora_requests_info`, which is one line a combination with the time that it was seen."""
    newest, names = 0.0, set[str]()
    for line in metrics.splitlines():
        if line.startswith(_IN_USE):
            labels, _, seen_at = line.rpartition(" ")
            if float(seen_at) >= newest:
                newest = float(seen_at)
                names = {name for listed in _NAMES.findall(labels) for name in listed.split(",") if name}
    return names


def _incomplete(engine: str, what: str) -> EpisodeError:
    return EpisodeError(Outcome.CAPTURE_INCOMPLETE, f"engine {engine}: {what}")
