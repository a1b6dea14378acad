"""vLLM's /v1/completions with ids in and out, for servers that keep the token-in, token-out route shut.

It says for no id which weights sampled it. So the version is asked for before and after: while it stays the same, it
is everybody's; when an update came in between, all ids get the older one. That is never newer than the truth, so the
staleness bound holds, and the log-probs are what each id was sampled with whatever the version is called. To refuse
such answers instead would starve every request that takes longer than an update's period.
"""

from __future__ import annotations

import asyncio
import time

from pydantic import BaseModel, ConfigDict

from common.episode import FinishReason, Sampled
from common.sampling import VLLM_PLAIN
from common.weights import parse_version_name, version_name
from workers.engine_errors import Unversioned
from workers.engine_http import EngineHttp
from workers.engine_reply import RawSampled, check_adapter, check_sampled, incomplete, parse_reply
from workers.wires.base import Context, GenerateRequest
from workers.wires.vllm import VllmWire

COMPLETIONS = "/v1/completions"
SETTLE_S = 5.0
"""How long an answer in hand waits for the name of weights that are being exchanged."""
SETTLE_PAUSE_S = 0.05
_ID_PREFIX = "token_id:"


class Reply(BaseModel):
    """The parts of the wire that matter here."""

    model_config = ConfigDict(frozen=True)

    choices: list[Choice]
    model: str | None = None
    """The model's name, or that of the adapter that was asked for."""


class Choice(BaseModel):
    """One continuation of the prompt."""

    token_ids: list[int] | None = None
    finish_reason: str | None
    logprobs: Logprobs | None = None


class Logprobs(BaseModel):
    """Two lists with one entry a sampled id; the lists of alternatives are not read."""

    tokens: list[str]
    """`token_id:17`: whose log-prob stands at this place."""
    token_logprobs: list[float | None]


class CompletionsWire(VllmWire):
    """vLLM with VLLM_SERVER_DEV_MODE=1, but without --enable-scale-out: two questions more per request."""

    name = "vllm-completions"

    def __init__(self, http: EngineHttp, url: str) -> None:
        super().__init__(http, url)
        self._context = Context(self.route)

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Sampled:
        max_tokens = await self._context.budget(request)
        before = self._version_of(await self.weight_version(), request)
        body: dict[str, object] = {
            **VLLM_PLAIN,
            "request_id": request.request_id,
            "prompt": list(request.prompt_ids),
            "max_tokens": max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop_token_ids": list(request.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if request.served_name is not None:
            body["model"] = request.served_name
        raw = await self.route.sample(COMPLETIONS, body, timeout_s=timeout_s)
        sampled = parse_completion(raw, request, version=before, engine=self.route.url)
        if sampled.finish_reason is FinishReason.LENGTH and len(sampled.ids) < max_tokens:
            # No request can lift max_new_tokens of --override-generation-config on this route.
            raise incomplete(self.route.url, f"ended a turn after {len(sampled.ids)} of {max_tokens} ids")
        after = self._version_of(await self._settled_version(request), request)
        if after < before:
            raise Unversioned(f"engine {self.route.url} went from version {before} to {after} under a request")
        return sampled

    def engine_id(self, request_id: str) -> str:
        # The number is the prompt's place in the request.
        return f"cmpl-{request_id}-0"

    async def _settled_version(self, request: GenerateRequest) -> str:
        """The weights' name; while it is no version's, as between two of them, ask again for a while.

        Those under an adapter are never exchanged, so they are asked for but once.
        """
        deadline = time.monotonic() + (SETTLE_S if request.adapter is None else 0)
        while True:
            name = await self.weight_version()
            if parse_version_name(name) is not None or time.monotonic() > deadline:
                return name
            await asyncio.sleep(SETTLE_PAUSE_S)

    def _version_of(self, name: str, request: GenerateRequest) -> int:
        """The version that weights of this name, or the adapter over them, are."""
        if request.adapter is not None:
            wanted = version_name(request.run, request.adapter)
            check_adapter(wanted, [name], wanted=wanted, engine=self.route.url)
            return request.adapter
        served = parse_version_name(name)
        if served is None or served[0] != request.run:
            raise Unversioned(f"engine {self.route.url} serves weights {name!r}, not a version of {request.run}")
        return served[1]


def parse_completion(body: bytes, request: GenerateRequest, *, version: int, engine: str) -> Sampled:
    """What was sampled, checked whole. Raises as `workers.engine_reply.parse_sampled` does."""
    reply = parse_reply(Reply, body, engine=engine)
    if request.adapter is not None:
        check_adapter(reply.model, (), wanted=version_name(request.run, request.adapter), engine=engine)
    if len(reply.choices) != 1:
        raise incomplete(engine, f"{len(reply.choices)} choices for one prompt")
    choice = reply.choices[0]
    if choice.token_ids is None:
        raise incomplete(engine, "no ids, though return_token_ids was asked for")
    entries = choice.logprobs
    raw = RawSampled(
        ids=choice.token_ids,
        logprob_ids=[_id_of(token) for token in entries.tokens] if entries else [],
        logprobs=entries.token_logprobs if entries else [],
        spans=[(version, 0, len(choice.token_ids))],
        finish_reason=choice.finish_reason,
    )
    return check_sampled(raw, max_tokens=request.max_tokens, stop_ids=request.stop_ids, engine=engine)


def _id_of(token: str) -> int | None:
    number = token.removeprefix(_ID_PREFIX)
    return int(number) if token.startswith(_ID_PREFIX) and number.isdecimal() else None
