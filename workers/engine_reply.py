"""Turns an engine's answer to a generate request into a `Sampled`, or says why it can't be trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from common.episode import MAX_LOGPROB, FinishReason, Sampled, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.weights import is_start_name, parse_version_name, version_name
from workers.engine_errors import EngineUnavailable, Unversioned

_IN_USE = "vllm:lora_requests_info{"
_NAMES = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')

ReplyT = TypeVar("ReplyT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class RawSampled:
    """What an answer says of one continuation, on any wire, before it is checked."""

    ids: Sequence[int]
    logprob_ids: Sequence[int | None]
    """Whose log-probs stand at each place; None = the answer does not say."""
    logprobs: Sequence[float | None]
    spans: Sequence[tuple[int, int, int]]
    """Version, start, end."""
    finish_reason: str | None


class Reply(BaseModel):
    """The parts of vLLM's generate route that matter here; engines send more."""

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


def parse_sampled(
    body: bytes, *, run: str, max_tokens: int, stop_ids: Sequence[int], engine: str, adapter: int | None = None
) -> Sampled:
    """What was sampled, checked whole. `adapter` is the version whose adapter was asked for; None = none.

    Raises EpisodeError(CAPTURE_INCOMPLETE) for ids without their log-probs or versions, or that end where nobody asked
    it to (`max_tokens`, `stop_ids`), Unversioned for tokens of
    other weights than `run`'s, EngineUnavailable for a request that the engine itself gave up.
    """
    reply = parse_reply(Reply, body, engine=engine)
    if len(reply.choices) != 1:
        raise incomplete(engine, f"{len(reply.choices)} choices for one prompt")
    choice = reply.choices[0]
    versions = choice.weight_versions or []
    if adapter is None:
        spans = versions_of_run(versions, run, engine) if choice.token_ids else []
    else:
        wanted = version_name(run, adapter)
        check_adapter(reply.model, [span.version for span in versions], wanted=wanted, engine=engine)
        # A request keeps its adapter to its end. The engine's own spans are of the weights under it.
        spans = [(adapter, 0, len(choice.token_ids))]
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    raw = RawSampled(
        ids=choice.token_ids,
        logprob_ids=[entry.token_id for entry in entries],
        logprobs=[entry.logprob for entry in entries],
        spans=spans,
        finish_reason=choice.finish_reason,
    )
    return check_sampled(raw, max_tokens=max_tokens, stop_ids=stop_ids, engine=engine)


def parse_reply(kind: type[ReplyT], body: bytes, *, engine: str) -> ReplyT:
    """The answer as a record of its wire. Raises EpisodeError(CAPTURE_INCOMPLETE) naming what is missing."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise incomplete(engine, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def check_sampled(raw: RawSampled, *, max_tokens: int, stop_ids: Sequence[int], engine: str) -> Sampled:
    """The record that is stored and trained. Raises as `parse_sampled` does."""
    reason = _finish_reason(raw.finish_reason, engine)
    if len(raw.ids) > max_tokens:
        raise incomplete(engine, f"{len(raw.ids)} ids, {max_tokens} were asked for")
    if not raw.ids and reason is not FinishReason.ABORT:
        raise incomplete(engine, f"no ids, though it finished by {reason}")
    try:
        sampled = Sampled(
            ids=tuple(raw.ids),
            logprobs=_logprobs(raw, engine),
            spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in raw.spans)
            if raw.ids
            else (),
            finish_reason=reason,
        )
    except ValueError as error:
        raise incomplete(engine, str(error)) from None
    if reason is FinishReason.STOP and raw.ids[-1] not in stop_ids:
        # Another engine of the run would have gone on there.
        raise incomplete(engine, f"stopped at id {raw.ids[-1]}, which is none of the run's ends {list(stop_ids)}")
    return sampled


def versions_of_run(spans: Sequence[Span], run: str, engine: str) -> list[tuple[int, int, int]]:
    """Spans by number. Raises Unversioned where weights of no version of the run sampled."""
    numbered = []
    for span in spans:
        served = parse_version_name(span.version)
        if served is None or served[0] != run:
            raise Unversioned(f"engine {engine} sampled with weights {span.version!r}, not with a version of {run}")
        numbered.append((served[1], span.start, span.end))
    return numbered


def check_adapter(model: str | None, base: Iterable[str], *, wanted: str, engine: str) -> None:
    """Raise Unversioned unless the answer's `model` is the adapter that was asked for, over the run's start weights.

    `base` are the names of the weights under it.
    """
    if model != wanted:
        raise Unversioned(f"engine {engine} sampled with {model!r}, adapter {wanted} was asked for")
    for name in base:
        if not is_start_name(name):
            raise Unversioned(f"engine {engine} has weights {name} under adapter {wanted}, not the run's start")


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


def incomplete(engine: str, what: str) -> EpisodeError:
    """A capture that is not whole: it stops the episode, and never becomes a row with holes."""
    return EpisodeError(Outcome.CAPTURE_INCOMPLETE, f"engine {engine}: {what}")


def _finish_reason(reason: str | None, engine: str) -> FinishReason:
    if reason not in list(FinishReason):
        raise EngineUnavailable(f"engine {engine} ended a request by {reason!r}")
    return FinishReason(reason)


def _logprobs(raw: RawSampled, engine: str) -> tuple[float, ...]:
    """The log-prob of each sampled id itself: an entry for any other id is refused, not taken."""
    if not len(raw.ids) == len(raw.logprobs) == len(raw.logprob_ids):
        raise incomplete(engine, f"{len(raw.ids)} ids but {len(raw.logprobs)} log-probs")
    checked: list[float] = []
    for position, (token_id, owner, logprob) in enumerate(zip(raw.ids, raw.logprob_ids, raw.logprobs, strict=True)):
        if owner != token_id:
            raise incomplete(engine, f"at {position} id {token_id} was sampled, the log-prob is of {owner}")
        if logprob is None or not math.isfinite(logprob) or logprob > MAX_LOGPROB:
            raise incomplete(engine, f"the log-prob of id {token_id} at {position} is {logprob}")
        checked.append(logprob)
    return tuple(checked)
