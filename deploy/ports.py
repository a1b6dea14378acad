"""Loopback ports: free ones that a data folder keeps over restarts, and the question whether a server answers."""

from __future__ import annotations

import http.client
import random
import socket
from collections.abc import Callable
from pathlib import Path

from common.errors import SetupError

HOST = "127.0.0.1"
PORT_RANGE = range(20_000, 32_000)
"""Below the ports that the kernel gives to clients (from 32768): a client that tries to reach a server which is just
restarting could otherwise be given the server's own port, and hold it."""
ANSWER_TIMEOUT_S = 1.0


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody listens on at the moment. Raises SetupError when none is found."""
    for port in random.sample(PORT_RANGE, 200):
        if is_free(port):
            return port
    raise SetupError(f"no free port on {HOST} between {PORT_RANGE.start} and {PORT_RANGE.stop}")


def kept_port(path: Path) -> int:
    """The port noted in this file while it is still free, else a new one, which is noted."""
    try:
        port = int(path.read_text())
    except (OSError, ValueError):
        port = 0
    if port not in PORT_RANGE or not is_free(port):
        port = free_port()
        path.write_text(str(port))
    return port


def require_free(port: int, *, what: str) -> int:
    """The port, which the user asked for. Raises SetupError when it is taken."""
    if not is_free(port):
        raise SetupError(f"port {port} for {what} is taken on {HOST}: stop what listens there, or give another port")
    return port


def listens(port: int) -> Callable[[], bool]:
    """A readiness check: the port takes connections."""

    def check() -> bool:
        try:
            socket.create_connection((HOST, port), timeout=ANSWER_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    return check


def answers(port: int, *, send: bytes, expect: bytes) -> Callable[[], bool]:
    """A readiness check: to `send`, the server's answer begins with `expect`."""

    def check() -> bool:
        try:
            with socket.create_connection((HOST, port), timeout=ANSWER_TIMEOUT_S) as connection:
                connection.sendall(send)
                reply = b""
                while len(reply) < len(expect) and (part := connection.recv(len(expect) - len(reply))):
                    reply += part
        except OSError:
            return False
        return reply == expect

    return check


def http_ok(port: int, path: str) -> Callable[[], bool]:
    """A readiness check: GET of the path gives status 200."""

    def check() -> bool:
        connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return check
