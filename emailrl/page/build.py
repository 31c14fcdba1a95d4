"""Builds a page's data: the run's record, and a row and the full detail of each trajectory, within a budget."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Final

from emailrl.base.errors import UsageError
from emailrl.page.place import Place, file_record, has_numbers, position_in, run_record, runs_record, source_of
from emailrl.page.shapes import TokenTexts, detail, fitting_tokenizer, rows, tokenizer_folders
from emailrl.records import Record, TrainingNote, TrajectoryIndex, encode, training_notes

MAX_TRAJECTORIES = 10_000
MAX_TOKENS = 6_000_000  # page limits; a page at the limit is about 60 MB


@dataclass(slots=True)
class PageData:
    """A page's data; ``details`` yields one record per row, in order."""

    run: Record
    rows: list[Record] = field(default_factory=list)
    details: Callable[[], Iterator[Record]] = lambda: iter(())


def gather(place: Place, *, model_name: str, max_trajectories: int = MAX_TRAJECTORIES) -> PageData:
    """Read the files of a place; data over the budget is left out and listed in ``run["left_out"]``. ``model_name``'s
    tokenizer is tried last. Raises ``UsageError`` if there is no trajectory."""
    if place.runs:
        return PageData(runs_record(place.runs))
    shown, records, left_out = _read(place, max_trajectories)
    if not any(positions for _, positions in shown) and not (place.index is None and has_numbers(place.folder)):
        why = left_out or [f"{place.root} holds no complete trajectory yet"]
        raise UsageError(f"{why[0]}.", "Wait for the run, or name another file.")
    run = run_record(place, records)
    notes: dict[Path, dict[str, TrainingNote]] = {}
    tokens: dict[Path, TokenTexts | None] = {}  # of each file with tokens
    known: TokenTexts | None = None
    for index, positions in shown:
        notes[index.path], complaints = training_notes(index.path)
        left_out += complaints
        if (at := next((at for at in positions if index[at].trained), None)) is not None:
            first = index.trajectory(at)
            if not (known and known.fits(first)):  # loading one is slow
                known = fitting_tokenizer(tokenizer_folders(index.path, model_name), first)
            tokens[index.path] = known
    run["left_out"] += left_out
    if unreadable := [file.name for file, texts in tokens.items() if texts is None]:
        run["notes"] += [f"No tokenizer was found for {_several(unreadable)}: token ids are shown instead of text."]

    def details() -> Iterator[Record]:
        for index, positions in shown:
            for each in map(index.trajectory, positions):
                yield detail(each, note=notes[index.path].get(each.id), tokens=tokens.get(index.path))

    listed = (rows(index.path, [index[at] for at in positions], notes[index.path]) for index, positions in shown)
    return PageData(run, [*chain.from_iterable(listed)], details)


Kept = list[tuple[TrajectoryIndex, Sequence[int]]]
"""The files, and of each the positions of the trajectories that a page shows."""


def _read(place: Place, max_trajectories: int) -> tuple[Kept, list[Record], list[str]]:
    """The files' trajectories in the place's order, within the budget; their entries, and what is left out."""
    kept: dict[Path, tuple[TrajectoryIndex, Sequence[int]]] = {}
    records: dict[Path, Record] = {}
    cut: list[str] = []
    count = tokens = 0
    evaluations = [file for file in place.files if source_of(file) == "eval"]
    # By importance: the first and last evaluation, then all other files, newest first.
    for file in dict.fromkeys([*evaluations[:1], *evaluations[-1:], *reversed(place.files)]):
        if count >= max_trajectories or tokens >= MAX_TOKENS:
            records[file] = file_record(file, None, 0) | {"left_out": True}
            continue
        index = TrajectoryIndex(file)
        positions = index.readable if place.index is None else [position_in(index, place.index)]
        if place.index is not None and len(index) > 1:
            cut.append(f"{len(index) - 1} of the {len(index)} trajectories in {file.name}")
        cut += index.bad_lines + index.torn
        if (over := count + len(positions) - max_trajectories) > 0:
            cut.append(f"{over} of the {len(positions)} trajectories in {file.name}")
            positions = positions[:-over]
        first = index.trajectory(positions[0]) if positions else None
        count += len(positions)
        tokens += sum(index[at].tokens for at in positions)
        kept[file] = index, positions
        records[file] = file_record(file, first, len(positions))
    if skipped := [file.name for file in place.files if file not in kept]:
        cut.append(f"{_several(skipped)} ({len(skipped)} of {len(place.files)} files)")
    return [kept[file] for file in place.files if file in kept], [records[file] for file in place.files], cut


def _several(names: list[str]) -> str:
    return " to ".join(dict.fromkeys([names[0], names[-1]]))


_CHUNK_BYTES = 400_000  # trajectory JSON that the page unpacks at a time
SCRIPTS: Final = (
    "data", "dom", "state", "search", "zoom", "charts", "overview", "runs", "list", "conversation", "tokens",
    "detail", "through", "about", "main",
)  # fmt: skip
"""The page's scripts in the order in which they are joined into one."""


def page(data: PageData) -> str:
    """Return the page as one self-contained HTML document."""
    starts, size = [0], 0
    chunks, items = list[str](), list[bytes]()
    for record in chain(data.details(), [None]):
        if record is not None:
            items.append(encode(record))
            size += len(items[-1])
        if items and (record is None or size >= _CHUNK_BYTES):
            chunks.append(_block(f"chunk-{len(starts) - 1}", b"[" + b",".join(items) + b"]"))
            starts.append(starts[-1] + len(items))
            items, size = [], 0
    own: Record = {"served": False, "starts": starts}
    return document(data.run["title"], own, served_data(data.run, data.rows), "\n".join(chunks), connect="'none'")[0]


def served_data(run: Record, rows: list[Record]) -> str:
    """Return the end of a served page: a run's record, and its first rows."""
    return "\n".join([_block("run", encode(run)), _block("rows", encode(rows))])


def _block(name: str, content: bytes) -> str:
    """Compressed data: base64 holds no ``<``, so nothing in it can end the element."""
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
    return f'<script type="application/json" id="{name}">"{packed}"</script>'


def document(title: str, config: Record, data: str = "", rest: str = "", *, connect: str) -> tuple[str, str]:
    """Return the page with its data, or a served one up to it, and its Content-Security-Policy."""
    style = re.sub(r"\s*([{};,])\s*|(?<=:) |(?<![\d.])0(?=\.\d)", r"\1", _source("page.css")).replace(";}", "}")
    script = "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    shown, title = _source("page.html"), html.escape(title)
    own = {"policy": policy, "style": style, "script": script, "config": encode(config).decode().strip()}
    parts = own | {"data": data, "rest": rest, "title": title}
    for name, text in parts.items():
        shown = shown.replace(f"{{{{{name}}}}}", text)
    return shown, policy


def _source(name: str) -> str:
    """A source file without indentation, blank lines, lines of comments, and, outside texts, spaces around signs."""
    lines = map(str.strip, (files("emailrl.page") / name).read_text(encoding="utf-8").splitlines())
    joined = "\n".join(line for line in lines if line and not line.startswith(("//", "/*")))
    texts = r"""("(?:\\.|[^"\\\n])*"|`(?:[^`$]|\$\{(?:[^`}]|`[^`]*`)*\}|\$)*`)"""
    spaces = r" ?([,:?]|[=!]?==?|=>|[<>]=?|\+=|&&|\|\||\?\?) |(?<=\{) | (?=\})|(?<=\)) (?=\{)"
    return re.sub(f"{texts}|{spaces}", lambda found: found[1] or found[2] or "", joined)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
