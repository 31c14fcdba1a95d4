"""What must not be told: keys and passwords in addresses and in texts; and whose key OpenRouter's is."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

_CREDENTIALS: Final = re.compile(r"//[^/@\s]+@")
_SECRET_PARAMETER: Final = re.compile(r"(?i)([?&][^=&#\s]*(?:key|token|secret|password|signature)[^=&#\s]*=)[^&#\s]+")
_SHOWN_KEY: Final = re.compile(r"\bsk-[\w*.-]+")
"""What servers repeat of a key they refuse."""


def without_credentials(text: str) -> str:
    """The text with `user:password@`, and the values of parameters that name a key, taken out of every URL in it."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub("//", text))


def redacted(text: str, *secrets: str, limit: int = 300) -> str:
    """At most ``limit`` characters of what a server says, on one line, without the secrets and what it shows of them.

    Cut last: half of an address would hide that it holds a password.
    """
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return without_credentials(" ".join(_SHOWN_KEY.sub("***", text).split()))[:limit]


def is_openrouter(url: str) -> bool:
    """Whether requests to an address go to OpenRouter, and nobody on the way reads them: https, its host or one below.

    ValueError for what is no address.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme == "https" and (host == "openrouter.ai" or host.endswith(".openrouter.ai"))
