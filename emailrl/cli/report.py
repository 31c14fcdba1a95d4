"""Write one HTML page of a run or benchmark: curves, failures, every trajectory down to its tokens.

Of several runs, it has their curves over each other and a table, grouped by the settings in which they differ; of two
benchmarks of the same test, what changed from one to the other.

The page is a single file that opens in a browser without network or server. It contains email text unless --redact is
given. If the run is too large for one page, the evaluations and the newest steps are kept, and the page says what is
left out.

Examples:


  emailrl report
  emailrl report outputs/grpo_masked --html run.html
  emailrl report outputs/grpo_masked outputs/grpo_masked-2 --html runs.html
  emailrl report outputs/benchmarks/before outputs/benchmarks/after --redact
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from emailrl.base.disk import check_out, check_own, write_out
from emailrl.base.plain import counted
from emailrl.cli.inputs import check_searchable
from emailrl.cli.options import Json, Overwrite, addresses_in, names_in, path_option
from emailrl.cli.output import print_json, result_console, say

if TYPE_CHECKING:
    from emailrl.settings import PlayingSettings

HtmlFile = Annotated[Path | None, path_option("--html", help="Write a self-contained HTML page to this file instead.")]
Redact = Annotated[
    bool, Option("--redact", help="Replace addresses, and names in addresses and headers; other facts in texts stay.")
]


def report(
    runs: Annotated[
        list[Path] | None,
        Argument(metavar="[run]...", help="Run or benchmark, or runs to compare. Default: newest run, else another."),
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", help="File to write. Default: NAME.html in this folder, after the run.")
    ] = None,
    redact: Redact = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    from emailrl.page.place import newest_made
    from emailrl.settings import load_settings

    settings = load_settings(looks_only=True)
    for each in runs or []:
        check_searchable(each)
    if not runs:
        runs = [newest_made(settings.output.output_dir)]
        say(f"Newest: {runs[0]}")
    if html is None:
        check_own(html := Path("runs.html" if len(runs) > 1 else f"{runs[0].absolute().name}.html"), "--html")
    check_out(html, may_exist=overwrite, option="--html")
    write_page(runs, html, settings, index=None, redact=redact, json=json)


def write_page(
    paths: list[Path], target: Path, settings: PlayingSettings, *, index: int | None, redact: bool, json: bool
) -> None:
    """Write the page of a path, or of several runs, to ``target`` and say so, with ``json`` for programs."""
    from emailrl.page.build import gather, page
    from emailrl.page.place import place_of, place_of_several
    from emailrl.page.redact import redacted

    place = place_of_several(paths) if len(paths) > 1 else place_of(paths[0], index)
    if paths[0] in place.root.parents and not place.pair:
        say(f"Newest in {paths[0]}: {place.root}")
    data = gather(place, model_name=settings.model.name)
    db = settings.store.db
    content = page(redacted(data, addresses_in(db), names_in(db)) if redact else data).encode("utf-8", "replace")
    write_out(target, content)
    left_out = data.run["left_out"]
    what = ("redacted" if redact else "with email text") if data.rows else "numbers only"
    size = f"{counted(len(data.rows), 'trajectory')}, {len(content) / 1e6:.1f} MB"
    say(f"{target}: {size}, {what}", result_console(json=json))
    if redact:
        known = f"{db} and" if db.is_file() else f"(without a database: there is no {db})"
        say(f"Note: names and addresses of {known} the page are replaced; the page says what that does not cover.")
    for each in left_out:
        say(f"Left out: {each}")
    if json:
        print_json({"html": target, "num_trajectories": len(data.rows), "left_out": left_out})
