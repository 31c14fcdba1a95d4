"""A command's input files: chosen if not named, and checked before anything slow is loaded."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emailrl.base.errors import UsageError
from emailrl.base.plain import cut
from emailrl.cli.output import progress_console, say

if TYPE_CHECKING:
    from emailrl.settings import Settings

TASK: Final = {"--environment": ("agent", "environment"), "--reward": ("rewards", "reward")}
"""The settings that decide what a policy is trained to do, by option."""
LONGEST_NAME: Final = 200
"""In characters, of a name from a checkpoint's metadata, which may be a stranger's."""
MAX_FOLDERS: Final = 20_000
"""Maximum number of folders to search for trajectories: over 1,000 runs with their checkpoints; walked in seconds."""


def check_searchable(place: Path) -> None:
    """Raise UsageError for a folder too large to search, such as a home folder."""
    if sum(1 for _ in islice(os.walk(place), MAX_FOLDERS + 1)) > MAX_FOLDERS:
        raise UsageError(
            f"{place} contains more than {MAX_FOLDERS:,} folders, too many to search for a run.",
            "Name a run's folder, such as outputs/grpo_masked.",
        )


def note_runs_without_best(output_dir: Path, mode: str | None = None) -> None:
    """Print a note if ``best`` passes over newer runs."""
    from emailrl.checkpoints import runs_without_best

    if runs := runs_without_best(output_dir, mode):
        say(f"Note: runs without a complete best_model are skipped: {', '.join(map(str, runs))}")


def note_adapters(paths: Iterable[Path], settings: Settings, *, asks: bool = False) -> None:
    """Print a note on each untrained checkpoint, and one on those trained in another environment or on another reward.

    With ``asks`` they answer in the mail environment, without a reward.
    """
    from emailrl.model.adapter import untrained_note

    otherwise: dict[str, list[str]] = {}
    for path in paths:
        if note := untrained_note(path, settings.output.output_dir):
            progress_console().print(note, style="yellow", soft_wrap=True)
        if difference := _trained_otherwise(path, settings, asks=asks):
            otherwise.setdefault(difference, []).append(str(path))
    for difference, names in otherwise.items():
        say(f"Note: {' and '.join(names)} {'was' if len(names) == 1 else 'were'} trained with {difference}.")


def _trained_otherwise(path: Path, settings: Settings, *, asks: bool) -> str | None:
    """The recorded environment and reward that differ from those in use, and the latter; None without a record."""
    from emailrl.checkpoints import METADATA, SFT, read_checkpoint

    if not (path / METADATA).is_file():
        return None
    metadata, now = read_checkpoint(path).metadata, settings.public()
    recorded, used = [], []
    for option, (section, name) in TASK.items():
        if option == "--reward" and (asks or metadata.mode == SFT):
            continue
        new = "mail" if asks else str(now[section][name])
        old = cut(str(metadata.settings.get(section, {}).get(name, new)), LONGEST_NAME)
        if old != new:
            recorded.append(f"{option} {shlex.quote(old)}")
            used.append(f"{option} {shlex.quote(new)}")
    if not recorded:
        return None
    return f"{' '.join(recorded)}; this command uses {'the mail environment' if asks else ' '.join(used)}"


def check_inputs(settings: Settings) -> None:
    """Raise EmailRLError for a missing database, UsageError for a missing question file."""
    from emailrl.mail.connection import no_database
    from emailrl.questions.load import check_exists

    if not settings.store.db.is_file():
        raise no_database(settings.store.db)
    check_exists(settings.data.questions)


def with_inputs(settings: Settings) -> Settings:
    """Choose the questions and print the choice (``with_questions``); raises like ``check_inputs`` too."""
    from emailrl.questions.beside import with_questions

    check_inputs(settings)
    data, chosen = with_questions(settings.data, settings.store.db)
    if chosen is not None:
        say(chosen)
    return settings.model_copy(update={"data": data})
