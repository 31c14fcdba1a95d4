"""The landing page in a browser: what sells it stands on the first screen, of a desktop and of a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from chromium import CHROMIUM, needs_chromium
from documents.pages import DOCS, ROOT
from documents.test_site import zensical
from generate import example_page

pytestmark = [needs_chromium, pytest.mark.skipif(zensical() is None, reason="Zensical is not installed")]
BOTTOMS = "all => all.map(each => each.getBoundingClientRect().bottom)"


def test_the_claim_the_command_and_three_doors_stand_on_the_first_screen(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs/images/example.html").write_text(example_page(DOCS), encoding="utf-8")
    subprocess.run([str(zensical()), "build"], cwd=tmp_path, capture_output=True, check=True)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme, width, height in (("light", 1440, 900), ("dark", 390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto((tmp_path / "site/index.html").as_uri())
            for part, count in ((".claim", 1), (".hero pre", 1), (".doors a", 3)):
                bottoms = page.eval_on_selector_all(part, BOTTOMS)
                assert len(bottoms) == count and max(bottoms) <= height, (part, width)
            assert page.frame_locator(".window iframe").get_by_text("93.3%").count() > 0
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for door in page.query_selector_all(".doors a"):
                assert (tmp_path / "site" / (door.get_attribute("href") or "")).is_file()
            assert axe.Axe().run(page).response["violations"] == []
        browser.close()
