"""What an episode's commands may reach beyond their sandbox: `[sandbox.network]` of a run, or a task's own.

`workers.sandbox.egress_proxy` keeps to it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config_section import Section
from common.public_address import is_public
from common.storable import MAX_COUNT

NetworkMode = Literal["none", "loopback", "proxy"]
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}")
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
"""Names that the system takes for an address of another spelling, such as 2130706433, 0x7f000001 and 127.1."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A host and a port."""

    host: str
    """A name in small letters, `*.` before it for all names below, or an address in its usual spelling."""
    port: int

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The address that the host is; None = it is a name."""
        return _address(self.host)


def parse_destination(text: str) -> Destination:
    """Of `host:port` or `[IPv6 address]:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ValueError(f"{text!r:.200} must be host:port, such as packages.example.org:443")
    if host.startswith("[") and host.endswith("]"):
        address = _address(host[1:-1])
        if address is None or address.version != 6:
            raise ValueError(f"{text!r:.200}: what is in brackets must be an IPv6 address")
        return Destination(host=str(address), port=int(port))
    name = host.lower().removesuffix(".")
    if not _NAME.fullmatch(name) or (_NUMERIC.fullmatch(name) and _address(name) is None):
        raise ValueError(f"{text!r:.200}: {host!r:.200} is neither the name of a host nor an address as usually spelt")
    return Destination(host=name, port=int(port))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


class NetworkConfig(Section):
    """What agents' commands reach. The node's own network is never part of it."""

    mode: NetworkMode = "none"
    """`none`: no IP at all. `loopback`: what the same command serves on 127.0.0.1 or ::1. `proxy`: that, and through an
    HTTP proxy the destinations of `allow`."""
    allow: tuple[str, ...] = ()
    """Of `proxy`: "packages.example.org:443", "*.files.example.org:443" (all names below), or an address with its
    port. Names lead to public addresses only; an address that is written here is meant as it is, a private one too."""
    max_sent_bytes: int = Field(default=64 << 20, ge=1)
    """Of `proxy`: what an episode may send in all."""
    max_received_bytes: int = Field(default=1 << 30, ge=1)
    """Of `proxy`: what an episode may receive in all."""
    max_connections: int = Field(default=1000, ge=1, le=MAX_COUNT)
    """Of `proxy`: connections that an episode may make in all."""
    max_connection_s: float = Field(default=600.0, gt=0)
    """Of `proxy`: how long one connection may last."""

    @field_validator("allow")
    @classmethod
    def _can_be_read(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            parse_destination(entry)
        return value

    @model_validator(mode="after")
    def _list_fits(self) -> Self:
        if self.mode == "proxy" and not self.allow:
            raise ValueError('mode = "proxy" needs allow, the list of what may be reached')
        if self.mode != "proxy" and self.allow:
            raise ValueError(f'allow = {list(self.allow)!r} has no effect with mode = "{self.mode}": take "proxy"')
        return self

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """`allow` as it is compared."""
        return tuple(map(parse_destination, self.allow))

    def private_beyond(self, run: NetworkConfig) -> list[str]:
        """Addresses on a task's list that are not public, and not on its run's: tasks may not open the node."""
        known = set(run.destinations)
        return [
            entry
            for entry, destination in zip(self.allow, self.destinations, strict=True)
            if destination.address is not None and not is_public(str(destination.address)) and destination not in known
        ]
