"""The head of a request to the proxy of a sandbox, read strictly: what could be read in two ways is refused.

`workers.sandbox.egress_proxy` answers it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from common.config_network import Destination, parse_destination

MAX_HEAD_BYTES = 16 << 10
HEAD_TIMEOUT_S = 30.0
MAX_BODY_DIGITS = 15
_START = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_URL = re.compile(r"http://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)
_OF_THE_CONNECTION = frozenset(
    ("host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length")
)


class Refused(Exception):
    """The request is not passed on. The agent reads why."""

    def __init__(self, status: str, why: str) -> None:
        self.status = status
        self.why = why
        super().__init__(why)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the proxy."""

    method: str
    destination: Destination
    head: bytes
    """What the server is told first; empty for CONNECT."""
    num_body_bytes: int | None
    """What the agent sends after its head; None = CONNECT: whatever it likes, until it ends."""


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Raises Refused; IncompleteReadError when the agent went without asking; TimeoutError."""
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused("431 Request Header Fields Too Large", f"more than {MAX_HEAD_BYTES} bytes of head") from None
    start, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    matched = _START.fullmatch(start)
    if matched is None:
        raise Refused("400 Bad Request", "this is a proxy for HTTP/1.1: CONNECT host:port, or GET http://host/path")
    method, target = matched.groups()
    if method == "CONNECT":
        return Request(method=method, destination=_destination(target), head=b"", num_body_bytes=None)
    return _plain(method, target, _fields(lines))


def _fields(lines: list[str]) -> list[tuple[str, str]]:
    fields = []
    for line in lines:
        matched = _FIELD.fullmatch(line)
        if matched is None:
            raise Refused("400 Bad Request", f"this is no header field: {line!r:.100}")
        fields.append((matched[1], matched[2].strip(" \t")))
    return fields


def _plain(method: str, target: str, fields: list[tuple[str, str]]) -> Request:
    matched = _URL.fullmatch(target)
    if matched is None:
        raise Refused(
            "400 Bad Request", f"{target!r:.200} must be an address as http://host/path; for https:// use CONNECT"
        )
    authority, path = matched[1], matched[2] or "/"
    has_port = re.fullmatch(r".*:[0-9]+", authority) is not None
    destination = _destination(authority if has_port else f"{authority}:80")
    num_body_bytes = _num_body_bytes(fields)
    # The server learns the host that was looked up on the list, whatever the agent's own field says.
    lines = [f"{method} {path if path.startswith('/') else '/' + path} HTTP/1.1", f"Host: {authority}"]
    left_out = _OF_THE_CONNECTION | {
        option.strip().lower() for name, value in fields if name.lower() == "connection" for option in value.split(",")
    }
    lines += [
        f"{name}: {value}"
        for name, value in fields
        if name.lower() not in left_out and not name.lower().startswith("proxy-")
    ]
    if num_body_bytes:
        lines.append(f"Content-Length: {num_body_bytes}")
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
    return Request(method=method, destination=destination, head=head, num_body_bytes=num_body_bytes)


def _num_body_bytes(fields: list[tuple[str, str]]) -> int:
    names = [name.lower() for name, _ in fields]
    if "transfer-encoding" in names:
        raise Refused("411 Length Required", "a body must come with its Content-Length, not in chunks")
    lengths = {value for name, value in fields if name.lower() == "content-length"}
    if not lengths:
        return 0
    (length,) = lengths if len(lengths) == 1 else ("",)
    if not re.fullmatch(f"[0-9]{{1,{MAX_BODY_DIGITS}}}", length):
        raise Refused("400 Bad Request", "Content-Length must be one number")
    return int(length)


def _destination(authority: str) -> Destination:
    try:
        where = parse_destination(authority)
        if where.host.startswith("*"):
            raise ValueError(f"{authority!r:.200} is not one host")
        return where
    except ValueError as error:
        # Such a spelling is on no list, so this is a refusal and no mistake of form.
        raise Refused("403 Forbidden", f"{error}: [sandbox.network] allow of the run has nothing like it") from None
