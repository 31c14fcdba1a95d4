"""Builds a page's data: the run's record, and a row and the full detail of each trajectory, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from emailrl.base.errors import UsageError
from emailrl.page.locate import has_numbers
from emailrl.page.place import (
    Place,
    file_record,
    run_record,
    source_of,
    trajectories_of,
)
from emailrl.page.shapes import detail, rows
from emailrl.page.tokens import TokenTexts, fitting_tokenizer, tokenizer_folders
from emailrl.records import Entry, Record, TrainingNote, TrajectoryIndex, training_notes
from emailrl.records.trajectory import Trajectory

MAX_TRAJECTORIES = 10_000
MAX_TOKENS = 6_000_000
"""Page limits; a page at the limit is about 60 MB."""


@dataclass(slots=True)
class PageData:
    """A page's data; ``details`` yields one record per row, in order."""

    run: Record
    rows: list[Record]
    details: Callable[[], Iterator[Record]]


@dataclass(frozen=True, slots=True)
class _Kept:
    file: Path
    trajectories: list[tuple[Trajectory, Entry]]
    notes: dict[str, TrainingNote]


def gather(place: Place, *, model_name: str, max_trajectories: int = MAX_TRAJECTORIES) -> PageData:
    """Read the files of a place; data over the budget is left out and listed in ``run["left_out"]``.

    ``model_name``'s tokenizer is tried last. Raises ``UsageError`` if there is no trajectory.
    """
    kept, files, left_out = _read(place, max_trajectories)
    if not any(item.trajectories for item in kept) and not (place.index is None and has_numbers(place.folder)):
        why = left_out or [f"{place.root} holds no complete trajectory yet"]
        raise UsageError(f"{why[0]}.", "Wait for the run, or name another file.")
    tokens = _tokenizers(kept, model_name)
    run = run_record(place, files)
    run["left_out"] += left_out
    if unreadable := [file.name for file, texts in tokens.items() if texts is None]:
        run["notes"] += [f"No tokenizer was found for {_several(unreadable)}: token ids are shown instead of text."]

    def details() -> Iterator[Record]:
        for item in kept:
            for each, _ in item.trajectories:
                yield detail(each, note=item.notes.get(each.id), tokens=tokens.get(item.file))

    shown = [rows(item.file, [entry for _, entry in item.trajectories], item.notes) for item in kept]
    return PageData(run, [*chain.from_iterable(shown)], details)


def _read(place: Place, max_trajectories: int) -> tuple[list[_Kept], list[Record], list[str]]:
    """The files' trajectories in the place's order, within the budget."""
    kept: dict[Path, _Kept] = {}
    records: dict[Path, Record] = {}
    cut: list[str] = []
    count = tokens = 0
    for file in _by_importance(place.files):
        if count >= max_trajectories or tokens >= MAX_TOKENS:
            records[file] = file_record(file, None, 0) | {"left_out": True}
            continue
        index = TrajectoryIndex(file)
        found = trajectories_of(index, place.index)
        if place.index is not None and len(index) > 1:
            cut.append(f"{len(index) - 1} of the {len(index)} trajectories in {file.name}")
        cut += index.complaints
        if count + len(found) > max_trajectories:
            cut.append(f"{count + len(found) - max_trajectories} of the {len(found)} trajectories in {file.name}")
            found = found[: max_trajectories - count]
        count += len(found)
        tokens += sum(len(sample.token_ids) for each, _ in found for sample in each.samples)
        notes, complaints = training_notes(file)
        cut += complaints
        kept[file] = _Kept(file, found, notes)
        records[file] = file_record(file, found[0][0] if found else None, len(found))
    if skipped := [file.name for file in place.files if file not in kept]:
        cut.append(f"{_several(skipped)} ({len(skipped)} of {len(place.files)} files)")
    return [kept[file] for file in place.files if file in kept], [records[file] for file in place.files], cut


def _by_importance(files: tuple[Path, ...]) -> list[Path]:
    """The first and last evaluation, then all other files, newest first."""
    evaluations = [file for file in files if source_of(file) == "eval"]
    return list(dict.fromkeys([*evaluations[:1], *evaluations[-1:], *reversed(files)]))


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _tokenizers(kept: list[_Kept], model_name: str) -> dict[Path, TokenTexts | None]:
    """The tokenizer of each file with tokens, or None; reuses the previous one if it fits, as loading is slow."""
    found: dict[Path, TokenTexts | None] = {}
    known: TokenTexts | None = None
    for item in kept:
        first = next((each for each, _ in item.trajectories if any(turn.completion_ids for turn in each.turns)), None)
        if first is None:
            continue
        if not (known and known.fits(first)):
            known = fitting_tokenizer(tokenizer_folders(item.file, model_name), first)
        found[item.file] = known
    return found
