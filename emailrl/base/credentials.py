"""Redaction of keys and passwords in URLs and text, and the check for OpenRouter URLs."""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from functools import cache
from html.entities import html5
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from emailrl.base.errors import UsageError

_CREDENTIALS: Final = re.compile(r"""((?:\\{0,8}/){2})[^/?#\s"<>\\]*@""")
"""Up to the last @, since a password may contain one; after slashes, possibly JSON-escaped."""
_SECRET_NAME: Final = r"(?:key|token|secret|password|signature)"
_SECRET_PARAMETER: Final = re.compile(rf"(?i)([?&][^=&#\s]*{_SECRET_NAME}[^=&#\s]*=)[^&#\s]+")
_SECRET_ARGUMENT: Final = re.compile(
    r"""(?i)(?:\bapi_?k\w*|\bhf_t\w*|\w*(?:access|auth|secret|api)_?(?:key|token)\w*|\w*(?:password|secret)\w*)(?="?\s*[:=])"""
)
"""A program's argument, also abbreviated as a command line allows; or a key in a JSON object."""
_SHOWN_KEY: Final = re.compile(r"\bsk-[\w*.-]+")  # the part of a rejected key that servers echo
_AMPERSAND: Final = r"(?:&|\\{1,8}u0026)(?:amp;)*"  # the start of an HTML entity, including repeated and JSON escaping
_LONGEST: Final = 1 << 16  # maximum number of characters of a server response to search


def without_credentials(text: str) -> str:
    """The text with `user:password@` and the values of key-like parameters removed from every URL."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1", text))


def secret_argument(text: str) -> str | None:
    """The name of a secret among arguments, given as a JSON object or as options; None if there is none."""
    found = _SECRET_ARGUMENT.search(text.replace("-", "_"))
    return found[0].strip("_") if found else None


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """A URL without `user:password@`, and the decoded pair; None if there is none."""
    try:
        parts = urlsplit(url)
    except ValueError:  # the request itself will report it
        return url, None
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = userinfo.partition(":")
    return parts._replace(netloc=host).geturl(), (unquote(user), unquote(password))


def secrets_in(url: str) -> list[str]:
    """The secrets in a URL: user and password, and the values of key-like parameters."""
    address, credentials = split_credentials(url)
    secrets = [value for name, value in parse_qsl(address.partition("?")[2]) if re.search(f"(?i){_SECRET_NAME}", name)]
    if credentials is not None and any(credentials):
        user, password = credentials
        secrets += [f"{user}:{password}", password or user]
    return secrets


def redacted(text: str, *secrets: str, limit: int = 300) -> str:
    """At most ``limit`` characters of a server response, on one line, without the secrets in any encoding. The text is
    cut last, because a truncated URL could hide that it contains a password."""
    text = " ".join(text.split())[:_LONGEST]
    if secrets := tuple(filter(None, secrets)):
        text = _any_of(secrets).sub("***", text)
    return without_credentials(_SHOWN_KEY.sub("***", text))[:limit]


@cache
def _any_of(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern for every form of the secrets; the longest first: "ann:hush" before "hush"."""
    forms = []
    for secret in secrets:
        raw = secret.encode("utf-8", "surrogatepass")
        forms += [secret, *(encode(raw).decode().rstrip("=") for encode in (b64encode, urlsafe_b64encode))]
    patterns = ("".join(map(_written, form)) + "(?:=|%3[Dd])*" for form in sorted(forms, key=len, reverse=True))
    return re.compile("|".join(patterns))


def _written(character: str) -> str:
    """A pattern for every encoding of a character in a URL, JSON or HTML."""
    if character.isspace():
        return rf"(?:\s+|\+|(?i:%(?:25)*[0-9a-f]{{2}})|\\[nrt]|{_AMPERSAND}(?:#\w+|nbsp);?)"
    percent = "".join(f"%(?:25)*{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    units = character.encode("utf-16-be", "surrogatepass").hex()
    escaped = "".join(rf"\\{{1,8}}u{units[place : place + 4]}" for place in range(0, len(units), 4))
    escapable = r"\\{0,8}" if character in "\"'/\\" else ""
    names = "".join(f"|{name.rstrip(';')}" for name, meant in html5.items() if meant == character)
    entity = rf"{_AMPERSAND}(?:#0*{ord(character)}(?!\d)|(?i:#x0*{ord(character):x}(?![\da-f])){names});?"
    return rf"(?:{entity}|{escapable}{re.escape(character)}|(?i:{percent}|{escaped}))"


def check_key(name: str, key: str) -> None:
    """Raise UsageError, without the key, unless a header can hold it: printable ASCII without spaces."""
    if not re.fullmatch("[!-~]*", key):
        what = f"{name} is not a valid key: it has a space, a line break, a control character or one outside ASCII."
        raise UsageError(what, "Copy the key again, without anything before or after it.")


def names_openrouter(setting: str, url: str) -> bool:
    """Whether the URL of a setting is OpenRouter's: https, its host or a subdomain. UsageError for an invalid URL."""
    try:
        parts = urlsplit(url)
        is_valid = url.isprintable() and parts.port != 0  # the attribute raises for any other port that is not one
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"{setting} is not a valid URL.", "Expected something like https://openrouter.ai/api/v1.")
    host = parts.hostname or ""
    return parts.scheme == "https" and (host == "openrouter.ai" or host.endswith(".openrouter.ai"))
