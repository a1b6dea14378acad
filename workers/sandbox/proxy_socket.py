"""How the worker's proxy gets a socket in a sandbox's own network, which the sandbox's server makes and hands over."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from shutil import rmtree

from workers.sandbox.client import ServerLost

SOCKET_NAME = "socket"
PORT = 3128
"""On the sandbox's loopback, which is its alone."""
ENVIRONMENT = {
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"), f"http://127.0.0.1:{PORT}"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
"""Some programs read the one spelling, some the other."""


def lent_listener(way: socket.socket) -> socket.socket:
    """What came by the way, which must have come by now. Raises ServerLost."""
    way.setblocking(False)
    try:
        _, handles, _, _ = socket.recv_fds(way, 1, 1)
    except OSError:
        handles = []
    if not handles:
        raise ServerLost("the sandbox handed over no socket for its proxy")
    listener = socket.socket(fileno=handles[0])
    if listener.family != socket.AF_INET or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ServerLost("what the sandbox handed over for its proxy is no listener")
    return listener


class Meeting:
    """A folder with a Unix socket, mounted into a container that starts; the container's server comes to it once.

    Nobody listens there any more when the first command runs.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises OSError."""
        self._folder = folder
        folder.mkdir(mode=0o711)
        # Through the folder's number: a socket's own path may have 107 bytes only.
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(f"/proc/self/fd/{handle}/{SOCKET_NAME}")
            self._server.listen(1)
        finally:
            os.close(handle)
        # The container's user is nobody on this machine; folders above keep the machine's other users out.
        (folder / SOCKET_NAME).chmod(0o666)

    def listener(self) -> socket.socket:
        """What the server, which is ready by now, has handed over. Raises ServerLost."""
        self._server.setblocking(False)
        try:
            way, _ = self._server.accept()
        except OSError:
            raise ServerLost("the sandbox handed over no socket for its proxy") from None
        with way:
            return lent_listener(way)

    def close(self) -> None:
        """Listen no more."""
        self._server.close()
        rmtree(self._folder, ignore_errors=True)
