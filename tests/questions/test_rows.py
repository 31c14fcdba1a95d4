"""A question file is read field by field: what is wrong is named with its file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions.questions import Row, row

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.questions import read_jsonl, write_scenarios
from emailrl.records.trajectory import Scenario

Write = Callable[[list[Row]], Path]


def test_a_row_becomes_a_scenario_with_text_id_and_lower_case_inbox(question_file: Write) -> None:
    assert list(read_jsonl(question_file([row()]))) == [
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
        (b"", r"the question file is empty"),
        (b"\n \n", r"the question file is empty"),
    ],
)
def test_a_file_that_is_no_question_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        list(read_jsonl(path))


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row()).encode())
    assert [s.id for s in read_jsonl(path)] == ["7"]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    scenarios = [
        Scenario("a", "Wer war’s?\u2028", "Jürgen", ["<1@x>", "<2@x>"], "me@x.org", "2001-05-04", 0.5, "val", "sender"),
        Scenario("b", "Q", "A", ["<3@x>"], "you@x.org", "2001-05-05", 1.0, "test"),
    ]
    path = write_scenarios(tmp_path / "new" / "q.jsonl", scenarios)
    assert list(read_jsonl(path)) == scenarios
    assert [p.name for p in path.parent.iterdir()] == ["q.jsonl"]
    assert "kind" not in json.loads(path.read_text(encoding="utf-8").splitlines()[-1])


def test_an_unwritable_path_is_one_clear_error_and_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(EmailRLError, match=r"Cannot write .*file/q\.jsonl"):
        write_scenarios(tmp_path / "file" / "q.jsonl", [])

    def interrupted() -> Any:
        yield Scenario("a", "Q", "A", ["<1@x>"], "me@x.org", "2001-05-04")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_scenarios(tmp_path / "file", interrupted())
    assert (tmp_path / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_usual_questions_are_written_without_the_newer_fields(tmp_path: Path, question_file: Write) -> None:
    usual, absent = row(), row(id=8, answerable=False, message_ids=[], answer="I don't know")
    everything = list(read_jsonl(question_file([usual, absent, row(id=9, needs_all=True)])))
    written = write_scenarios(tmp_path / "out.jsonl", everything)
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(r.get("answerable"), r.get("needs_all")) for r in rows] == [(None, None), (False, None), (None, True)]
    assert list(read_jsonl(written)) == everything
