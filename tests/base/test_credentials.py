"""Whose key goes where, and what is told of it."""

from __future__ import annotations

import time

import pytest

from emailrl.base.credentials import names_openrouter, redacted, secrets_in, without_credentials
from emailrl.base.errors import UsageError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://openrouter.ai/api/v1", True), ("https://OpenRouter.AI/api/v1", True),
        ("HTTPS://eu.openrouter.ai:443/api/v1", True), ("https://ann:hush@openrouter.ai/api/v1", True),
        ("http://openrouter.ai/api/v1", False),  # anyone on the way reads the key
        ("https://openrouter.ai.evil.example/v1", False), ("https://notopenrouter.ai/v1", False),
        ("https://evil.example/openrouter.ai", False), ("https://openrouter.ai@evil.example/v1", False),
        ("https://evil.example#@openrouter.ai", False), ("https://evil.example?.openrouter.ai", False),
        ("ftp://openrouter.ai/", False), ("openrouter.ai/api/v1", False), ("", False),
    ],
)  # fmt: skip
def test_whether_an_address_is_openrouters(url: str, expected: bool) -> None:
    assert names_openrouter("JUDGE_BASE_URL", url) is expected


@pytest.mark.parametrize("url", ["https://[half", "https://openrouter.ai:0/v1", "https://h:99999/v1", "http://h/\n"])
def test_no_address_at_all(url: str) -> None:
    with pytest.raises(UsageError, match="JUDGE_BASE_URL is not a valid URL"):
        names_openrouter("JUDGE_BASE_URL", url)


USER, PASSWORD = "ann", 'hu"sh/ü é+'
WRITTEN = [
    'hu"sh/ü é+',
    "hu%22sh%2F%C3%BC%20%C3%A9%2B",
    "hu%22sh/%c3%bc+%c3%a9%2b",
    'hu\\"sh\\/ü é+',
    "hu\\u0022sh\\/\\u00fc \\u00E9+",
    "hu%2522sh%252F%25C3%25BC%2520%25c3%25a9%252B",  # percent-encoded twice
    "hu%252522sh/ü+é%25252B",
    "hu&quot;sh/&uuml; &eacute;+",
    "hu&#34;sh&#47;&#252;&#32;&#xE9;&#x2b;",
    "&#104;&#0117;&#x22;&#x73;h&sol;&#xfc;&nbsp;&#233;&plus;",
    "hu&amp;quot;sh/&amp;#252; &amp;amp;eacute;+",
    "hu\\u0026quot;sh/\\u0026#252; é+",
    "YW5uOmh1InNoL8O8IMOpKw==",  # ann:hu"sh/ü é+
    "YW5uOmh1InNoL8O8IMOpKw",
    "YW5uOmh1InNoL8O8IMOpKw%3D%3D",
    "aHUic2gvw7wgw6kr",  # the password alone
]


@pytest.mark.parametrize("written", WRITTEN)
def test_a_secret_is_hidden_however_it_is_written(written: str) -> None:
    url = "https://ann:hu%22sh%2F%C3%BC%20%C3%A9%2B@host/v1"
    assert redacted(f"Basic {written}; no", *secrets_in(url)) == "Basic ***; no"


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        *(("h&s<", f"<p>{written}</p>") for written in
          ("h&s<", "h&amp;s&lt;", "h&amp;amp;s&amp;lt;", "h&#38;s&#60;", "h\\u0026amp;s\\u0026lt;", "h%2526s%253C")),
        *(("??>>~~", f"<p>{written}</p>") for written in  # Base64 of either alphabet
          ("Pz8+Pn5+", "Pz8-Pn5-", "Pz8%2BPn5%2b", "Pz8\\u002bPn5\\u002B")),
        ("hushhush", "x" * 296 + "hushhush"),  # before the text is cut
    ],
)  # fmt: skip
def test_other_secrets_are_hidden_too(secret: str, text: str) -> None:
    assert redacted(text, secret) in ("<p>***</p>", "x" * 296 + "***")


def test_hostile_texts_are_looked_through_in_no_time() -> None:
    begun = time.process_time()
    for piece in ("\\", "&amp;", "&", "%25", "&#0", "h&", "%"):
        redacted(piece * 65536, 'h&%"s<', "&&&%%%")
    assert time.process_time() - begun < 5


def test_what_an_address_must_not_tell() -> None:
    assert secrets_in("https://ann:hush%40@host/v1?model=x&api_key=k%201") == ["k 1", "ann:hush@", "hush@"]
    assert secrets_in("https://token@host") == ["token:", "token"]
    assert secrets_in("https://@host/") == secrets_in("https://host:80/a@b") == secrets_in("https://[half") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("at https://ann:hu@sh@host/v1?q=a@b", "at https://host/v1?q=a@b"),
        ("https:\\/\\/ann:hush@host", "https:\\/\\/host"),
        ("https://ann:it's@host", "https://host"),
        ("https://host/ann@home and ann@home", "https://host/ann@home and ann@home"),
    ],
)
def test_addresses_are_told_without_their_credentials(text: str, told: str) -> None:
    assert without_credentials(text) == told
