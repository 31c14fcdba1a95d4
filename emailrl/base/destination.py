"""Announces every host that receives email on the terminal."""

from __future__ import annotations

import ipaddress
from functools import cache
from urllib.parse import urlsplit

from emailrl.base import plain


@cache
def tell(url: str, use: str, *, with_key: bool) -> None:
    """Report on stderr, once per process, which host gets email and why; warn if the connection is unencrypted."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    open_to_all = parts.scheme == "http" and not is_this_machine(parts.hostname or "")
    key = ", key included" if with_key else ""
    warning = f" (warning: plain http, readable by anyone on the way{key})" if open_to_all else ""
    plain.tell(f"mail goes to {host}: {use}{warning}")


def is_this_machine(host: str) -> bool:
    """Whether a host name or IP address, without brackets, is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
