"""Write the HTML page of a run, a trajectory file or one trajectory, and summarize it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emailrl.cli.options import path_option
from emailrl.cli.output import result_console, say

if TYPE_CHECKING:
    from emailrl.settings import Settings

HtmlFile = Annotated[Path | None, path_option("--html", help="Write a self-contained HTML page to this file instead.")]
Redact = Annotated[
    bool,
    typer.Option("--redact", help="Replace addresses, and names in addresses and headers; other facts in texts stay."),
]


def write_page(
    path: Path,
    target: Path,
    *,
    settings: Settings,
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
