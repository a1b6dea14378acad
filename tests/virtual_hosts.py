"""Virtual hosts of the tests' RabbitMQ node: a test sees no queue, message or consumer of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import requests

TIMEOUT_S = 60.0


@contextmanager
def virtual_host(url: str, folder: Path) -> Iterator[str]:
    """URL of an empty virtual host of the private node; at the end it goes, with all that is in it.

    Args:
        url: The node's, with a user that administers it.
        folder: The node's data folder, which knows the port of its management API.
    """
    node = urlsplit(url)
    port = int((folder / "rabbitmq" / "api.port").read_text())
    name = f"test_{uuid4().hex[:8]}"
    place = f"http://{node.hostname}:{port}/api/vhosts/{name}"
    with requests.Session() as api:
        api.auth = (node.username or "", node.password or "")
        # Whoever makes it may do all in it.
        api.put(place, timeout=TIMEOUT_S).raise_for_status()
        yield node._replace(path=f"/{name}").geturl()
        api.delete(place, timeout=TIMEOUT_S).raise_for_status()
