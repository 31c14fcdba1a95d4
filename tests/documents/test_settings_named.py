"""A setting named in a page's text has that name in the environment: no field without its prefix, no misspelling."""

from __future__ import annotations

import difflib
import re

import pytest
from documents.commands import OTHERS_VARIABLES, SETTINGS
from documents.pages import DOCUMENTS, prose

from emailrl.settings.names import leaves

GENERATED = {"docs/reference/cli.md", "docs/reference/settings.md", "docs/reference/openrlhf.md"}
FIELDS = {leaf.field.upper() for leaf in leaves()} - {"NAME"}


def wrong_names(text: str) -> set[str]:
    """Names in capitals in code that are almost a setting's; other programs' variables resemble none."""
    codes = " ".join(re.findall(r"`([^`\n]+)`", text))
    words = set(re.findall(r"(?<![\w<$-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*(?![\w(])", codes)) - SETTINGS - OTHERS_VARIABLES
    return {
        word for word in words if word in FIELDS or ("_" in word and difflib.get_close_matches(word, SETTINGS, 1, 0.85))
    }


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page not in GENERATED])
def test_settings_in_the_text_exist(page: str) -> None:
    assert wrong_names(prose(page)) == set()


def test_a_wrong_name_is_found() -> None:
    assert wrong_names("`PACKING=off`, `MAX_STEP=3`, `HF_HUB_OFFLINE`, `EMAILRL_PACKING`, GAMMA") == {
        "PACKING",
        "MAX_STEP",
    }
