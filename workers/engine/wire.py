"""The bodies of the generate route as vLLM defines them, in and out."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from workers.engine.request import Completion
from workers.engine.sampling import SamplingParams

Body = TypeVar("Body", bound=BaseModel)


class BadRequest(ValueError):
    """The caller's mistake; the message names the field and its value."""


class GenerateBody(BaseModel):
    """POST /inference/v1/generate. Fields of vLLM's that are not listed change nothing here and are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None = None
    """None: made up."""
    model: str | None = None
    """The served one's name, or an adapter's; None: the served one."""
    stream: Literal[False] = False


class AbortBody(BaseModel):
    """POST /abort_requests."""

    model_config = ConfigDict(frozen=True, strict=True)

    request_ids: list[str]
    """Empty: all."""


class RpcBody(BaseModel):
    """POST /collective_rpc."""

    model_config = ConfigDict(frozen=True, strict=True)

    method: str
    args: list[str] = []


class VersionBody(BaseModel):
    """POST /update_weight_version."""

    model_config = ConfigDict(frozen=True, strict=True)

    new_version: str


class LoadAdapterBody(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = ConfigDict(frozen=True, strict=True)

    lora_name: str
    lora_path: str


class UnloadAdapterBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(frozen=True, strict=True)

    lora_name: str


def parse(kind: type[Body], raw: bytes) -> Body:
    """A body of this kind. Raises BadRequest that names the first bad field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadRequest(f"{where}: {first['msg']} (got {str(first['input'])[:80]})") from error


def check_ids(body: GenerateBody, *, vocab_size: int, max_model_len: int) -> None:
    """Raise BadRequest for ids that the model has no embedding for, and for prompts that leave no room."""
    if not body.token_ids:
        raise BadRequest("token_ids is empty: the prompt needs at least one token")
    for name, ids in (("token_ids", body.token_ids), ("stop_token_ids", body.sampling_params.stop_token_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise BadRequest(f"Token id {bad} is out of vocabulary: {name} must be in 0..{vocab_size - 1}")
    if len(body.token_ids) >= max_model_len:
        raise BadRequest(
            f"the prompt has {len(body.token_ids)} tokens, but the maximum model length of {max_model_len} "
            f"includes at least one new token"
        )


def engine_request_id(request_id: str | None) -> str:
    """The id under which vLLM's generate route runs and reports a request."""
    return f"generate-tokens-{request_id or uuid.uuid4().hex[:16]}"


def completion_body(completion: Completion, *, request_id: str, model: str, with_logprobs: bool) -> dict[str, Any]:
    """The generate route's answer."""
    choice = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_id,
        "token_ids": completion.token_ids,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.spans
        ],
        "logprobs": {"content": _logprob_entries(completion)} if with_logprobs else None,
    }
    num_new = len(completion.token_ids)
    return {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens,
            "total_tokens": completion.num_prompt_tokens + num_new,
            "completion_tokens": num_new,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "output_mode": "tokens",
        "choices": [choice],
    }


def _logprob_entries(completion: Completion) -> list[dict[str, Any]]:
    rows = zip(completion.token_ids, completion.logprobs, completion.ranks, strict=True)
    entries = [{"token_id": token_id, "logprob": logprob, "rank": rank} for token_id, logprob, rank in rows]
    return [{**entry, "top_logprobs": [entry]} for entry in entries]
