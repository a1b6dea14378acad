"""An engine without a model: a function is its policy. Speaks vLLM's routes, for tests of all that talks to engines.

Everything but the sampling is real: pause, abort, hot-load, version spans, and faults on demand.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from aiohttp import web

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PREFIX = "generate-tokens-"
_MODEL = "policy"
"""The name of what it serves."""


class Fault(StrEnum):
    """What goes wrong with one request to a route."""

    CUT = "cut"
    """The connection breaks within the answer, and the route does nothing."""
    CUT_AFTER = "cut_after"
    """The route does its work, and the connection breaks within the answer."""
    CLOSED = "closed"
    """The connection ends with no byte of an answer, as when a server ends an idle one; the route does nothing."""
    ERROR = "error"
    """The route answers 500."""
    HANG = "hang"
    """Nothing comes back until the engine is stopped."""


class ScriptedEngine:
    """`reply(prompt ids)` is the whole continuation that the policy wants; requests cut it at their own limits.

    Tokens come one at a time, so that pauses, aborts and new weights fall between them. All log-probs are `logprob`.
    """

    def __init__(
        self,
        reply: Callable[[list[int]], list[int]],
        *,
        logprob: float = -0.5,
        token_s: float = 0.0,
        max_model_len: int = 4096,
        max_running: int | None = None,
        port: int = 0,
        accept: Callable[[Path], str | None] = lambda path: None if path.is_dir() else f"no folder {path}",
    ) -> None:
        """`port` 0 is a free one. `accept` says why a version's folder is refused, None when it is not.

        Of more than `max_running` requests the last ones wait, and the engine says so in its figures; None = no bound.
        """
        self.reply = reply
        self.logprob = logprob
        self.token_s = token_s
        self.has_generate = True
        """Whether the generate route is open; `/v1/completions` always is."""
        self.max_model_len = max_model_len
        self.accept = accept
        self.score: Callable[[list[int]], list[float]] = lambda ids: [logprob] * len(ids)
        """Prompt ids -> log-prob of each after those before it, for those who ask for prompt_logprobs."""
        self.decode: Callable[[int], str] = lambda token_id: f"<{token_id}>"
        """Text of an id."""
        self.load_s = 0.0
        """How long it takes to load weights."""
        self.version = "default"
        self.weights: Path | None = None
        """The folder that was loaded last; None = the start weights."""
        self.adapters: dict[str, str] = {}
        """Name -> folder of the LoRA adapters."""
        self.calls: list[str] = []
        """Paths of all requests, in order of arrival."""
        self.bodies: dict[str, Any] = {}
        """Path -> the last body that a sampling request had."""
        self.faults: dict[str, deque[Fault]] = {}
        """Path -> what goes wrong with the next requests to it, one each."""
        self.open: dict[str, str] = {}
        """Ids of the generate requests that have no answer yet, with the model that each is for."""
        self.metrics: str | None = None
        """The page of its figures, without those of adapters; None = it has none, or its own where it has a bound."""
        self.num_tokens = 0
        """Sampled since the start."""
        self.peers: set[tuple[str, int]] = set()
        """Addresses of the connections over which requests came."""
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self._aborted: set[str] = set()
        self._ids = itertools.count()
        self._max_running = max_running
        self._places = asyncio.Semaphore(max_running or sys.maxsize)
        self._num_running = 0
        self._stopped = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def paused(self) -> bool:
        return not self._open_gate.is_set()

    def pause(self) -> None:
        self._open_gate.clear()

    def resume(self) -> None:
        self._open_gate.set()

    def fail_next(self, path: str, *faults: Fault) -> None:
        """Let the next requests to a path go wrong."""
        self.faults.setdefault(path, deque()).extend(faults)

    async def start(self) -> None:
        """Listen: on its port, a free one the first time, the same one again after `stop`."""
        app = web.Application(middlewares=[self._with_faults], client_max_size=64 << 20)
        for path, handler in self._routes().items():
            app.router.add_route("*", path, handler)
        self._stopped.clear()
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: all connections break at once. Nothing of the state is lost but what `restart` loses."""
        if self._runner is not None:
            self._stopped.set()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Die and come back as a new process would: with the start weights, not paused, no faults."""
        await self.stop()
        self.version = "default"
        self.weights = None
        self.adapters.clear()
        self.faults.clear()
        self.resume()
        await self.start()

    def _routes(self) -> dict[str, _Handler]:
        return {
            "/health": self._health,
            "/inference/v1/generate": self._generate,
            "/v1/completions": self._complete,
            "/v1/models": self._models,
            "/abort_requests": self._abort_requests,
            "/pause": self._pause,
            "/resume": self._resume,
            "/is_paused": self._is_paused,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_weight_version,
            "/weight_info": self._weight_info,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/metrics": self._metrics,
            "/start_weight_update": self._ok,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._ok,
        }

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self.calls.append(request.path)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        waiting = self.faults.get(request.path)
        fault = waiting.popleft() if waiting else None
        if fault is Fault.ERROR:
            return _error(500, f"{request.path} is told to fail")
        if fault is Fault.HANG:
            await self._stopped.wait()
        if fault is Fault.CUT_AFTER:
            await handler(request)
        if fault in (Fault.CUT, Fault.CUT_AFTER):
            request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{")
        if fault is not None:
            request.transport.abort()
        return await handler(request) if fault is None else web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.has_generate:
            return _error(403, "Scale-out endpoints are disabled.")
        body = self.bodies[request.path] = await request.json()
        prompt: list[int] = body["token_ids"]
        if len(prompt) >= self.max_model_len:
            return self._overflow(f"the prompt has {len(prompt)}")
        if (model := self._model(body)) is None:
            return self._unknown(body)
        request_id = _PREFIX + str(body.get("request_id") or next(self._ids))
        choice = await self._tracked(request_id, prompt, body["sampling_params"], model=model)
        if body["sampling_params"].get("logprobs") is None:
            choice["logprobs"] = None
        return web.json_response({"request_id": request_id, "model": model, "choices": [choice]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = self.bodies[request.path] = await request.json()
        prompt: list[int] = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return self._overflow(f"you asked for {body['max_tokens']} after {len(prompt)}")
        if (model := self._model(body)) is None:
            return self._unknown(body)
        request_id = f"cmpl-{body.get('request_id') or next(self._ids)}"
        choice = await self._tracked(f"{request_id}-0", prompt, body, model=model)
        ids = choice["token_ids"]
        del choice["weight_versions"]
        if not body.get("return_token_ids"):
            del choice["token_ids"]
        named = body.get("return_tokens_as_token_ids")
        tokens = [f"token_id:{token_id}" if named else self.decode(token_id) for token_id in ids]
        asked = body.get("logprobs") is not None
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": [self.logprob] * len(ids)} if asked else None
        asked = body.get("prompt_logprobs") is not None
        choice["prompt_logprobs"] = self._prompt_logprobs(prompt) if asked else None
        return web.json_response({"id": request_id, "model": model, "choices": [choice]})

    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None]:
        entries: list[dict[str, Any] | None] = [
            {str(token_id): {"logprob": logprob, "rank": 1, "decoded_token": self.decode(token_id)}}
            for token_id, logprob in zip(prompt, self.score(prompt), strict=True)
        ]
        return [None, *entries[1:]]

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": _MODEL, "root": "start", "parent": None, "max_model_len": self.max_model_len}
        adapters = [card | {"id": name, "root": root, "parent": _MODEL} for name, root in self.adapters.items()]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    def _model(self, body: dict[str, Any]) -> str | None:
        """What a request is for; None = nothing that is served."""
        model = str(body.get("model") or _MODEL)
        return model if model in (_MODEL, *self.adapters) else None

    def _unknown(self, body: dict[str, Any]) -> web.Response:
        return _error(404, f"The model `{body['model']}` does not exist.")

    def _overflow(self, what: str) -> web.Response:
        return _error(400, f"This model's maximum context length is {self.max_model_len} tokens, {what}")

    async def _tracked(
        self, request_id: str, prompt: list[int], params: dict[str, Any], *, model: str
    ) -> dict[str, Any]:
        self.open[request_id] = model
        try:
            async with self._places:
                self._num_running += 1
                try:
                    return await self._sample(request_id, prompt, params)
                finally:
                    self._num_running -= 1
        finally:
            del self.open[request_id]
            self._aborted.discard(request_id)

    async def _sample(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        limit = min(params["max_tokens"], self.max_model_len - len(prompt))
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        reason = "length"
        for token_id in self.reply(prompt)[:limit]:
            await asyncio.sleep(self.token_s)
            await self._gate(request_id)
            if request_id in self._aborted:
                reason = "abort"
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids), "end": len(ids)})
            ids.append(token_id)
            self.num_tokens += 1
            spans[-1]["end"] = len(ids)
            if token_id in params.get("stop_token_ids", ()):
                reason = "stop"
                break
        return {
            "index": 0,
            "finish_reason": reason,
            "token_ids": ids,
            "weight_versions": spans,
            "logprobs": {"content": [self._entry(token_id) for token_id in ids]},
        }

    async def _gate(self, request_id: str) -> None:
        """Waits while the engine is paused; `resume` wakes it, and an abort is seen within 10 ms."""
        while self.paused and request_id not in self._aborted:
            try:
                async with asyncio.timeout(0.01):
                    await self._open_gate.wait()
            except TimeoutError:
                continue

    def _entry(self, token_id: int) -> dict[str, Any]:
        return {"token_id": token_id, "logprob": self.logprob, "rank": 1}

    async def _abort_requests(self, request: web.Request) -> web.Response:
        ids = set((await request.json())["request_ids"]) or set(self.open)
        ended = ids & self.open.keys()
        self._aborted |= ended
        return web.json_response({"status": "aborted", "aborted": len(ended)})

    async def _pause(self, _: web.Request) -> web.Response:
        self.pause()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        path, name = Path(body["args"][0]), body["args"][1]
        await asyncio.sleep(self.load_s)
        if refusal := self.accept(path):
            return web.json_response({"results": [{"ok": False, "error": refusal}]})
        self.weights = path
        return web.json_response({"results": [{"ok": True, "version": name, "seconds": self.load_s}]})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "done"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        path = Path((await request.json())["update_info"]["path"])
        await asyncio.sleep(self.load_s)
        if refusal := self.accept(path):
            return _error(500, refusal)
        self.weights = path
        return await self._ok(request)

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(self.load_s)
        if refusal := self.accept(Path(body["lora_path"])):
            return _error(500, refusal)
        if body["lora_name"] in self.adapters:
            return _error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text="Success")

    async def _metrics(self, _: web.Request) -> web.Response:
        page = self.metrics
        if page is None and self._max_running is not None:
            page = self._figures()
        if page is None and not self.adapters:
            return web.Response(status=404)
        return web.Response(text=(page or "") + self._adapters_in_use())

    def _figures(self) -> str:
        figures = {
            "num_requests_running": self._num_running,
            "num_requests_waiting": len(self.open) - self._num_running,
            "kv_cache_usage_perc": 0,
            "num_preemptions_total": 0,
            "generation_tokens_total": self.num_tokens,
        }
        return "".join(f"vllm:{name} {value}\n" for name, value in figures.items())

    def _adapters_in_use(self) -> str:
        """As vLLM does: a line a combination of names, the older ones too, each with the time that it was seen."""
        if not self.adapters:
            return ""
        running = ",".join(sorted({model for model in self.open.values() if model != _MODEL}))
        labels = 'max_lora="4",running_lora_adapters="{}",waiting_lora_adapters=""'
        return "".join(
            f"vllm:lora_requests_info{{{labels.format(names)}}} {at}\n" for names, at in ((running, 2e9), ("x", 1e9))
        )


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
