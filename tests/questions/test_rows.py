"""A question file or folder is read field by field: what is wrong is named with its place; nothing of it is run."""

from __future__ import annotations

import json
import pickle
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions.questions import Row, row

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.questions.load import Questions, Split, read_jsonl, read_questions, write_scenarios
from emailrl.records.trajectory import Scenario
from emailrl.settings import DataSettings

Write = Callable[[list[Row]], Path]


def test_a_row_becomes_a_scenario_with_text_id_and_lower_case_inbox(question_file: Write) -> None:
    path = question_file([row()])
    path.write_bytes(BOM_UTF8 + path.read_bytes())  # no error
    assert list(read_jsonl(path)) == [
        Scenario("7", "Who leads Alpha?", "Ana Roe", ["<1@x>"], "me@x.org", "2001-05-04", 0.8, None, None)
    ]


WRONG: dict[str, list[Any]] = {
    "id": [True, 1.5],
    "question": [3, "  ", "Who\ud83d?"],
    "answer": [["a"], "x" * 100_001],
    "message_ids": ["<1@x>", [], [1], ["<1@x>\udc00"]],
    "how_realistic": ["high", 1.2, float("nan"), True],
    "query_date": ["May 4", "2001-02-30", 20010504, "2001-05-041"],
    "split": ["dev"],
    "kind": [4],
    "answerable": ["no"],
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({name: None}, f":3: field '{name}' is missing. .*{name}.*QUESTION_FIELD and ANSWER_FIELD")
            for name in row()
        ),
        *(({name: bad}, f":3: field '{name}' must") for name, values in WRONG.items() for bad in values),
        ({"answerable": False, "message_ids": []}, ":3: 'answerable' is false, but"),
        ({"answerable": False, "answer": "I don't know"}, ":3: 'answerable' is false, but"),
        ({"answerable": False, "answer": None, "message_ids": [], "needs_all": True}, ":3: 'answerable' is false, but"),
        ({"question": "x" * 20_000_000}, r":3: line longer than 1 MiB\."),
        ({"split": "train"}, ":3: 'split' must be in every row or in none"),
        ({"id": "1"}, ":3: duplicate id '1', first used in line 1"),
    ],
    ids=lambda value: f"{value!r:.40}" if isinstance(value, dict) else "",
)
def test_a_bad_row_is_named_with_file_line_and_field(question_file: Write, changes: Row, said: str) -> None:
    path = question_file([row(id=1), row(id=2), row(id=3, **changes) if "id" not in changes else row(**changes)])
    with pytest.raises(UsageError, match=said):
        list(read_jsonl(path))


def test_rows_that_are_read(question_file: Write) -> None:
    absent = row(id=9, answerable=False, message_ids=[])
    del absent["answer"]
    rows = [
        row(query_date="2001-05-04 10:00:00", answer="x" * 100_000),
        row(id=8, other=3, split=None, kind=None),
        absent,
        absent | {"id": 10, "answer": "I don't know"},
    ]
    read = list(read_jsonl(question_file(rows)))
    assert read[0].query_date == "2001-05-04"
    assert [(s.answerable, s.answer, s.message_ids) for s in read[2:]] == [(False, "I don't know", [])] * 2
    assert len(list(read_jsonl(question_file([row(split="train"), row(split="test")])))) == 2  # an id in either


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": 1\n', r":1: not JSON"),
        (b"[" * 100_000 + b"\n", r":1: not JSON"),
        (b"\n\n[1]\n", r":3: not a JSON object"),
        (b"\xff\xfe\n", r":1: not JSON"),
        (b"\n \n", r"the question file is empty"),
    ],
)
def test_a_file_that_is_no_question_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        list(read_jsonl(path))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    place = ("me@x.org", "2001-05-04", 0.5, "val")
    scenarios = [
        Scenario("a", "Wer war’s?\u2028", "Jürgen", ["<1@x>", "<2@x>"], *place, "sender"),
        Scenario("b", "Q", "A", ["<3@x>"], *place, needs_all=True),
        Scenario("c", "Q", "I don't know", [], *place, answerable=False),
    ]
    path = write_scenarios(tmp_path / "new" / "q.jsonl", scenarios)
    assert list(read_jsonl(path)) == scenarios
    assert [p.name for p in path.parent.iterdir()] == ["q.jsonl"]
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    newer = [{name: r[name] for name in ("kind", "answerable", "needs_all", "shares_inbox") if name in r} for r in rows]
    assert newer == [{"kind": "sender"}, {"needs_all": True}, {"answerable": False}]  # only where they are unusual


def test_an_unwritable_path_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(EmailRLError, match=r"Cannot write .*file/q\.jsonl"):
        write_scenarios(tmp_path / "file" / "q.jsonl", [])


# -- as ``datasets`` keeps them: a local folder, and no network


def read(folder: Path | None, split: Split | None = None) -> Questions:
    return read_questions(folder, DataSettings()).of(split, limit=None, seed=1)


@pytest.mark.parametrize("way", ["save_to_disk", "parquet"])
def test_a_folder_as_datasets_saves_it_or_as_the_hub_has_it(tmp_path: Path, way: str) -> None:
    from datasets import Dataset, DatasetDict

    train = [row(id=n, inbox_address=f"{'ab'[n % 2]}@enron.com") for n in (48, 49, 50, 51)]
    test = [row(id=60, inbox_address="c@enron.com")]
    test.append(test[0] | {"id": 61, "message_ids": ["<1>", "<2>"]})
    published = DatasetDict({"train": Dataset.from_list(train), "test": Dataset.from_list(test)})
    folder = tmp_path / "set"
    if way == "save_to_disk":
        published.save_to_disk(folder)
    else:
        for name, split in published.items():
            split.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    assert [s.id for s in read(folder, "test").scenarios] == ["60"]
    assert read(folder, "test").dropped == {"known_bad_id": 1, "too_many_sources": 1}
    val, train_part = read(folder, "val").scenarios, read(folder, "train").scenarios
    assert sorted(s.id for s in train_part + val) == ["48", "50", "51"]
    assert not {s.inbox_address for s in train_part} & {s.inbox_address for s in val}


def test_a_folder_of_something_else_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("hello\n")
    with pytest.raises(UsageError, match=r"it contains \.txt files"):
        read(tmp_path / "folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a folder of questions"):
        read(tmp_path / "empty")


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("name", ["pandas", "json"])
def test_a_folder_named_like_a_reader_runs_no_pickle_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.pkl").write_bytes(pickle.dumps(_Bomb(tmp_path / "RAN")))
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    chosen = read(Path(name))
    assert [scenario.id for scenario in chosen.scenarios] == ["7"]
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("code", ["train.pkl", "folder.py", "test.PICKLE"])
def test_a_folder_that_holds_code_is_refused(tmp_path: Path, code: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    (folder / code).write_bytes(pickle.dumps(_Bomb(tmp_path / "RAN")))
    with pytest.raises(UsageError, match=r"is not a folder of questions: it contains .* files\. ") as raised:
        read(folder)
    assert "no code or pickles" in raised.value.hint and not (tmp_path / "RAN").exists()


def test_the_card_of_a_folder_does_not_choose_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(row(id=8)) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {tmp_path / 'elsewhere.jsonl'}\n---\n"
    (tmp_path / "folder" / "README.md").write_text(card)
    chosen = read(tmp_path / "folder")
    assert [scenario.id for scenario in chosen.scenarios] == ["7"]


def test_without_a_network_the_error_names_the_alternatives() -> None:
    with pytest.raises(EmailRLError) as raised:
        read(None, "test")
    assert raised.value.exit_code == 1
    assert "the hub cannot be reached" in raised.value.message and "--questions FILE" in raised.value.hint
