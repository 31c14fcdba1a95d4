"""``docs/llms.txt``: the site's pages with one sentence each, for machine readers (llmstxt.org)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def navigation(docs: Path) -> Iterator[tuple[str, str]]:
    """``(section, page)`` for every page in the ``nav`` of the ``mkdocs.yml`` next to ``docs``, in order.

    Parsed line by line: the navigation is simple, and this package does not depend on a YAML parser.
    """
    section = ""
    text = (docs.parent / "mkdocs.yml").read_text(encoding="utf-8")
    for line in text.partition("\nnav:\n")[2].splitlines():
        found = re.fullmatch(r"\s+- (?:(.+?):)?\s*(\S+\.md)?", line)
        if found is None:
            raise ValueError(f"mkdocs.yml: cannot read {line!r} in the navigation")
        if page := found[2]:
            yield section, page
        else:
            section = found[1]


def first_sentence(text: str) -> str:
    """The first sentence of a page, which follows its title, as plain text."""
    body = re.sub(r"<!--.*?-->", "", text.partition("\n")[2], flags=re.DOTALL)
    paragraph = " ".join(body.strip().partition("\n\n")[0].split())
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph).replace("**", "")
    return re.split(r"(?<=\.)\s(?=[A-Z`])", plain)[0]


def llms_txt(docs: Path) -> str:
    """The text of ``llms.txt`` for the pages in ``docs``; decision records are listed by title only."""
    lines: list[str] = []
    current = ""
    for section, page in navigation(docs):
        text = (docs / page).read_text(encoding="utf-8")
        title, sentence = text.partition("\n")[0].removeprefix("# "), first_sentence(text)
        if page == "index.md":
            lines += [f"# {title}", "", f"> {sentence}"]
            continue
        if section != current:
            current = section
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{title}]({page})" + ("" if section == "Decisions" else f": {sentence}"))
    return "\n".join(lines) + "\n"
