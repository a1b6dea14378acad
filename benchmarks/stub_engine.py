"""`python -m benchmarks.stub_engine FILES`: an engine that holds requests back, so that many are open at once.

For `benchmarks.open_requests`. Prints its address; ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from aiohttp import web

from workers.open_files import raise_open_files

NUM_TOKENS = 8
ANSWER_S = 0.1
CHOICE = {
    "finish_reason": "length",
    "token_ids": list(range(NUM_TOKENS)),
    "weight_versions": [{"version": "open-requests/000000", "start": 0, "end": NUM_TOKENS}],
    "logprobs": {"content": [{"token_id": token_id, "logprob": -0.5} for token_id in range(NUM_TOKENS)]},
}


class StubEngine:
    """Holds the latest requests back, so many, until it is told to release them; or answers each after ANSWER_S."""

    def __init__(self) -> None:
        self.max_held = 0
        self.held: deque[asyncio.Future[None]] = deque()
        self.num_open = 0
        self.max_open = 0

    async def start(self, request: web.Request) -> web.Response:
        """Count anew, and hold so many requests back from now on."""
        self.max_held, self.max_open = int(request.query["hold"]), 0
        return web.Response()

    async def open(self, _: web.Request) -> web.Response:
        """The requests that wait now, and the most at once since the start."""
        return web.json_response({"open": self.num_open, "max_open": self.max_open})

    async def release(self, _: web.Request) -> web.Response:
        self._release(0)
        return web.Response()

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        if self.max_held:
            held = asyncio.get_running_loop().create_future()
            self.held.append(held)
            self._release(self.max_held)
            await held
        else:
            await asyncio.sleep(ANSWER_S)
        self.num_open -= 1
        return web.json_response({"choices": [CHOICE]})

    def _release(self, num_left: int) -> None:
        while len(self.held) > num_left:
            self.held.popleft().set_result(None)


async def serve(num_files: int) -> None:
    raise_open_files(num_files)
    engine = StubEngine()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_post("/start", engine.start)
    app.router.add_post("/release", engine.release)
    app.router.add_get("/open", engine.open)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=num_files)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
