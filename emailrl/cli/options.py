"""Options several commands share, so that a flag has one spelling and one help text everywhere.

Each is an ``Annotated`` type for a command's signature; None means not given, and `load_settings` ignores it::

    def train(model: Model = None, db: Db = None, json: Json = False) -> None:
        settings = load_settings({"model_name": model, "db": db})
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _path(value: str) -> Path:
    if not value.strip():  # as a path it would mean the folder one happens to be in
        raise typer.BadParameter("is empty; name a file or folder.")
    return Path(value)


def path_option(name: str, *, help: str) -> Any:
    """An option that names a file or a folder, and not with an empty text."""
    return typer.Option(name, parser=_path, metavar="<path>", help=help)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON value, last on stdout.")]
Model = Annotated[str | None, typer.Option("--model", help="nano (packaged), a local folder or a hub name.")]
Db = Annotated[Path | None, path_option("--db", help="The mail database.")]
Questions = Annotated[Path | None, path_option("--questions", help="A local question file (JSONL).")]
Preset = Annotated[str | None, typer.Option("--preset", help="Size: quick, small, medium, full, paper or guide.")]
Engine = Annotated[str | None, typer.Option("--engine", help="auto, transformers, vllm or openai.")]
Environment = Annotated[str | None, typer.Option("--environment", help="mail, module:attribute or path.py:attribute.")]
Reward = Annotated[
    str | None,
    typer.Option("--reward", help="art_e, simple, heuristic, module:attribute, path.py:attribute or http(s)://…"),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Take at most so many.")]
OutputDir = Annotated[Path | None, path_option("--output-dir", help="Root of the runs; the mode is appended.")]
Checkpoint = Annotated[str | None, typer.Option("--checkpoint", help="best, latest or a checkpoint's folder.")]
Mode = Annotated[str | None, typer.Option("--mode", help="simple, rollout or masked.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
AllowSharedInbox = Annotated[
    bool | None, typer.Option("--allow-shared-inbox", help="Accept an inbox in several splits; every table says so.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Play only what an earlier start of the same left unplayed.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Trust what this folder's files set, from now on (docs/security.md).")
]
Verbose = Annotated[bool | None, typer.Option("--verbose", "-v", help="Say more.")]
