"""The documents as data: pages, their headings, links and fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SKILL = "docs/SKILL.md"  # begins as agents' skills do, and is no page
PAGES = sorted({path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")} - {SKILL})
DOCUMENTS = ["README.md", SKILL, *PAGES]

FENCE = re.compile(r"^( *)```([\w{][^\n]*)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- test: (.+?) -->\n+\Z")
FILE = re.compile(r"^`([\w.]+)`:\n\n\Z", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: how it is tested stands in a comment above it (empty: it is run), its file's name in a line."""

    page: str
    line: int
    language: str
    text: str
    how: str
    file: str


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text, found = text_of(page), []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        how, file = COMMENT.search(before), FILE.search(before)
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(
            Block(page, before.count("\n") + 1, match[2] or "", body, how[1] if how else "", file[1] if file else "")
        )
    return found


def headings(page: str) -> list[tuple[int, str]]:
    """``(level, title)`` of every heading."""
    return [(len(marks), title.strip()) for marks, title in re.findall(r"^(#+) (.+)$", prose(page), re.MULTILINE)]


def anchors(page: str) -> set[str]:
    """The anchors of a page that GitHub and the site agree on."""
    titles = [re.sub(r"[`*]|\[([^]]+)\]\([^)]+\)", r"\1", title) for _, title in headings(page)]
    return {_on_github(title) for title in titles} & {_on_the_site(title) for title in titles}


def links(page: str) -> list[str]:
    """The targets of a page's links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def _on_github(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _on_the_site(title: str) -> str:
    """As Python-Markdown's ``slugify`` does."""
    kept = re.sub(r"[^\w\s-]", "", title.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)
