"""Whose key goes where."""

from __future__ import annotations

import pytest

from emailrl.settings import is_openrouter


@pytest.mark.parametrize(
    "url",
    [
        "https://openrouter.ai/api/v1",
        "https://OpenRouter.AI/api/v1",
        "HTTPS://eu.openrouter.ai:443/api/v1",
        "https://ann:hush@openrouter.ai/api/v1",
    ],
)
def test_openrouters_addresses(url: str) -> None:
    assert is_openrouter(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://openrouter.ai/api/v1",  # anyone on the way reads the key
        "https://openrouter.ai.evil.example/v1",
        "https://notopenrouter.ai/v1",
        "https://evil.example/openrouter.ai",
        "https://openrouter.ai@evil.example/v1",
        "https://evil.example#@openrouter.ai",
        "https://evil.example?.openrouter.ai",
        "ftp://openrouter.ai/",
        "openrouter.ai/api/v1",
        "",
    ],
)
def test_addresses_that_are_not_openrouters(url: str) -> None:
    assert not is_openrouter(url)


def test_no_address_at_all() -> None:
    with pytest.raises(ValueError, match="IPv6"):
        is_openrouter("https://[half")
