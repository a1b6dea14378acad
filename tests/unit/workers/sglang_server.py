"""A small server with SGLang's native routes and the shapes of its answers, for tests of the wire."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


class SglangServer:
    """Samples ids 100, 101, ...; an id of `stop_token_ids` ends a request. All log-probs are -0.5."""

    def __init__(self) -> None:
        self.version = "run-a/000003"
        self.paused = False
        self.token_s = 0.0
        self.num_tokens = 0
        self.weights: str | None = None
        self.refusal: str | None = None
        """What a load is refused with."""
        self.bodies: dict[str, Any] = {}
        """Path -> the last body that came there."""
        self.changes: dict[str, Any] = {}
        """Laid over `meta_info` of the next answers; a value of None takes the field out."""
        self.context_len = 64
        self.num_new = 3
        self.url = ""
        self._aborted: set[str] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        for path in ("/pause_generation", "/continue_generation", "/abort_request"):
            app.router.add_post(path, self._control)
        app.router.add_post("/update_weights_from_disk", self._load)
        app.router.add_post("/update_weight_version", self._name)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _body(self, request: web.Request) -> Any:
        self.bodies[request.path] = await request.json()
        return self.bodies[request.path]

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        num_prompt = len(body["input_ids"])
        if num_prompt >= self.context_len:
            limit = f"the model's context length ({self.context_len} tokens)"
            error = {"message": f"The input ({num_prompt} tokens) is longer than {limit}.", "code": 400}
            return web.json_response({"error": error}, status=400)
        ids, spans, reason = await self._sample(body["rid"], body["sampling_params"])
        info = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": num_prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": spans,
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids] if body["return_logprob"] else None,
        } | self.changes
        info = {name: value for name, value in info.items() if value is not None}
        return web.json_response({"text": "", "output_ids": ids, "meta_info": info})

    async def _sample(self, rid: str, params: dict[str, Any]) -> tuple[list[int], list[Any], dict[str, Any]]:
        ids: list[int] = []
        spans: list[dict[str, Any]] = []
        for token_id in range(100, 100 + min(params["max_new_tokens"], self.num_new)):
            await asyncio.sleep(self.token_s)
            async with self._changed:
                await self._changed.wait_for(lambda: not self.paused or rid in self._aborted)
            if rid in self._aborted:
                return ids, spans, {"type": "abort", "message": "Abort in waiting queue"}
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids), "end": len(ids)})
            ids.append(token_id)
            spans[-1]["end"] = len(ids)
            self.num_tokens += 1
            if token_id in params["stop_token_ids"]:
                return ids, spans, {"type": "stop", "matched": token_id}
        return ids, spans, {"type": "length", "length": len(ids)}

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": "/m", "served_model_name": "policy", "is_generation": True, "weight_version": self.version}
        )

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "policy", "object": "model", "owned_by": "sglang", "max_model_len": self.context_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _control(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        async with self._changed:
            if request.path == "/abort_request":
                self._aborted.add(body["rid"])
            else:
                self.paused = request.path == "/pause_generation"
            self._changed.notify_all()
        if request.path == "/abort_request":
            return web.Response()
        return web.json_response({"message": "Generation paused or continued.", "status": "ok"})

    async def _load(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if self.refusal is not None:
            refused = {"success": False, "message": self.refusal, "num_paused_requests": 0}
            return web.json_response(refused, status=400)
        self.weights = body["model_path"]
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _name(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        self.version = body["new_version"]
        return web.json_response({"success": True, "message": "Updated.", "new_version": self.version})
