"""Makes the pictures of README.md and the data of the page on the site's first screen, in docs/images, from a folder
of the quickstart.

    script -q -c "stty cols 80; emailrl quickstart --out demo" demo.raw      # what the terminal got
    python tests/documents/pictures.py demo demo.raw      # from the clone; needs Chromium

``page.png`` and ``page_dark.png`` are screenshots of the page of its run. ``quickstart.svg`` is what stood on the
terminal in the end, but for the middle; the lines are kept beside this file, and a test draws them again.
``quickstart_narrow.svg`` has its results for a phone.
``example.jsonl.gz`` is the data of that page with fewer trajectories, from which ``make docs`` builds it with the
page's present scripts.
``terminal.svg`` is what inspect-trajectory prints of a trajectory
that the run got right and the untrained policy wrong; that trajectory is kept beside this file, and a test draws it
again. ``quickstart_curve.svg`` is the run's own ``curve.svg``. ``training_curve.svg`` is drawn by
``tests/gpu/small_model.py curves --short`` (at bfac788d) from the three runs of SmolLM2.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chromium import CHROMIUM
from documents.pages import DOCS
from rich.console import Group, RenderableType
from rich.terminal_theme import MONOKAI
from rich.text import Text

from emailrl.cli.console import PlainConsole
from emailrl.cli.trajectory import render_trajectory
from emailrl.measure.evaluation import is_correct
from emailrl.page.build import PageData, gather, page
from emailrl.page.place import place_of
from emailrl.records import encode, read_trajectories, trajectory_to_dict

IMAGES = DOCS / "images"
SHOWN = Path(__file__).with_name("terminal.json")
"""The trajectory of the terminal's picture."""
RECORDED = Path(__file__).with_name("quickstart.ansi")
"""The lines of the quickstart's picture."""
SCREEN = "1280,800"


DARK = {
    "#ffffff": "#14171a", "#000000": "#e4e7ea", "#ebebeb": "#2b3137", "#b0b0b0": "#3a424a", "#cccccc": "#3a424a",
    "#d3d3d3": "#59626c", "#0b6a72": "#62c4cf", "#b5541c": "#e8a06d", "#6f5aa8": "#b29ce0", "#1f77b4": "#6cb4e6",
    "#d62728": "#f08080", "#9467bd": "#bd9ce0", "#8c564b": "#c9968b", "#7f7f7f": "#a9a9a9", "#2563eb": "#7fabfa",
    "#2ca02c": "#5fc75f",
}  # fmt: skip
"""The colors of figures on white paper, and what they are in the dark."""
_RULES = [
    f'[style*="{what}: {color}"] {{ {what}: {dark} !important }}'
    for color, dark in DARK.items()
    for what in ("fill", "stroke")
]
_ROOT = f"svg {{ fill: {DARK['#000000']}; background: {DARK['#ffffff']} }}"
DARK_STYLE = "\n".join(["<style>@media (prefers-color-scheme: dark) {", _ROOT, *_RULES, "}</style>\n"])
"""What draws a figure in the dark where its reader has chosen that."""


def with_dark(figure: str) -> str:
    """Return a figure of matplotlib as SVG that is drawn dark where its surroundings are."""
    bare = re.sub(r"<style>@media.*?</style>\n", "", figure, flags=re.DOTALL)
    return re.sub(r"(<svg [^>]*>\n)", lambda start: start[1] + DARK_STYLE, bare, count=1)


def terminal_svg(path: Path = SHOWN) -> str:
    """Return what ``emailrl inspect-trajectory`` prints of a trajectory as an SVG that loads nothing."""
    [trajectory] = read_trajectories(path)
    title = "outputs/benchmarks/after/trajectories/00-trained.jsonl"
    shown = render_trajectory(trajectory, title=title, origin="benchmark of the trained policy")
    return drawn(shown, "emailrl inspect-trajectory", 100)


def quickstart_svg(path: Path = RECORDED) -> str:
    """Return the recorded lines of a quickstart as an SVG."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return drawn(Group(*map(Text.from_ansi, lines)), "emailrl quickstart", 80)


def narrow_svg(path: Path = RECORDED) -> str:
    """Return the results among those lines as a phone shows them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begins = next(at for at, line in enumerate(lines) if "Test accuracy" in line)
    return drawn(Group(*map(Text.from_ansi, [lines[0], "⋮", *lines[begins:]])), "emailrl quickstart", 50)


def settled(recorded: str) -> list[str]:
    """Return the lines that stood on a terminal in the end, with their colors: what rewrites a line erases it first."""
    lines, at = [""], 0
    for part in re.split(r"(\x1b\[\d*[AK]|\x1b\[\?25[lh]|\r\n|\r|\n)", recorded):
        if part.endswith("\n"):
            at += 1
            lines += [""] * (at == len(lines))
        elif moved := re.fullmatch(r"\x1b\[(\d*)A", part):
            at -= int(moved[1] or 1)
        elif part.endswith("K"):
            lines[at] = ""
        elif not part.startswith(("\r", "\x1b[?")):
            lines[at] += part
    return lines


def told(lines: list[str]) -> list[str]:
    """The first lines of a quickstart, its last state and its results; ⋮ stands for what is left out."""
    plain = [Text.from_ansi(line).plain for line in lines]
    begins = next(at for at, line in enumerate(plain) if line.startswith("Starting training"))
    state = next(at for at, line in enumerate(plain) if re.match(r"Step \d+/\d+ +━", line))
    ends = next(at for at, line in enumerate(plain) if line == "Test accuracy")
    last = max(at for at, line in enumerate(plain) if line.startswith("Next: "))
    left = (f"\x1b[2m⋮ {count} lines\x1b[0m" for count in (state - begins - 4, ends - state - 5))
    command = "\x1b[1m$ emailrl quickstart\x1b[0m"
    return [command, *lines[: begins + 4], next(left), *lines[state : state + 5], next(left), *lines[ends : last + 1]]


def drawn(shown: RenderableType, title: str, width: int) -> str:
    """Return what a terminal shows as an SVG that loads nothing."""
    console = PlainConsole()
    console.width, console.record, console.no_color = width, True, False
    with redirect_stdout(io.StringIO()):
        console.print(shown)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="emailrl")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "monospace")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def choose(quickstart: Path) -> None:
    """Keep the first trajectory that is right after training and was wrong before it."""
    before, after = (
        list(read_trajectories(next((quickstart / "outputs" / "benchmarks" / name / "trajectories").glob("*.jsonl"))))
        for name in ("before", "after")
    )
    pairs = zip(before, after, strict=True)
    chosen = next(now for then, now in pairs if is_correct(now) and not is_correct(then))
    SHOWN.write_text(json.dumps(trajectory_to_dict(chosen)) + "\n", encoding="utf-8")


def screenshot(run_dir: Path, target: Path, theme: str) -> None:
    """Take a picture of the page of a run in Chromium, ``light`` or ``dark``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        shown = page(gather(place_of(run_dir), model_name="nano"))
        file.write_text(shown.replace("<html ", f'<html data-theme="{theme}" '), encoding="utf-8")
        command = [
            str(CHROMIUM), "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
            "--virtual-time-budget=10000", f"--window-size={SCREEN}", f"--screenshot={target}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]  # fmt: skip
        subprocess.run([*command, file.as_uri()], check=True, capture_output=True, timeout=120)


def example(run_dir: Path, target: Path) -> None:
    """Record the page of a run with the trajectories of its first and last evaluation, so that it stays small."""
    evaluations = [file for file in place_of(run_dir).files if file.name.startswith("eval-")]
    count = sum(len(list(read_trajectories(file))) for file in (evaluations[0], evaluations[-1]))
    data = gather(place_of(run_dir), model_name="nano", max_trajectories=count)
    data.run = json.loads(re.sub(r'(?<=")/[^"]*/(?=[^"/]+")', "", json.dumps(data.run)))  # paths of this machine
    data.run["left_out"] = ["all trajectories but those of the first and last evaluation"]
    record(data, target)


def record(data: PageData, target: Path) -> None:
    """Write a page's data: a line of the run, then of each trajectory its row and its detail."""
    pairs = ({"row": row, "detail": detail} for row, detail in zip(data.rows, data.details(), strict=True))
    lines = b"".join(map(encode, [data.run, *pairs]))
    target.write_bytes(gzip.compress(lines, 9, mtime=0))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    [run] = (folder / "outputs").glob("grpo_masked")
    IMAGES.mkdir(exist_ok=True)
    choose(folder)
    (IMAGES / "terminal.svg").write_text(terminal_svg(), encoding="utf-8")
    for name, theme in (("page.png", "light"), ("page_dark.png", "dark")):
        screenshot(run, IMAGES / name, theme)
    recorded = Path(sys.argv[2]).read_bytes().decode()
    RECORDED.write_text("\n".join(told(settled(recorded))) + "\n", encoding="utf-8")
    (IMAGES / "quickstart.svg").write_text(quickstart_svg(), encoding="utf-8")
    (IMAGES / "quickstart_narrow.svg").write_text(narrow_svg(), encoding="utf-8")
    example(run, IMAGES / "example.jsonl.gz")
    curve = (run / "curve.svg").read_text(encoding="utf-8")
    (IMAGES / "quickstart_curve.svg").write_text(with_dark(curve), encoding="utf-8")
