"""Requests to the command server and its replies, as bytes on a stream.

A request is a length (4 bytes, big endian) and JSON. A reply is two lengths, JSON and the command's output.
"""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Gone(Exception):
    """The worker has gone, or tells the server to go."""


class Stuck(Exception):
    """A process does not die."""


def read_exactly(fd: int, num_bytes: int) -> bytes:
    """Raises Gone at the end of the stream."""
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = os.read(fd, num_bytes - len(data))
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise Gone
        data += chunk
    return bytes(data)


def read_request(fd: int) -> dict[str, Any]:
    """One request."""
    (length,) = struct.unpack(">I", read_exactly(fd, 4))
    request: dict[str, Any] = json.loads(read_exactly(fd, length))
    return request


def write_reply(fd: int, header: dict[str, Any], output: bytes = b"") -> None:
    """One reply. Raises Gone when nobody reads it."""
    head = json.dumps(header).encode()
    left = memoryview(struct.pack(">II", len(head), len(output)) + head + output)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise Gone from error
