"""An engine's address: one spelling for the database, and whether two addresses are one server."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from common.errors import SetupError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def normal_url(url: str) -> str:
    """`http://host:port` as the database knows it: in lower case, a default port left out.

    Raises SetupError for anything else.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise SetupError(f"{url} is no engine's address: give http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = "" if parts.port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}"


def listed_as(address: str, listed: Sequence[str]) -> str | None:
    """Which of the listed URLs is the server at a normal address; None = none is known to be.

    Names are looked up here; one that nobody knows is no other server's.
    """
    if address in listed:
        return address
    parts = urlsplit(address)
    at_port = [(url, other) for url in listed if _port(other := urlsplit(url)) == _port(parts)]
    ours = _resolved(parts) if at_port else set()
    return next((url for url, other in at_port if other.hostname == parts.hostname or ours & _resolved(other)), None)


def check_no_alias(address: str, listed: Sequence[str]) -> None:
    """Raise SetupError for a server that is listed under another address, whatever its run."""
    known = listed_as(address, listed)
    if known not in (None, address):
        raise SetupError(
            f"engine {address} is already here as {known}: give that address, or `rollmill engine remove {known}` "
            "first; `rollmill engine add --force` takes what are two servers behind one address"
        )


def _port(parts: SplitResult) -> int:
    return parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def _resolved(parts: SplitResult) -> set[str]:
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(address[0]) for *_, address in found}
