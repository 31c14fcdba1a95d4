"""Write one HTML page of a run or benchmark: curves, failures, every trajectory down to its tokens.

The page is a single file that opens in a browser without network or server. It contains email text unless --redact is
given. If the run is too large for one page, the evaluations and the newest steps are kept, and the page says what is
left out.

Examples:

\b
  emailrl report
  emailrl report outputs/grpo_masked --html run.html
  emailrl report outputs/benchmarks/test --html benchmark.html --redact
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emailrl.base.errors import UsageError
from emailrl.cli.inputs import check_searchable
from emailrl.cli.options import Json, Overwrite, path_option
from emailrl.cli.output import print_json, say
from emailrl.cli.page_file import Redact, write_page


def report(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run or benchmark. Default: the newest run, else benchmark.")
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", help="File to write. Default: NAME.html in this folder, after the run.")
    ] = None,
    redact: Redact = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    from emailrl.settings import load_settings

    settings = load_settings(looks_only=True)
    folder = run or _newest(settings.output.output_dir)
    if run is not None:
        check_searchable(run)
    target = html or Path(f"{folder.absolute().name}.html")
    written = write_page(folder, target, settings=settings, redact=redact, overwrite=overwrite, json=json)
    if json:
        print_json(written)


def _newest(output_dir: Path) -> Path:
    """The newest run, else the newest benchmark; prints which."""
    from emailrl.page.place import made_in, newest_file, newest_run

    if (run := newest_run(output_dir)) is not None:
        say(f"Newest run: {run}")
        return run
    file = newest_file([output_dir.parent / "benchmarks"])
    if file is None:
        raise UsageError(
            f"No run or benchmark with trajectories under {output_dir.parent}.",
            "Make one (emailrl train or benchmark), or name one.",
        )
    say(f"Newest benchmark: {made_in(file)}")
    return made_in(file)
