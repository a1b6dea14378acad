"""What the engine client asks of any engine, and how refusals are told apart whatever the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.config import InFlight
from common.episode import Sampled
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.weights import version_name
from workers.engine_errors import ContextOverflow, EngineUnavailable, Superseded
from workers.engine_http import EngineHttp, Json, detail, json_object

MODELS = "/v1/models"
PROBE_TIMEOUT_S = 5.0
"""Of questions, which a healthy engine answers in milliseconds."""
ADMIN_TIMEOUT_S = 15.0
"""Of pause, resume and the like, which wait for a decoding step."""
LOAD_TIMEOUT_S = 300.0
"""Of reading a version's files into the engine."""
_SUPERSEDED = 409
"""How the fence in a server of ours answers."""
_CONTEXT_OVERFLOW = re.compile(
    # The last is of a prompt that fills the context to the id: nobody here asks for fewer than one.
    r"(maximum|model's) (context|model) length|max_tokens must be at least 1, got (0|-)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One model call. What a capture needs (ids, log-probs) is not here: every wire always asks for it."""

    request_id: str
    """Unique on the engine."""
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    """Above 0: greedy sampling has no log-probs to train on."""
    top_p: float
    stop_ids: Sequence[int]
    model: str | None
    """The name that the engine serves; None = whichever."""
    run: str
    """Tokens of any other run's weights are refused."""
    adapter: int | None = None
    """The version of the run whose LoRA adapter to sample with; None = the engine's own weights."""

    @property
    def served_name(self) -> str | None:
        """What to ask the engine for: the adapter, or the model."""
        return self.model if self.adapter is None else version_name(self.run, self.adapter)


class RouteMissing(EngineUnavailable):
    """The engine has no such route, or keeps it shut: perhaps it speaks another wire."""


class Wire(Protocol):
    """One engine's language. Every call has a time limit, and one that returns has done what its name says."""

    name: str

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Sampled: ...
    async def check_health(self) -> None: ...
    async def weight_version(self) -> str: ...
    async def is_paused(self) -> bool: ...
    async def pause(self, in_flight: InFlight, *, wait_s: float, claim: int | None) -> None: ...
    async def resume(self, *, claim: int | None) -> None: ...
    async def load_version(self, path: Path, name: str, *, claim: int | None) -> None: ...
    async def update_weight_version(self, name: str, *, claim: int | None) -> None: ...
    async def load_adapter(self, path: Path, name: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def adapters(self) -> dict[str, str]: ...
    async def abort(self, request_ids: Sequence[str]) -> int | None: ...


class Route:
    """Calls of one engine: HTTP with the wire's errors."""

    def __init__(self, http: EngineHttp, url: str) -> None:
        self.http = http
        self.url = url

    async def ask(self, method: str, path: str, *, timeout_s: float, body: Json | None = None) -> dict[str, Any]:
        """The JSON object of a 200. Raises RouteMissing, Superseded or EngineUnavailable."""
        status, raw = await self.http.send(method, self.url, path, timeout_s=timeout_s, body=body)
        if status == _SUPERSEDED:
            raise Superseded(f"engine {self.url} {path}: {detail(raw)}")
        if status != 200:
            raise self.unavailable(path, status, raw)
        return json_object(raw, self.url, path)

    async def sample(self, path: str, body: Json, *, timeout_s: float) -> bytes:
        """A generate request's 200. Raises ContextOverflow, EpisodeError, RouteMissing or EngineUnavailable."""
        status, raw = await self.http.send("POST", self.url, path, timeout_s=timeout_s, body=body)
        if status in (400, 422):
            said = detail(raw)
            if _CONTEXT_OVERFLOW.search(said):
                raise ContextOverflow(f"engine {self.url}: {said}")
            raise EpisodeError(Outcome.HANDLER_FAILED, f"engine {self.url} refuses the request ({status}): {said}")
        if status != 200:
            raise self.unavailable(path, status, raw)
        return raw

    def unavailable(self, path: str, status: int, raw: bytes) -> EngineUnavailable:
        """The error for a status other than 200."""
        said = detail(raw)
        # A model that is not served is answered by 404, too.
        missing = status in (403, 404, 405) and "model" not in said.lower()
        kind = RouteMissing if missing else EngineUnavailable
        return kind(f"engine {self.url} {path} answers {status}: {said}")

    def field(self, reply: Mapping[str, Any], name: str, kind: type, path: str) -> Any:
        """A field of the reply. Raises EngineUnavailable where it is not of this kind."""
        value = reply.get(name)
        if not isinstance(value, kind):
            raise EngineUnavailable(f"engine {self.url} {path} answers {name}={value!r}, expected a {kind.__name__}")
        return value

    def expect(self, reply: Mapping[str, Any], name: str, wanted: object, path: str) -> None:
        """Raise EngineUnavailable unless the reply says this."""
        if reply.get(name) != wanted:
            raise EngineUnavailable(f"engine {self.url} {path} answers {name}={reply.get(name)!r}, expected {wanted!r}")


async def context_of(route: Route) -> int | None:
    """How many ids an engine's context holds; None = it does not say. Raises RouteMissing or EngineUnavailable."""
    reply = await route.ask("GET", MODELS, timeout_s=PROBE_TIMEOUT_S)
    cards = route.field(reply, "data", list, MODELS)
    limits = [card.get("max_model_len") for card in cards if isinstance(card, dict)]
    # Cards of adapters come after the model's and may name none.
    return next((limit for limit in limits if isinstance(limit, int)), None)


class Context:
    """How many ids an engine's context holds, asked once: some wires refuse a budget beyond it instead of cutting."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._max_ids: int | None = None

    async def budget(self, request: GenerateRequest) -> int:
        """How many ids to ask for: what fits. Raises ContextOverflow when nothing does."""
        if self._max_ids is None:
            self._max_ids = await context_of(self._route)
        if self._max_ids is None:
            raise EngineUnavailable(f"engine {self._route.url} {MODELS} names no max_model_len")
        num_prompt = len(request.prompt_ids)
        if num_prompt >= self._max_ids:
            raise ContextOverflow(
                f"engine {self._route.url}: {num_prompt} ids leave no room in a context of {self._max_ids}"
            )
        return min(request.max_tokens, self._max_ids - num_prompt)
