"""What the fence before a vLLM server lets through."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from workers.engine.vllm_plugin.rollmill_fence import UNDER_AN_OPEN_CLAIM, Fence

NAME = "/update_weight_version"


class Server:
    """Behind the fence: notes what reaches it."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.fence = Fence(self._serve)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.got.append((scope["path"], message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(
        self, path: str, claim: int | str | None, *parts: bytes, whole: bool = True
    ) -> tuple[int | None, str]:
        """Send a body in parts, the last of which is missing if not `whole`; status and what the refusal says."""
        given = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        given.append({"type": "http.request", "body": b""} if whole else {"type": "http.disconnect"})
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return given.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        query = b"" if claim is None else f"mode=keep&claim={claim}".encode()
        await self.fence({"type": "http", "path": path, "query_string": query}, receive, send)
        said = json.loads(sent[1]["body"])["error"]["message"] if len(sent) > 1 else ""
        return (sent[0]["status"] if sent else None), said


async def test_a_claim_is_opened_by_its_pause_and_closed_by_a_newer_one() -> None:
    server = Server()
    for path in ("/pause", NAME, "/collective_rpc", NAME, "/resume"):
        assert await server.ask(path, 7) == (200, "")
    assert await server.ask("/pause", 8) == (200, "")
    for path in ("/pause", "/resume", *UNDER_AN_OPEN_CLAIM):
        assert await server.ask(path, 7) == (409, f"{path} comes too late: claim 7 is older than 8")
    assert len(server.got) == 6
    assert (await server.ask("/resume", 8))[0] == 200


@pytest.mark.parametrize("path", ["/pause", *sorted(UNDER_AN_OPEN_CLAIM)])
async def test_a_claim_ends_with_its_resume(path: str) -> None:
    """A load that was sent twice, refused the second time: its first copy arrives when the old weights serve again."""
    server = Server()
    for step in ("/pause", NAME, "/collective_rpc", "/pause", NAME, "/resume"):
        assert await server.ask(step, 7) == (200, "")
    assert await server.ask(path, 7) == (409, f"{path} comes too late: claim 7 ended with its resume")
    assert await server.ask("/resume", 7) == (200, ""), "its answer was lost"
    assert await server.ask(path, 7) == (409, f"{path} comes too late: claim 7 ended with its resume")
    for step in ("/pause", NAME):
        assert await server.ask(step, 8) == (200, "")


async def test_a_resume_opens_no_claim_and_one_without_a_claim_ends_none() -> None:
    server = Server()
    assert await server.ask("/resume", 7) == (200, "")
    assert await server.ask(NAME, 7) == (409, f"{NAME} comes too late: claim 7 ended with its resume")
    assert await server.ask("/pause", 8) == (200, "")
    assert await server.ask("/resume", None) == (200, "")
    assert await server.ask(NAME, 8) == (200, ""), "its owner looks, and pauses it once more"


@pytest.mark.parametrize("claim", ["abc", "", "-3", "1e9", "%D9%A7", "7" * 5000])
async def test_a_claim_that_is_no_number_is_an_error_of_its_sender(claim: str) -> None:
    server = Server()
    for path in ("/pause", "/resume", *UNDER_AN_OPEN_CLAIM):
        status, said = await server.ask(path, claim)
        assert (status, said.endswith("is no whole number")) == (400, True)
    assert server.got == []


@pytest.mark.parametrize("path", sorted(UNDER_AN_OPEN_CLAIM))
async def test_a_server_started_anew_takes_no_rest_of_a_load(path: str) -> None:
    server = Server()
    assert await server.ask(path, 7) == (409, f"{path} without a pause: claim 7 was not opened in this server")
    assert await server.ask("/resume", 9) == (200, ""), "whoever finds it paused may resume it"
    assert (await server.ask(path, 8))[0] == 409


async def test_what_has_no_claim_or_changes_nothing_passes() -> None:
    server = Server()
    await server.ask("/pause", 8)
    assert (await server.ask("/resume", None))[0] == 200
    assert (await server.ask("/v1/completions", 1))[0] == 200


async def test_a_request_is_judged_when_its_last_byte_is_there() -> None:
    server = Server()
    await server.ask("/pause", 7)
    assert (await server.ask(NAME, 7, b'{"new_', b'version": "a"}'))[0] == 200
    assert server.got[-1] == (NAME, b'{"new_version": "a"}')
    assert await server.ask(NAME, 7, b'{"new_', whole=False) == (None, "")
    assert len(server.got) == 2
