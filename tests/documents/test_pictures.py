"""The pictures of README.md: there, on its first screen, loading nothing, and the terminal's as it is printed today."""

from __future__ import annotations

import re

import pytest
from documents.pages import ROOT, text_of
from documents.pictures import IMAGES, terminal_svg

SHOWN = ("page.png", "terminal.svg", "training_curve.svg")


def test_the_terminals_picture_is_what_the_command_prints() -> None:
    drawn = (IMAGES / "terminal.svg").read_text(encoding="utf-8")
    assert terminal_svg() == drawn, "outdated: python tests/documents/pictures.py QUICKSTART draws it again"


def test_the_pictures_are_on_the_first_screen_of_the_readme() -> None:
    head = "".join(text_of("README.md").splitlines(keepends=True)[:40])
    shown = re.findall(r"!\[[^\]]{20,}\]\((docs/images/[^)]+)\)", head)  # with a text for those who do not see them
    assert sorted(shown) == [f"docs/images/{name}" for name in SHOWN]
    assert all((ROOT / name).is_file() for name in shown)


@pytest.mark.parametrize("name", sorted(path.name for path in IMAGES.glob("*.svg")))
def test_a_picture_loads_nothing(name: str) -> None:
    svg = (IMAGES / name).read_text(encoding="utf-8")
    assert not re.search(r"(?:href|src)=\"(?!#)|url\([\"']?(?!#)|@import|<script", svg)
