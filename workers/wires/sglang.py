"""SGLang's native routes, as release 0.5.23 has them. Written from its source, and not run on a GPU yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from common.config import InFlight
from common.episode import Sampled
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.sampling import SGLANG_PLAIN
from workers.engine_errors import EngineUnavailable, LoadRefused
from workers.engine_http import EngineHttp, detail, json_object
from workers.engine_reply import RawSampled, Span, check_sampled, incomplete, parse_reply, versions_of_run
from workers.wires.base import ADMIN_TIMEOUT_S, LOAD_TIMEOUT_S, PROBE_TIMEOUT_S, Context, GenerateRequest, Route

logger = logging.getLogger(__name__)

GENERATE = "/generate"
MODEL_INFO = "/model_info"
LOAD = "/update_weights_from_disk"
_UNTOUCHED = "Failed to get "
"""Begins the refusals that come before a weight is written: no such folder, no files in it, another format."""


class Reply(BaseModel):
    """The parts of the wire that matter here."""

    model_config = ConfigDict(frozen=True)

    output_ids: list[int]
    meta_info: MetaInfo


class MetaInfo(BaseModel):
    """What is said of the sampled ids."""

    finish_reason: FinishReason
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    """Log-prob, id and, if asked for, text."""
    weight_versions: list[Span] | None = None


class FinishReason(BaseModel):
    """Why it ended; more is said by kind."""

    type: Literal["stop", "length", "abort"]


class SglangWire:
    """SGLang 0.5.23 or newer."""

    name = "sglang"

    def __init__(self, http: EngineHttp, url: str) -> None:
        self.route = Route(http, url)
        self._context = Context(self.route)

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Sampled:
        if request.adapter is not None:
            raise self._no_adapters()
        if request.top_p < 1.0:
            # Its log-probs are of the distribution before top-p cuts it: to train on them would be silently wrong.
            raise EpisodeError(
                Outcome.HANDLER_FAILED, f"rollout.top_p is {request.top_p:g}: engine {self.route.url} is SGLang, take 1"
            )
        body: dict[str, object] = {
            "rid": request.request_id,
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                **SGLANG_PLAIN,
                "max_new_tokens": await self._context.budget(request),
                "temperature": request.temperature,
                "top_p": request.top_p,
                "stop_token_ids": list(request.stop_ids),
            },
            "return_logprob": True,
        }
        if request.model is not None:
            # The base model has no name in a request; an adapter goes by the one it was loaded under.
            body["lora_path"] = request.model
        raw = await self.route.sample(GENERATE, body, timeout_s=timeout_s)
        return parse_generated(raw, request, engine=self.route.url)

    async def check_health(self) -> None:
        # /health samples an id, so a paused engine would never answer it, and never be resumed.
        await self._info()

    async def weight_version(self) -> str:
        return str(self.route.field(await self._info(), "weight_version", str, MODEL_INFO))

    async def is_paused(self) -> bool:
        """Whether it takes no work. One that is still starting up looks the same."""
        status, raw = await self.route.http.send("GET", self.route.url, "/ready", timeout_s=PROBE_TIMEOUT_S)
        if status not in (200, 503):
            raise self.route.unavailable("/ready", status, raw)
        return status == 503

    async def pause(self, in_flight: InFlight, *, wait_s: float, claim: int | None) -> None:
        """Requests go back to its queue, so that the cache can be flushed and is computed anew, or end as aborted."""
        if in_flight == "wait":
            logger.warning("SGLang cannot wait for requests under way, they are kept engine=%s", self.route.url)
        path = "/pause_generation"
        body = {"mode": "abort" if in_flight == "abort" else "retract"}
        reply = await self.route.ask("POST", path, timeout_s=ADMIN_TIMEOUT_S, body=body)
        self.route.expect(reply, "status", "ok", path)

    async def resume(self, *, claim: int | None) -> None:
        path = "/continue_generation"
        reply = await self.route.ask("POST", path, timeout_s=ADMIN_TIMEOUT_S, body={})
        self.route.expect(reply, "status", "ok", path)

    async def load_version(self, path: Path, name: str, *, claim: int | None) -> None:
        """As the protocol says. When it fails midway it reads the same folder again, which brings nothing back: only
        what is refused before is a LoadRefused."""
        body = {"model_path": str(path), "flush_cache": True, "abort_all_requests": False}
        url = self.route.url
        status, raw = await self.route.http.send("POST", url, LOAD, timeout_s=LOAD_TIMEOUT_S, body=body)
        if status not in (200, 400):
            raise self.route.unavailable(LOAD, status, raw)
        reply = json_object(raw, url, LOAD)
        if reply.get("success") is True and status == 200:
            return
        said = detail(raw)
        if reply.get("success") is False and said.startswith(_UNTOUCHED):
            raise LoadRefused(f"engine {url} refuses {name}: {said}")
        raise EngineUnavailable(f"engine {url} {LOAD} answers {status}: {said}")

    async def update_weight_version(self, name: str, *, claim: int | None) -> None:
        path = "/update_weight_version"
        # Unless told otherwise it aborts every request.
        body = {"new_version": name, "abort_all_requests": False}
        reply = await self.route.ask("POST", path, timeout_s=ADMIN_TIMEOUT_S, body=body)
        self.route.expect(reply, "success", True, path)

    async def load_adapter(self, path: Path, name: str) -> None:
        raise self._no_adapters()

    async def unload_adapter(self, name: str) -> None:
        raise self._no_adapters()

    async def adapters(self) -> dict[str, str]:
        raise self._no_adapters()

    def _no_adapters(self) -> EngineUnavailable:
        # It has LoRA, but no answer of its says which adapter sampled.
        return EngineUnavailable(f"engine {self.route.url} is SGLang: runs with train.lora_rank need vLLM")

    async def abort(self, request_ids: Sequence[str]) -> int | None:
        """None: it does not say. The requests' own answers do."""
        path = "/abort_request"
        for request_id in request_ids:
            status, raw = await self.route.http.send(
                "POST", self.route.url, path, timeout_s=ADMIN_TIMEOUT_S, body={"rid": request_id}
            )
            if status != 200:
                raise self.route.unavailable(path, status, raw)
        return None

    async def _info(self) -> dict[str, object]:
        return await self.route.ask("GET", MODEL_INFO, timeout_s=PROBE_TIMEOUT_S)


def parse_generated(body: bytes, request: GenerateRequest, *, engine: str) -> Sampled:
    """What was sampled, checked whole. Raises as `workers.engine_reply.parse_sampled` does."""
    reply = parse_reply(Reply, body, engine=engine)
    info = reply.meta_info
    if reply.output_ids and info.weight_versions is None:
        raise incomplete(engine, "no weight_versions: SGLang 0.5.23 or newer says them")
    entries = info.output_token_logprobs or []
    raw = RawSampled(
        ids=reply.output_ids,
        logprob_ids=[token_id for _, token_id, _ in entries],
        logprobs=[logprob for logprob, _, _ in entries],
        spans=versions_of_run(info.weight_versions or [], request.run, engine) if reply.output_ids else [],
        finish_reason=info.finish_reason.type,
    )
    return check_sampled(raw, max_tokens=request.max_tokens, stop_ids=request.stop_ids, engine=engine)
