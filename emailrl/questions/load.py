"""Loads and writes questions: a JSONL, a folder or a hub dataset; checked, filtered, and the split that is asked for.
Without a name, a command's questions are those next to the database, as the demo has, else ART-E's for Enron's email.

A row has ART-E's fields, and optionally ``split``, ``kind`` and the flags of ``Scenario``; other fields are ignored.
A set without splits is one pool: all of it is ``test`` (with a note); for training, ``val`` is cut from its inboxes and
the rest is ``train``. A set with ``train`` but no ``val`` has it cut from the train inboxes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError
from sqlalchemy import bindparam, exists, or_, select

from emailrl.base.disk import not_a_file, write_out
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.hub import go_offline_if_unreachable
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.database import addresses, emails, opened, recipients
from emailrl.mail.demo import demo_emails, demo_questions
from emailrl.mail.sources.rows import describe
from emailrl.questions.splits import SPLITS, check_disjoint, cut_val, mixed_order
from emailrl.records.trajectory import Scenario, scenario_fields
from emailrl.settings import DataSettings, StoreSettings

HUB_QUESTIONS = "corbt/enron_emails_sample_questions"
I_DONT_KNOW = "I don't know"  # The reference answer if the mailbox does not contain the answer.
NO_ANSWER = "-"  # stands in while a row without an answer is checked
ONE_A_LINE = "A question file has one JSON object per line."
FIELDS_HINT = (
    "A question has id, question, answer, message_ids, how_realistic, inbox_address and query_date; QUESTION_FIELD and "
    "ANSWER_FIELD name the fields to read as question and answer."
)
ABSENT_HINT = 'Such a question has no message_ids, and its only answer is "I don\'t know".'
MOST_LINE_BYTES = 1 << 20
MOST_CHARACTERS = 100_000
"""Maximum characters of a field: far more than any question or answer has, and still readable by a model."""
READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The reader in ``datasets`` for each file type that a folder of questions may contain."""
CODE = frozenset({".py", ".pkl", ".pickle"})
SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "test": "test"}
ART_E = DataSettings()


def _day(value: Any) -> str:
    """A date or timestamp as ``YYYY-MM-DD``."""
    text = value.isoformat() if isinstance(value, date) else value.strip() if isinstance(value, str) else ""
    try:
        if text[10:11] not in ("", "T", " "):
            raise ValueError(text)
        return date.fromisoformat(text[:10]).isoformat()
    except ValueError:
        raise ValueError("Input should be YYYY-MM-DD") from None


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("Input should not be empty")
    return text


Text = Annotated[str, Field(max_length=MOST_CHARACTERS), AfterValidator(_not_blank)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: Annotated[Text | int, AfterValidator(str)]
    question: Text
    answer: Text
    message_ids: Annotated[list[Text], Strict(False)]
    inbox_address: Annotated[Text, AfterValidator(lambda address: address.strip().lower())]
    query_date: Annotated[str, BeforeValidator(_day)]
    how_realistic: Annotated[float, Field(ge=0, le=1)]
    split: str | None = None
    kind: str | None = None
    answerable: bool = True
    needs_all: bool = False
    shares_inbox: bool = False
    twins: Annotated[list[Text], Strict(False)] = []


def parse_row(row: Any, where: str, data: DataSettings = ART_E, *, unanswered: bool = False) -> Scenario:
    """Return one checked question; raises UsageError that begins with ``where`` and names the field. ``unanswered``: it
    may lack the answer, which is then empty, and with it the sources."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: not a JSON object.", ONE_A_LINE)
    names = {name: name for name in _Row.model_fields} | {"question": data.question_field, "answer": data.answer_field}
    given = {name: row[named] for name, named in names.items() if row.get(named) is not None}
    if given.get("answerable") is False:
        given = {"answer": I_DONT_KNOW, "message_ids": []} | given
    has_none = unanswered and not str(given.get("answer", "")).strip()
    if has_none:
        given = {"message_ids": [], "how_realistic": 1.0} | given | {"answer": NO_ANSWER}
    try:
        read = _Row.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = names[str(first["loc"][0])]
        if first["type"] == "missing":
            raise UsageError(f"{where}: field {field!r} is missing.", FIELDS_HINT) from None
        reason = re.sub(r"^(?:Value error, )?\w+ should", "must", first["msg"])
        raise UsageError(f"{where}: field {field!r} {reason}, not {first['input']!a:.60}.") from None
    if not read.answerable and (read.message_ids or read.twins or read.needs_all or read.answer != I_DONT_KNOW):
        raise UsageError(f"{where}: 'answerable' is false, but there is an answer or a source email.", ABSENT_HINT)
    if has_none:
        read.answer = ""
    elif read.answerable and not read.message_ids:
        raise UsageError(f"{where}: field 'message_ids' must have at least one message id.")
    if read.split not in (None, *SPLITS, data.train_split):
        splits = ", ".join(dict.fromkeys((*SPLITS, data.train_split)))
        raise UsageError(f"{where}: field 'split' must be one of {splits}, not {read.split!r}.")
    return Scenario(**dict(read))


def read_jsonl(path: Path, data: DataSettings = ART_E, *, unanswered: bool = False) -> Iterator[Scenario]:
    """Yield the questions of a JSONL file; a bad row (``parse_row``) raises UsageError with file and line."""
    lines: dict[tuple[str | None, str], int] = {}
    first_split: str | None = None
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(iter(lambda: handle.readline(MOST_LINE_BYTES + 1), b""), 1):
                where = f"{path}:{number}"
                if len(line) > MOST_LINE_BYTES:
                    raise UsageError(f"{where}: line longer than {MOST_LINE_BYTES >> 20} MiB.", ONE_A_LINE)
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.removeprefix(BOM_UTF8).decode())
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{where}: not JSON ({error}).", ONE_A_LINE) from error
                scenario = parse_row(row, where, data, unanswered=unanswered)
                if not lines:
                    first_split = scenario.split
                elif (scenario.split is None) != (first_split is None):
                    raise UsageError(f"{where}: 'split' must be in every row or in none.")
                earlier = lines.setdefault((scenario.split, scenario.id), number)
                if earlier != number:
                    raise UsageError(f"{where}: duplicate id {scenario.id!r}, first used in line {earlier}.")
                yield scenario
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not lines:
        raise UsageError(f"{path}: the question file is empty.")


def write_scenarios(path: Path, scenarios: Iterable[Scenario]) -> Path:
    """Write one question per line, atomically, and return the absolute path; raises EmailRLError."""
    path = Path(path).absolute()
    rows = ({name: value for name, value in scenario_fields(s).items() if value is not None} for s in scenarios)
    try:
        write_out(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    except OSError as error:
        raise EmailRLError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path


def read_dataset(name: str, data: DataSettings = ART_E, *, unanswered: bool = False) -> Iterator[Scenario]:
    """Yield the questions of all splits of a hub dataset, or of a local folder that ``datasets`` wrote or can load.
    Raises EmailRLError with alternatives if the hub cannot be reached, UsageError for other folders and invalid
    rows."""
    names = {data.train_split: data.train_split} | SPLIT_NAMES
    for split_name, rows in load_splits(name).items():
        for number, row in enumerate(rows):
            where = f"{name}[{split_name}][{number}]"
            if split_name not in names:
                raise UsageError(f"{where}: a question set has the splits train, val(idation) and test.")
            yield parse_row({**row, "split": names[split_name]}, where, data, unanswered=unanswered)


def load_splits(name: str) -> Any:
    """The rows of a dataset by split; of a folder only pure data, as other formats execute code in a file."""
    folder = Path(name).absolute()
    is_folder = folder.is_dir()
    if not is_folder:
        go_offline_if_unreachable()
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    try:
        if not is_folder:
            return datasets.load_dataset(name)
        if any((folder / marker).exists() for marker in ("dataset_dict.json", "dataset_info.json")):
            loaded = datasets.load_from_disk(str(folder))
            return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
        suffixes = {Path(file).suffix.lower() for files in found.values() for file in files}
        suffixes |= CODE & {file.suffix.lower() for file in folder.iterdir()}
        readers = {READERS[suffix] for suffix in suffixes if suffix in READERS}
        if len(readers) != 1 or suffixes & CODE:
            what = f"{folder} is not a folder of questions: it contains {', '.join(sorted(suffixes)) or 'no'} files."
            hint = "Use JSON, JSONL, CSV, Parquet or Arrow files, all of one kind, and no code or pickles."
            raise UsageError(what, hint)
        kept = {str(split): [f for f in files if Path(f).suffix.lower() in READERS] for split, files in found.items()}
        # The reader is named and the files are given: `load_dataset(folder)` would let the folder choose both.
        return datasets.load_dataset(readers.pop(), data_files={split: files for split, files in kept.items() if files})
    except EmailRLError:
        raise
    except Exception as error:  # datasets propagates any error of its readers and HTTP client
        if is_folder:
            message = f"{folder} is not a folder of questions that datasets can load: {describe(error)}."
            raise UsageError(message) from error
        raise EmailRLError(
            f"The questions {name} could not be loaded from the hub: {describe(error)}.",
            "Name a local file or folder with --questions FILE, or generate one: emailrl gen-questions. "
            "HF_HUB_OFFLINE=0 waits for a slow network.",
        ) from error


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
class Questions:
    """All questions of a source, from which several splits can be taken without reading it again, or those of one."""

    scenarios: list[Scenario]
    source: str  # The file, folder or hub name of the questions.
    dropped: dict[str, int]
    """Number of questions left out from the entire source by reason: ``known_bad_id``, ``too_many_sources``."""
    data: DataSettings
    notes: list[str]  # Notes for every table made from these questions.

    def answered(self) -> Questions:
        """Those with a reference answer; raises UsageError if there are none."""
        if not (kept := [scenario for scenario in self.scenarios if scenario.answer]):
            raise UsageError(f"{self.source}: no question has an answer to compare with.", "Name others (--questions).")
        return replace(self, scenarios=kept)

    def of(self, split: Split | None, *, limit: int | None, seed: int, check_inboxes: bool = True) -> Questions:
        """The questions of one split, or all of them for ``split=None``. ``limit`` draws a sample that keeps the mix of
        kinds and inboxes, the same for every seed of validation and test questions; without it the order is the file's.
        ``check_inboxes=False`` is for reading a single split, with nothing to compare. UsageError for shared inboxes or
        none."""
        every, source = self.scenarios, self.source
        given = self.data.allow_shared_inbox
        allow_shared = not check_inboxes or (all(s.shares_inbox for s in every) if given is None else given)
        chosen, notes = every, [*self.notes]
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
        return replace(self, scenarios=chosen, notes=notes)


def read_questions(questions: Path | None, data: DataSettings, *, unanswered: bool = False) -> Questions:
    """Read and check all questions of a JSONL file or a folder that ``datasets`` can load. None uses
    ``data.questions``, or else the hub's ART-E questions. ``unanswered`` allows questions without answers. Raises
    UsageError (file and line) for a bad row and if no question is left, EmailRLError if the hub cannot be reached."""
    questions = questions or data.questions
    check_exists(questions)
    source = str(questions or HUB_QUESTIONS)
    is_file = questions is not None and Path(questions).is_file()
    read = partial(read_jsonl, Path(source)) if is_file else partial(read_dataset, source)
    rows = read(data, unanswered=unanswered)
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
    notes = [f"dropped {_DROPPED[reason]}: {number}" for reason, number in dropped.items()]
    if not kept:
        raise UsageError(f"{source}: no questions left ({'; '.join(notes)}).")
    return Questions(kept, source, dict(dropped), data, notes)


def check_exists(questions: Path | None) -> None:
    """Raise UsageError if there is no question file or folder; None means the hub's."""
    if questions is not None and not (questions.is_file() or questions.is_dir()):
        hint = "Choose another with --questions, or generate one: emailrl gen-questions"
        raise UsageError(f"No such question file: {questions}.", hint, "no-questions")


def fingerprint(scenarios: Sequence[Scenario]) -> str:
    """Return a SHA-256 of the questions' content, in the order of their ids."""
    digest = hashlib.sha256()
    for scenario in sorted(scenarios, key=lambda s: (s.id, s.inbox_address)):
        digest.update(json.dumps(scenario_fields(scenario), sort_keys=True).encode())
    return digest.hexdigest()


MAX_NAMED = 3  # Maximum message ids in a note.

_STORED = select(emails.c.id).where(emails.c.message_id == bindparam("message_id"))
_RECEIVED = exists().where(recipients.c.email_id == emails.c.id, recipients.c.recipient_address == bindparam("inbox"))
_VISIBLE = _STORED.where(emails.c.date < bindparam("end"), or_(emails.c.from_address == bindparam("inbox"), _RECEIVED))


def missing_ids(scenarios: Sequence[Scenario], db: Path) -> tuple[list[str], list[str], int]:
    """The questions' source ids that the database lacks; those not in the question's inbox before its date; and how
    many questions have sources that the agent can all read. Raises EmailRLError if ``db`` cannot be read."""
    missing: dict[str, None] = {}
    hidden: dict[str, None] = {}
    num_answerable = 0
    with opened(Path(db)) as connection:
        for scenario in scenarios:
            place = {"end": scenario.query_date, "inbox": scenario.inbox_address}
            ids = [{"message_id": message_id} for message_id in scenario.message_ids]
            unseen = [each for each in ids if connection.scalar(_VISIBLE, each | place) is None]
            for each in unseen:
                is_there = connection.scalar(_STORED, each) is not None
                (hidden if is_there else missing)[each["message_id"]] = None
            num_answerable += not unseen
    return list(missing), list(hidden), num_answerable


def coverage_notes(scenarios: Sequence[Scenario], db: Path) -> list[str]:
    """Return the coverage note for tables of these questions; raises UsageError if the database can answer none."""
    missing, hidden, num_answerable = missing_ids(scenarios, db)
    if not num_answerable:
        hint = "Name the database they were made from (--db), or other questions (--questions)."
        raise UsageError(f"{db} contains none of the source emails of these questions.", hint)
    if num_answerable == len(scenarios):
        return []
    causes = [
        f"{words} {', '.join(ids[:MAX_NAMED])}" + (f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else "")
        for words, ids in (("missing:", missing), ("outside the inbox or too late:", hidden))
        if ids
    ]
    return [
        f"the database can answer {num_answerable} of {len(scenarios)} questions "
        f"({num_answerable / len(scenarios):.1%}); {'; '.join(causes)}"
    ]


def questions_file(db: Path) -> Path:
    """The default path of a database's questions: ``mail.db`` → ``mail_questions.jsonl``; or of its target."""
    beside = db.with_name(f"{db.stem}_questions.jsonl")
    if db.is_symlink() and not os.path.lexists(beside):
        real = Path(os.path.realpath(db))
        return real.with_name(f"{real.stem}_questions.jsonl")
    return beside


def with_questions(data: DataSettings, db: Path) -> tuple[DataSettings, str | None]:
    """The settings with a database's default questions, and a line naming them; None if questions are already set.
    Raises UsageError if it has none, EmailRLError if the hub cannot be reached."""
    if data.questions is not None:
        return data, None
    beside = questions_file(db)
    if what := not_a_file(beside):
        raise UsageError(f"{beside} is {what}.", "Remove it, or pass --questions.")
    if beside.is_file():
        return data.model_copy(update={"questions": beside}), f"Questions: {beside} (next to the database)"
    if not has_enron_email(db):
        hint = "Generate some (emailrl gen-questions), or name a file with --questions."
        raise UsageError(f"No questions are named, and {db} has none next to it ({beside.name}).", hint)
    load_splits(HUB_QUESTIONS)  # into the hub's cache
    return data, f"Questions: {HUB_QUESTIONS}, from the hub"


def has_enron_email(db: Path) -> bool:
    """Whether a database has an Enron address: only then can it answer ART-E's questions."""
    with opened(db) as connection:
        return connection.scalar(select(addresses).where(addresses.c.address.like("%@enron.com"))) is not None


def has_only_demo_email(db: Path) -> bool:
    """Whether a database contains only demo email: all its message ids are six digits, as no mail program writes."""
    with opened(db) as connection:
        return connection.scalar(select(emails).where(~emails.c.message_id.regexp_match("^<[0-9]{6}>$"))) is None


def write_demo(
    db: Path,
    *,
    settings: StoreSettings,
    seed: int,
    overwrite: bool = False,
    append: bool = False,
    limit: int | None = None,
) -> BuildReport:
    """Build the demo database for a seed, and write the questions that its emails answer next to it. Raises the errors
    of ``build_database``, and UsageError if questions are there, unless ``overwrite``."""
    beside = questions_file(db)
    if what := not_a_file(beside):
        raise UsageError(f"{beside} is {what}.", "Remove it.")
    if beside.exists() and not overwrite and (append or not db.exists()):  # a database is refused by build_database
        raise UsageError(f"{beside} already exists.", "Move it away, or replace it and the database with --overwrite.")
    report = build_database(demo_emails(seed), db, settings=settings, overwrite=overwrite, append=append, limit=limit)
    questions = demo_questions(seed)
    lost = set(missing_ids(questions, report.db)[0])
    write_scenarios(questions_file(report.db), [q for q in questions if lost.isdisjoint(q.message_ids)])
    return report
