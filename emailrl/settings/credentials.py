"""What must not be told: keys and passwords in addresses and in texts; and whose key OpenRouter's is."""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from functools import cache
from html.entities import html5
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

_CREDENTIALS: Final = re.compile(r"""((?:\\{0,8}/){2})[^/?#\s"<>\\]*@""")
"""Up to the last @, which a password may hold too; behind slashes as JSON may escape them."""
_SECRET_NAME: Final = r"(?:key|token|secret|password|signature)"
_SECRET_PARAMETER: Final = re.compile(rf"(?i)([?&][^=&#\s]*{_SECRET_NAME}[^=&#\s]*=)[^&#\s]+")
_SHOWN_KEY: Final = re.compile(r"\bsk-[\w*.-]+")
"""What servers repeat of a key they refuse."""
_AMPERSAND: Final = r"(?:&|\\{1,8}u0026)(?:amp;)*"
"""As an entity of HTML begins, escaped again and in JSON included."""
_LONGEST: Final = 1 << 16
"""Characters of a server's words that are looked through."""


def without_credentials(text: str) -> str:
    """The text with `user:password@`, and the values of parameters that name a key, taken out of every URL in it."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1", text))


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """An address without its `user:password@`, and both as they are meant; None where it has none."""
    try:
        parts = urlsplit(url)
    except ValueError:  # whoever asks it will say so
        return url, None
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = userinfo.partition(":")
    return parts._replace(netloc=host).geturl(), (unquote(user), unquote(password))


def secrets_in(url: str) -> list[str]:
    """What an address must not tell: its user and password, and the values of parameters that name a key."""
    address, credentials = split_credentials(url)
    secrets = [value for name, value in parse_qsl(address.partition("?")[2]) if re.search(f"(?i){_SECRET_NAME}", name)]
    if credentials is not None and any(credentials):
        user, password = credentials
        secrets += [f"{user}:{password}", password or user]
    return secrets


def redacted(text: str, *secrets: str, limit: int = 300) -> str:
    """At most ``limit`` characters of what a server says, on one line, without the secrets and what it shows of them.

    A secret is hidden however it is written: percent-encoded or escaped for HTML, once or more often, escaped in JSON,
    in base64 of either alphabet. Cut last: half of an address would hide that it holds a password.
    """
    text = " ".join(text.split())[:_LONGEST]
    forms = [form for secret in filter(None, secrets) for form in _forms(secret)]
    if forms:
        # The longest first: "ann:hush" before "hush".
        text = re.sub("|".join(map(_pattern, sorted(forms, key=len, reverse=True))), "***", text)
    return without_credentials(_SHOWN_KEY.sub("***", text))[:limit]


def _forms(secret: str) -> list[str]:
    raw = secret.encode("utf-8", "surrogatepass")
    return [secret, *(encode(raw).decode().rstrip("=") for encode in (b64encode, urlsafe_b64encode))]


def _pattern(form: str) -> str:
    return "".join(map(_written, form)) + ("(?:=|%3[Dd])*" if form else "")


def _written(character: str) -> str:
    """A pattern of the ways to write a character in a URL, in JSON and in HTML."""
    if character.isspace():
        return rf"(?:\s+|\+|(?i:%(?:25)*[0-9a-f]{{2}})|\\[nrt]|{_AMPERSAND}(?:#\w+|nbsp);?)"
    percent = "".join(f"%(?:25)*{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    units = character.encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(rf"\\{{1,8}}u{units[place : place + 4]}" for place in range(0, len(units), 4))
    escapable = r"\\{0,8}" if character in "\"'/\\" else ""
    names = "".join(f"|{name}" for name in _entities().get(character, ()))
    entity = rf"{_AMPERSAND}(?:#0*{ord(character)}(?!\d)|(?i:#x0*{ord(character):x}(?![\da-f])){names});?"
    return rf"(?:{entity}|{escapable}{re.escape(character)}|(?i:{percent}|{escaped}))"


@cache
def _entities() -> dict[str, list[str]]:
    """The names that HTML has for a character, without & and ;."""
    names: dict[str, list[str]] = {}
    for name, character in html5.items():
        names.setdefault(character, []).append(name.rstrip(";"))
    return names


def is_openrouter(url: str) -> bool:
    """Whether requests to an address go to OpenRouter, and nobody on the way reads them: https, its host or one below.

    ValueError for what is no address.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme == "https" and (host == "openrouter.ai" or host.endswith(".openrouter.ai"))
