"""Loads questions: a local JSONL, a folder or a hub dataset, filtered, and the split that is asked for.

A set without splits is one pool: all of it is ``test`` (with a note); for training, ``val`` is cut from its inboxes and
the rest is ``train``. A set with ``train`` but no ``val`` has it cut from the train inboxes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sqlalchemy import bindparam, exists, or_, select

from emailrl.base.errors import UsageError
from emailrl.mail.connection import opened
from emailrl.mail.schema import emails, recipients
from emailrl.questions.rows import HUB_QUESTIONS, read_dataset, read_jsonl
from emailrl.questions.splits import check_disjoint, cut_val, mixed_order
from emailrl.records.trajectory import Scenario, scenario_fields
from emailrl.settings import DataSettings

Split = Literal["train", "val", "test"]

ART_E_BAD_IDS = frozenset({"49", "101", "129", "171", "208", "266", "327"})
"""Questions of ART-E's set with known wrong answers, which its own loader also drops."""
HELD_OUT_SEED = 42
"""Draws samples of validation and test questions, so that runs with different seeds are measured on the same ones."""
_DROPPED = {
    "known_bad_id": "ART-E questions with a known wrong answer",
    "too_many_sources": "questions with more source emails than MAX_SOURCE_MAILS",
}
_NO_TRAIN = (
    " A single inbox goes entirely to test: ask gen-questions for three or more (repeat or omit --inbox), or split it "
    "by subject (gen-questions --allow-shared-inbox)."
)


@dataclass(frozen=True, slots=True)
class ScenarioSet:
    """The questions of one split."""

    scenarios: list[Scenario]
    source: str
    """The file, folder or hub name of the questions."""
    dropped: dict[str, int]
    """Number of questions left out from the entire source by reason: ``known_bad_id``, ``too_many_sources``."""
    notes: list[str]
    """Notes for every table made from these questions."""

    @property
    def fingerprint(self) -> str:
        """A hash of the questions' content that does not depend on their order."""
        return fingerprint(self.scenarios)


@dataclass(frozen=True, slots=True)
class Questions:
    """All questions of a source, from which several splits can be taken without reading it again."""

    scenarios: list[Scenario]
    source: str
    dropped: dict[str, int]
    data: DataSettings

    def of(self, split: Split | None, *, limit: int | None, seed: int, check_inboxes: bool = True) -> ScenarioSet:
        """The questions of one split, or all of them for ``split=None``.

        ``limit`` draws a sample that keeps the mix of kinds and inboxes, the same for every seed of validation and test
        questions; without it the order is the file's. ``check_inboxes=False`` is for reading a single split, with
        nothing to compare. Raises UsageError for splits that share an inbox and for an empty split.
        """
        every, source = self.scenarios, self.source
        given = self.data.allow_shared_inbox
        allow_shared = not check_inboxes or (all(s.shares_inbox for s in every) if given is None else given)
        chosen, notes = every, _dropped_notes(self.dropped)
        if split == "test" and every[0].split is None:
            notes.insert(0, "the question set has no splits: all of it is used for testing")
        elif split is not None:
            found = [check_disjoint(every, source, allow_shared=allow_shared)]
            if split == "test" or any(s.split == "val" for s in every):
                chosen = [s for s in every if s.split == split]
            elif chosen := [s for s in every if s.split in (None, "train")]:
                val, note = cut_val(chosen, self.data.eval_dataset_size, source, allow_shared=allow_shared)
                chosen = [s for s in chosen if (s.id in val) == (split == "val")]
                found.append(note)
            notes = [*filter(None, found), *notes]
        if not chosen:
            counts = Counter(scenario.split or "unsplit" for scenario in every)
            have = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
            hint = f"It has {have}." + (_NO_TRAIN if split == "train" else "")
            raise UsageError(f"{source}: no questions of split {split!r}.", hint)
        if limit is not None:
            chosen = mixed_order(chosen, seed if split in (None, "train") else HELD_OUT_SEED)[:limit]
        return ScenarioSet(chosen, source, self.dropped, notes)


def load_scenario_set(
    questions: Path | None,
    split: Split | None,
    *,
    limit: int | None,
    seed: int,
    data: DataSettings,
    check_inboxes: bool = True,
) -> ScenarioSet:
    """Read the questions of one split; see ``read_questions`` and ``Questions.of``."""
    return read_questions(questions, data).of(split, limit=limit, seed=seed, check_inboxes=check_inboxes)


def read_questions(questions: Path | None, data: DataSettings) -> Questions:
    """Read and check all questions of a JSONL file or a folder that ``datasets`` can load.

    None uses ``data.questions``, or else the hub's ART-E questions. Raises UsageError (file and line) for a bad row
    and if no question is left, EmailRLError if the hub cannot be reached.
    """
    questions = questions or data.questions
    check_exists(questions)
    source = str(questions or HUB_QUESTIONS)
    is_file = questions is not None and Path(questions).is_file()
    rows = read_jsonl(Path(source), data) if is_file else read_dataset(source, data)
    kept: list[Scenario] = []
    dropped: Counter[str] = Counter()
    for scenario in rows:
        if scenario.split is None and data.train_split != "train":
            raise UsageError(f"TRAIN_SPLIT={data.train_split}, but the questions have no splits.", "Unset it.")
        if scenario.split == "train" != data.train_split:
            continue
        is_enron = scenario.inbox_address.endswith("@enron.com")
        if scenario.id in ART_E_BAD_IDS and scenario.kind is None and is_enron:  # another file's question 49 is kept
            dropped["known_bad_id"] += 1
        elif len(scenario.message_ids) > data.max_source_mails and not scenario.needs_all:
            dropped["too_many_sources"] += 1
        else:
            kept.append(replace(scenario, split="train") if scenario.split == data.train_split else scenario)
    if not kept:
        raise UsageError(f"{source}: no questions left ({'; '.join(_dropped_notes(dropped))}).")
    return Questions(kept, source, dict(dropped), data)


def check_exists(questions: Path | None) -> None:
    """Raise UsageError if the question file does not exist; None means the hub's."""
    if questions is not None and not questions.exists():
        raise UsageError(
            f"No such question file: {questions}.",
            "Choose another with --questions, or generate one: emailrl gen-questions",
            "no-questions",
        )


def fingerprint(scenarios: Sequence[Scenario]) -> str:
    """Return a SHA-256 of the questions' content, in the order of their ids."""
    digest = hashlib.sha256()
    for scenario in sorted(scenarios, key=lambda s: (s.id, s.inbox_address)):
        digest.update(json.dumps(scenario_fields(scenario), sort_keys=True).encode())
    return digest.hexdigest()


def _dropped_notes(dropped: Mapping[str, int]) -> list[str]:
    return [f"dropped {_DROPPED[reason]}: {number}" for reason, number in dropped.items()]


MAX_NAMED = 3
"""Maximum message ids in a note."""

_STORED = select(emails.c.id).where(emails.c.message_id == bindparam("message_id"))
_RECEIVED = exists().where(recipients.c.email_id == emails.c.id, recipients.c.recipient_address == bindparam("inbox"))
_VISIBLE = _STORED.where(
    emails.c.date < bindparam("until"), or_(emails.c.from_address == bindparam("inbox"), _RECEIVED)
)


@dataclass(slots=True)
class Coverage:
    """How much of a question set a database covers."""

    missing: list[str]
    """Distinct source ids missing from the database, in the order of the questions."""
    hidden: list[str]
    """Source ids in the database, but not in the question's inbox before its date."""
    num_questions: int
    num_answerable: int
    """Number of questions whose source emails the agent can all read."""

    @property
    def answerable(self) -> float:
        """Share of answerable questions, 0 to 1."""
        return self.num_answerable / self.num_questions if self.num_questions else 0.0


def missing_ids(scenarios: Sequence[Scenario], db: Path) -> Coverage:
    """Look up the source emails of all questions.

    Raises UsageError if ``db`` is not a mail database, EmailRLError if it is damaged.
    """
    missing: dict[str, None] = {}
    hidden: dict[str, None] = {}
    num_answerable = 0
    with opened(Path(db)) as connection:
        for scenario in scenarios:
            place = {"until": scenario.query_date, "inbox": scenario.inbox_address}
            ids = [{"message_id": message_id} for message_id in scenario.message_ids]
            unseen = [each for each in ids if connection.scalar(_VISIBLE, each | place) is None]
            for each in unseen:
                is_there = connection.scalar(_STORED, each) is not None
                (hidden if is_there else missing)[each["message_id"]] = None
            num_answerable += not unseen
    return Coverage(list(missing), list(hidden), len(scenarios), num_answerable)


def coverage_notes(scenarios: Sequence[Scenario], db: Path) -> list[str]:
    """Return the coverage note for tables of these questions; raises UsageError if the database can answer none."""
    coverage = missing_ids(scenarios, db)
    if not coverage.num_answerable:
        raise UsageError(
            f"{db} contains none of the source emails of these questions.",
            "Name the database they were made from: --db FILE.",
        )
    if coverage.num_answerable == coverage.num_questions:
        return []
    causes = [
        f"{words} {', '.join(ids[:MAX_NAMED])}" + (f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else "")
        for words, ids in (("missing:", coverage.missing), ("outside the inbox or too late:", coverage.hidden))
        if ids
    ]
    return [
        f"the database can answer {coverage.num_answerable} of {coverage.num_questions} questions "
        f"({coverage.answerable:.1%}); {'; '.join(causes)}"
    ]
