"""The documentation site: complete navigation, links that resolve, a strict build that loads nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents.pages import DOCS, DOCUMENTS, PAGES, ROOT, anchors, headings, links, text_of
from generate import llms_txt, navigation


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(f"docs/{page}" for _, page in navigation(DOCS)) == PAGES


def test_llms_txt_is_current() -> None:
    assert (DOCS / "llms.txt").read_text(encoding="utf-8") == llms_txt(DOCS), "run `make docs`"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_title_then_a_paragraph_that_says_what_it_is_for(page: str) -> None:
    text = text_of(page)
    assert [title for level, title in headings(page) if level == 1] == [text.partition("\n")[0].removeprefix("# ")]
    opening = re.sub(r"<!--.*?-->", "", text.partition("\n")[2], flags=re.DOTALL).strip()
    if not page.startswith("docs/decisions/"):
        assert re.match(r"[\w`[*]", opening) and not opening.startswith("```"), opening[:80]


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_inside_the_project_resolve(page: str) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith(("https://", "http://")), link
            continue
        file, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"
        if page.startswith("docs/"):
            assert target.is_relative_to(DOCS), f"{page}: {link} is outside the site"


def test_the_readme_is_short_and_links_to_the_main_pages() -> None:
    assert len(text_of("README.md").splitlines()) <= 150
    linked = {link.partition("#")[0] for link in links("README.md")}
    main = ("start/quickstart", "start/tutorial", "reference/cli", "reference/settings", "guides/troubleshooting")
    assert {f"docs/{page}.md" for page in main} <= linked


def zensical() -> str | None:
    beside = Path(sys.executable).with_name("zensical")
    return str(beside) if beside.exists() else shutil.which("zensical")


@pytest.mark.skipif(zensical() is None, reason="Zensical is not installed: pip install -e '.[dev]'")
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    built = subprocess.run(
        [str(zensical()), "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0 and "No issues found" in built.stdout + built.stderr, built.stdout + built.stderr
    for page in PAGES:
        html = (tmp_path / "site" / page.removeprefix("docs/")).with_suffix(".html").read_text(encoding="utf-8")
        foreign = re.findall(
            r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//|<link[^>]*\bhref=\"?(?:https?:)?//", html
        )
        assert foreign == [], page
