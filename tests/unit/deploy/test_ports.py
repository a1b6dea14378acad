from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from common.errors import SetupError
from deploy.ports import HOST, PORT_RANGE, answers, free_port, http_ok, is_free, kept_port, listens, require_free


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, free_port())) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def test_a_free_port_is_below_those_of_clients() -> None:
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert port in PORT_RANGE
    assert port < first_of_clients
    assert is_free(port)


def test_a_port_is_kept_while_it_is_free(tmp_path: Path) -> None:
    port = kept_port(tmp_path / "port")
    assert kept_port(tmp_path / "port") == port
    with socket.create_server((HOST, port)):
        other = kept_port(tmp_path / "port")
    assert other != port
    assert kept_port(tmp_path / "port") == other


def test_a_damaged_note_gives_a_new_port(tmp_path: Path) -> None:
    (tmp_path / "port").write_text("x")
    assert kept_port(tmp_path / "port") in PORT_RANGE


def test_a_taken_port_that_the_user_asked_for_is_named(listener: socket.socket) -> None:
    port = port_of(listener)
    with pytest.raises(SetupError, match=rf"port {port} for the engine is taken"):
        require_free(port, what="the engine")
    assert require_free(free := free_port(), what="the engine") == free


def test_listens_says_whether_a_server_takes_connections(listener: socket.socket) -> None:
    check = listens(port_of(listener))
    assert check()
    listener.close()
    assert not check()


def test_answers_compares_the_beginning_of_the_reply(listener: socket.socket) -> None:
    def reply() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(64) == b"PING"
                connection.sendall(b"+PONG and more")

    thread = Thread(target=reply)
    thread.start()
    assert answers(port_of(listener), send=b"PING", expect=b"+PONG")()
    assert not answers(port_of(listener), send=b"PING", expect=b"-ERR!")()
    thread.join()


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_http_ok_wants_status_200() -> None:
    with HTTPServer((HOST, 0), Health) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        assert http_ok(server.server_port, "/health")()
        assert not http_ok(server.server_port, "/loading")()
        server.shutdown()
        thread.join()
    assert not http_ok(server.server_port, "/health")()
