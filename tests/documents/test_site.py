"""The pages and the site: navigation, links, settings, messages, pictures, and a build that loads nothing foreign."""

from __future__ import annotations

import difflib
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import CHROMIUM, shown
from documents.commands import OTHERS_VARIABLES, SETTINGS
from documents.pages import DOCS, DOCUMENTS, PAGES, ROOT, anchors, headings, links, prose, text_of
from documents.pictures import DARK, DARK_STYLE, IMAGES, narrow_svg, quickstart_svg, terminal_svg, with_dark
from documents.pictures import SHOWN as SHOWN_IN_TERMINAL
from generate import example_page, find_settings, llms_txt, navigation, needs_of

from emailrl.page.build import gather
from emailrl.page.place import place_of
from emailrl.settings.names import leaves


def test_the_navigation_and_llms_txt_are_current() -> None:
    assert sorted(f"docs/{page}" for _, page in navigation(DOCS)) == PAGES
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
        assert target.exists() or target == DOCS / "images/example.html", f"{page}: {link}"  # which is built
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"
        if page.startswith("docs/"):
            assert target.is_relative_to(DOCS), f"{page}: {link} is outside the site"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_percentages_are_written_as_the_commands_write_them(page: str) -> None:
    assert re.findall(r".{20}\d %(?!`)", text_of(page)) == []  # 95%, not 95 %


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
    (tmp_path / "docs/images/example.html").write_text(example_page(DOCS), encoding="utf-8")
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
    find_settings(tmp_path / "site")
    index = json.loads((tmp_path / "site/search.json").read_text(encoding="utf-8"))
    found = {each["title"]: each["location"].split("#") for each in index["items"]}
    for leaf in leaves():
        page, anchor = found[leaf.env_names[0]]
        assert f'id="{anchor}"' in (tmp_path / "site" / page).read_text(encoding="utf-8")
    if CHROMIUM:  # on a phone, a setting's cells stand under these names
        named = shown(tmp_path / "site/reference/settings.html", tmp_path / "profile")
        assert '<td data-name="environment"><code>MAX_STEPS</code></td>' in named
    formulas = (tmp_path / "site/reference/algorithms.html").read_text(encoding="utf-8")
    assert formulas.count("<math") > 30 and "$" not in re.sub("<script.*?</script>", "", formulas, flags=re.DOTALL)


def test_the_page_on_the_first_screen_is_recorded_in_the_form_that_its_scripts_read(tmp_path: Path) -> None:
    data = gather(place_of(Path(shutil.copy(SHOWN_IN_TERMINAL, tmp_path / "rollout.jsonl"))), model_name="nano")
    [made] = data.details()
    run, *shown = map(json.loads, gzip.decompress((IMAGES / "example.jsonl.gz").read_bytes()).splitlines())
    assert run.keys() == data.run.keys() and len(shown) == sum(file["count"] for file in run["files"]) > 100
    for one in shown:
        assert one["row"].keys() == data.rows[0].keys() and one["detail"].keys() == made.keys()
        assert one["row"]["id"] == one["detail"]["id"]


GENERATED = {"docs/reference/cli.md", "docs/reference/settings.md", "docs/reference/openrlhf.md"}
FIELDS = {leaf.field.upper() for leaf in leaves()} - {"NAME"}


def wrong_names(text: str) -> set[str]:
    """Names in capitals in code that are almost a setting's; other programs' variables resemble none."""
    codes = " ".join(re.findall(r"`([^`\n]+)`", text))
    words = set(re.findall(r"(?<![\w<$-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*(?![\w(])", codes)) - SETTINGS - OTHERS_VARIABLES
    return {
        word for word in words if word in FIELDS or ("_" in word and difflib.get_close_matches(word, SETTINGS, 1, 0.85))
    }


def test_a_setting_is_told_with_what_it_needs() -> None:
    assert needs_of("max_staleness") == ["VLLM_URLS", "IMPORTANCE_CORRECTION=tis, icepop or sequence_mask"]
    assert needs_of("kl_horizon") == ["KL_TARGET"] and needs_of("seed") == []


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page not in GENERATED])
def test_settings_in_the_text_exist(page: str) -> None:
    assert wrong_names(prose(page)) == set()


TROUBLES = (DOCS / "guides/troubleshooting.md").read_text(encoding="utf-8")
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "emailrl").rglob("*.py"))


def test_symptoms_and_messages_are_explained() -> None:
    ours = ["Every rollout failed", "no complete reply within", "Out of memory on a single sample"]
    ours += ["No such mail database"]
    symptoms = ["exceptions=100", "Request timed out", "CUDA out of memory", "FileNotFoundError: enron_emails.db"]
    symptoms += ["Training is too slow", "Accuracy or reward is not going up", "Out of memory", "Time-outs"]
    assert [each for each in ours + symptoms if each not in TROUBLES] == []
    assert [each for each in ours if each not in SOURCE] == []


SHOWN = ("page.png", "quickstart.svg", "terminal.svg")


def test_the_terminals_picture_is_what_the_command_prints() -> None:
    drawn = (IMAGES / "terminal.svg").read_text(encoding="utf-8")
    assert terminal_svg() == drawn, "outdated: python tests/documents/pictures.py QUICKSTART draws it again"
    recorded = (IMAGES / "quickstart.svg").read_text(encoding="utf-8")
    assert quickstart_svg() == recorded and "Test" in recorded and "93.3%" in recorded
    assert narrow_svg() == (IMAGES / "quickstart_narrow.svg").read_text(encoding="utf-8")


def test_the_pictures_are_on_the_first_screen_of_the_readme() -> None:
    head = "".join(text_of("README.md").splitlines(keepends=True)[:40])
    shown = re.findall(r"!\[[^\]]{20,}\]\((docs/images/[^)]+)\)", head)  # with a text for those who do not see them
    shown += re.findall(r'<img src="(docs/images/[^"]+)" alt="[^"]{20,}">', head)
    assert 'srcset="docs/images/page_dark.png"><img src="docs/images/page.png"' in head
    assert sorted(shown) == [f"docs/images/{name}" for name in SHOWN]
    assert all((ROOT / name).is_file() for name in shown)


@pytest.mark.parametrize("name", sorted(path.name for path in IMAGES.glob("*.svg")))
def test_a_picture_loads_nothing(name: str) -> None:
    svg = (IMAGES / name).read_text(encoding="utf-8")
    assert not re.search(r"(?:href|src)=\"(?!#)|url\([\"']?(?!#)|@import|<script", svg)


@pytest.mark.parametrize(
    "figure", sorted([*DOCS.glob("figures/*.svg"), *IMAGES.glob("*_curve.svg")]), ids=lambda at: at.stem
)
def test_a_figure_is_drawn_for_the_dark_too(figure: Path) -> None:
    svg = figure.read_text(encoding="utf-8")
    assert with_dark(svg) == svg, "draw it with documents.pictures.with_dark"
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg.replace(DARK_STYLE, "")))
    assert all(contrast(DARK.get(color, color), DARK["#ffffff"]) > 3 for color in drawn - PAPER)


PAPER = {"#ffffff", "#ebebeb", "#b0b0b0", "#cccccc", "#d3d3d3"}  # of paper, grids and frames, which stay faint


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colors."""

    def light(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))
