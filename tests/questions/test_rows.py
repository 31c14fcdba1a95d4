"""A question file is read field by field: what is wrong is named with its file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions.questions import Row, row

from emailrl.errors import EmailRLError, UsageError
from emailrl.questions import read_jsonl, write_scenarios
from emailrl.trajectory import Scenario

Write = Callable[[list[Row]], Path]


def test_a_row_becomes_a_scenario_with_text_id_and_lower_case_inbox(question_file: Write) -> None:
    assert list(read_jsonl(question_file([row()]))) == [
        Scenario("7", "Who leads Alpha?", "Ana Roe", ["<1@x>"], "me@x.org", "2001-05-04", 0.8, None, None)
    ]


def test_a_timestamp_serves_as_a_date(question_file: Write) -> None:
    [scenario] = read_jsonl(question_file([row(query_date="2001-05-04 10:00:00")]))
    assert scenario.query_date == "2001-05-04"


@pytest.mark.parametrize("name", list(row()))
def test_a_missing_field_is_named_with_file_and_line(question_file: Write, name: str) -> None:
    broken = row(id=8)
    del broken[name]
    path = question_file([row(), broken])
    said = rf"questions\.jsonl:2: field '{name}' is missing\. A question has .*{name}.*QUESTION_FIELD and ANSWER_FIELD"
    with pytest.raises(UsageError, match=said):
        list(read_jsonl(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", True),
        ("id", 1.5),
        ("question", 3),
        ("question", "  "),
        ("question", "Who\ud83d?"),
        ("answer", ["a"]),
        ("message_ids", "<1@x>"),
        ("message_ids", []),
        ("message_ids", [1]),
        ("message_ids", ["<1@x>\udc00"]),
        ("how_realistic", "high"),
        ("how_realistic", 1.2),
        ("how_realistic", float("nan")),
        ("query_date", "May 4"),
        ("query_date", "2001-02-30"),
        ("query_date", 20010504),
        ("split", "dev"),
        ("kind", 4),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_file_and_line(question_file: Write, name: str, value: Any) -> None:
    path = question_file([row(id=1), row(id=2), row(**{"id": 3, name: value})])
    with pytest.raises(UsageError, match=rf"questions\.jsonl:3: field '{name}' must"):
        list(read_jsonl(path))


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


def test_an_id_stands_once_in_a_split(question_file: Write) -> None:
    assert len(list(read_jsonl(question_file([row(split="train"), row(split="test")])))) == 2
    with pytest.raises(UsageError, match=r":3: duplicate id '7', first used in line 1"):
        list(read_jsonl(question_file([row(), row(id=8), row(id="7")])))


def test_a_question_of_any_size_is_refused_by_its_line(question_file: Write, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r":2: line longer than 1 MiB\."):
        list(read_jsonl(question_file([row(), row(id=8, question="x" * 20_000_000)])))
    with pytest.raises(UsageError, match=r":2: field 'answer' has 100,001 characters; the limit is 100,000"):
        list(read_jsonl(question_file([row(), row(id=8, answer="x" * 100_001)])))
    assert len(list(read_jsonl(question_file([row(answer="x" * 100_000)])))) == 1


def test_split_stands_in_every_row_or_in_none(question_file: Write) -> None:
    with pytest.raises(UsageError, match=r":2: 'split' must be in every row or in none"):
        list(read_jsonl(question_file([row(split="train"), row(id=8)])))


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


def test_a_question_without_an_answer_has_no_source_and_only_i_dont_know(question_file: Write) -> None:
    absent = row(answerable=False, message_ids=[])
    del absent["answer"]
    for rows in ([absent], [absent | {"answer": "I don't know"}]):
        [scenario] = read_jsonl(question_file(rows))
        assert (scenario.answerable, scenario.answer, scenario.message_ids) == (False, "I don't know", [])
    for wrong in ({"answer": "Ana"}, {"message_ids": ["<1@x>"]}, {"needs_all": True}):
        with pytest.raises(UsageError, match=r"questions\.jsonl:1: 'answerable' is false, but"):
            list(read_jsonl(question_file([absent | wrong])))
    with pytest.raises(UsageError, match="field 'answerable' must be true or false, not 'no'"):
        list(read_jsonl(question_file([row(answerable="no")])))


def test_usual_questions_are_written_without_the_newer_fields(tmp_path: Path, question_file: Write) -> None:
    usual, absent = row(), row(id=8, answerable=False, message_ids=[], answer="I don't know")
    everything = list(read_jsonl(question_file([usual, absent, row(id=9, needs_all=True)])))
    written = write_scenarios(tmp_path / "out.jsonl", everything)
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(r.get("answerable"), r.get("needs_all")) for r in rows] == [(None, None), (False, None), (None, True)]
    assert list(read_jsonl(written)) == everything
