"""Reads and writes questions: JSONL files, and what ``datasets`` loads from a folder or the hub; each row is checked.

A row has ART-E's fields, and optionally ``split``, ``kind`` and the flags of ``Scenario``; other fields are ignored.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from emailrl.base.disk import write_out
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.hub import go_offline_if_unreachable
from emailrl.mail.sources.rows import describe
from emailrl.questions.splits import SPLITS
from emailrl.records.trajectory import Scenario, scenario_fields
from emailrl.settings import DataSettings

HUB_QUESTIONS = "corbt/enron_emails_sample_questions"
I_DONT_KNOW = "I don't know"
"""The reference answer if the mailbox does not contain the answer."""
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


def parse_row(row: Any, where: str, data: DataSettings = ART_E) -> Scenario:
    """Return one checked question; raises UsageError that begins with ``where`` and names the field."""
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: not a JSON object.", ONE_A_LINE)
    names = {name: name for name in _Row.model_fields} | {"question": data.question_field, "answer": data.answer_field}
    given = {name: row[named] for name, named in names.items() if row.get(named) is not None}
    if given.get("answerable") is False:
        given = {"answer": I_DONT_KNOW, "message_ids": []} | given
    try:
        read = _Row.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = names[str(first["loc"][0])]
        if first["type"] == "missing":
            raise UsageError(f"{where}: field {field!r} is missing.", FIELDS_HINT) from None
        reason = re.sub(r"^(?:Value error, )?\w+ should", "must", first["msg"])
        raise UsageError(f"{where}: field {field!r} {reason}, not {first['input']!a:.60}.") from None
    if not read.answerable and (read.message_ids or read.needs_all or read.answer != I_DONT_KNOW):
        raise UsageError(f"{where}: 'answerable' is false, but there is an answer or a source email.", ABSENT_HINT)
    if read.answerable and not read.message_ids:
        raise UsageError(f"{where}: field 'message_ids' must have at least one message id.")
    if read.split not in (None, *SPLITS, data.train_split):
        splits = ", ".join(dict.fromkeys((*SPLITS, data.train_split)))
        raise UsageError(f"{where}: field 'split' must be one of {splits}, not {read.split!r}.")
    return Scenario(**dict(read))


def read_jsonl(path: Path, data: DataSettings = ART_E) -> Iterator[Scenario]:
    """Yield the questions of a JSONL file; a bad row raises UsageError with file and line."""
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
                scenario = parse_row(row, where, data)
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
    """Write one question per line, atomically, and return the absolute path.

    Raises EmailRLError if the path cannot be written.
    """
    path = Path(path).absolute()
    rows = ({name: value for name, value in scenario_fields(s).items() if value is not None} for s in scenarios)
    try:
        write_out(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    except OSError as error:
        raise EmailRLError(f"Cannot write {path}: {error.strerror or error}.") from error
    return path


def read_dataset(name: str, data: DataSettings = ART_E) -> Iterator[Scenario]:
    """Yield the questions of all splits of a hub dataset, or of a local folder that ``datasets`` wrote or can load.

    Raises EmailRLError with alternatives if the hub cannot be reached, UsageError for a folder that is not a dataset
    and for invalid rows.
    """
    names = {data.train_split: data.train_split} | SPLIT_NAMES
    for split_name, rows in load_splits(name).items():
        for number, row in enumerate(rows):
            where = f"{name}[{split_name}][{number}]"
            if split_name not in names:
                raise UsageError(f"{where}: a question set has the splits train, val(idation) and test.")
            yield parse_row({**row, "split": names[split_name]}, where, data)


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
            raise UsageError(
                f"{folder} is not a folder of questions: it contains {', '.join(sorted(suffixes)) or 'no'} files.",
                "Use JSON, JSONL, CSV, Parquet or Arrow files, all of one kind, and no code or pickles.",
            )
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
