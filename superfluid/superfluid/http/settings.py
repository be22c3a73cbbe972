"""What the HTTP face is told by the daemon, fixed for its life."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from superfluid_workerd.link.frames import Class


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """`host` is the address the server listens on; `body_bytes` bounds a request's body;
    `service_class` is that of requests which name none."""

    host: str
    port: int
    body_bytes: int = 16 << 20
    service_class: Class = "agent"
    keep_alive_s: float = 15.0
    """A stream that is silent this long sends a comment, so that no client takes it for dead."""

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address, with or without brackets, means this machine alone."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
