"""Write one HTML page of a run or benchmark: curves, failures, every trajectory down to its tokens.

The page is a single file that opens in a browser without network or server. It contains email text unless --redact is
given. If the run is too large for one page, the evaluations and the newest steps are kept, and the page says what is
left out.

Examples:


  emailrl report
  emailrl report outputs/grpo_masked --html run.html
  emailrl report outputs/benchmarks/test --html benchmark.html --redact
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emailrl.base.errors import UsageError
from emailrl.cli.inputs import check_searchable
from emailrl.cli.options import Json, Overwrite, path_option
from emailrl.cli.output import print_json, result_console, say

if TYPE_CHECKING:
    from emailrl.settings import PlayingSettings


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


HtmlFile = Annotated[Path | None, path_option("--html", help="Write a self-contained HTML page to this file instead.")]
Redact = Annotated[
    bool,
    typer.Option("--redact", help="Replace addresses, and names in addresses and headers; other facts in texts stay."),
]


def write_page(
    path: Path,
    target: Path,
    *,
    settings: PlayingSettings,
    index: int | None = None,
    redact: bool,
    overwrite: bool,
    json: bool = False,
) -> dict[str, Any]:
    """Write the page for ``path`` to ``target``; return ``html``, ``num_trajectories`` and ``left_out``.

    Raises ``UsageError`` if the target exists and may not be overwritten, or if there is no trajectory.
    """
    from emailrl.base.disk import check_out, write_out
    from emailrl.page import gather, page, place_of, redacted

    check_out(target, may_exist=overwrite, option="--html")
    place = place_of(path, index)
    if path in place.root.parents:
        say(f"Newest in {path}: {place.root}")
    data = gather(place, model_name=settings.model.name)
    content = page(redacted(data, _mailbox(settings.store.db)) if redact else data).encode("utf-8", "replace")
    write_out(target, content)
    left_out = data.run["left_out"]
    what = "numbers only" if not data.rows else "redacted" if redact else "with email text"
    count = f"{len(data.rows)} trajector{'y' if len(data.rows) == 1 else 'ies'}"
    say(f"{target}: {count}, {len(content) / 1e6:.1f} MB, {what}", result_console(json=json))
    for each in left_out:
        say(f"Left out: {each}")
    return {"html": target, "num_trajectories": len(data.rows), "left_out": left_out}


def _mailbox(db: Path) -> list[str]:
    """All addresses of the database; none if it is not at hand."""
    from sqlalchemy import select

    from emailrl.base.errors import EmailRLError
    from emailrl.mail.connection import opened
    from emailrl.mail.schema import addresses

    with suppress(EmailRLError), opened(db) as connection:
        return list(connection.scalars(select(addresses.c.address)))
    return []
