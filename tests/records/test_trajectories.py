"""Trajectories and metrics on disk: the exact line, torn lines, bad lines, truncation for a resume."""

from __future__ import annotations

import json
import math
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emailrl.base.errors import EmailRLError
from emailrl.records import (
    JsonlWriter,
    TrajectoryWriter,
    encode,
    lines,
    read_records,
    read_trajectories,
    trajectory_to_dict,
    write_trajectories,
)
from emailrl.records.trajectory import (
    Message,
    MetricsWriter,
    Scenario,
    StopReason,
    TokenSample,
    ToolCall,
    Trajectory,
    Turn,
    trajectory_in_line,
)

SCENARIO = Scenario("q1", "Which room?", "B12", ["<a@x>"], "ann@x.com", "2001-05-02", split="train")


def make_trajectory(**changes: object) -> Trajectory:
    call = ToolCall("search_emails", {"keywords": ["room"]})
    fields: dict[str, object] = {
        "id": "s3-q1-0", "group_id": "s3-q1", "scenario": SCENARIO, "run_id": "run", "step": 3,
        "policy_version": "v-000002", "adapter_sha256": "ab" * 32,
        "messages": [
            Message("system", "You search mail."),
            Message("user", "Which room?"),
            Message("assistant", "<tool_call>…</tool_call>", [call]),
            Message("tool", "[]", name="search_emails"),
        ],
        "turns": [Turn([7, 8], [-0.5, -0.25], "stop", "search_emails", {"keywords": ["room"]}, "[]", 0.5, 0.001, 3, 2)],
        "samples": [TokenSample([1, 2, 3, 7, 8, 4], [0, 0, 0, 1, 1, 0], [None, None, None, -0.5, -0.25, None])],
        "reward": 0.2,
        "reward_terms": {"found": 0.1, "no_invalid_id": 0.1},
        "rubric": {"answer_correct": False, "num_turns": 1},
        "stop_reason": StopReason.RAN_OUT_OF_TURNS, "seconds": 0.75,
    }  # fmt: skip
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


def test_a_trajectory_line_holds_the_contract_literally() -> None:
    record = trajectory_to_dict(make_trajectory())
    assert json.loads(json.dumps(record)) == {
        "id": "s3-q1-0", "group_id": "s3-q1", "run_id": "run", "step": 3, "mode": "masked",
        "policy_version": "v-000002", "adapter_sha256": "ab" * 32,
        "scenario": {
            "id": "q1", "question": "Which room?", "answer": "B12", "message_ids": ["<a@x>"],
            "inbox_address": "ann@x.com", "query_date": "2001-05-02", "how_realistic": 1.0, "split": "train",
            "kind": None,
        },
        "messages": [
            {"role": "system", "content": "You search mail."},
            {"role": "user", "content": "Which room?"},
            {"role": "assistant", "content": "<tool_call>…</tool_call>",
             "tool_calls": [{"name": "search_emails", "arguments": {"keywords": ["room"]}}]},
            {"role": "tool", "content": "[]", "name": "search_emails"},
        ],
        "turns": [{
            "completion_ids": [7, 8], "logprobs": [-0.5, -0.25], "finish_reason": "stop",
            "tool_name": "search_emails", "tool_args": {"keywords": ["room"]}, "tool_result": "[]",
            "seconds": 0.5, "tool_seconds": 0.001, "prompt_tokens": 3, "completion_tokens": 2,
            "thinking_tokens": None, "cost": None, "policy_version": "", "adapter_sha256": None,
        }],
        "token_ids": [1, 2, 3, 7, 8, 4], "loss_mask": [0, 0, 0, 1, 1, 0],
        "sampler_logprobs": [None, None, None, -0.5, -0.25, None],
        "reward": 0.2, "reward_terms": {"found": 0.1, "no_invalid_id": 0.1},
        "rubric": {"answer_correct": False, "num_turns": 1}, "final_answer": None, "final_sources": [],
        "stop_reason": "ran_out_of_turns", "seconds": 0.75, "exception": None,
    }  # fmt: skip


def test_a_broken_trajectory_has_samples_instead_of_the_three_lists() -> None:
    parts = [TokenSample([1, 7], [0, 1], [None, -1.5]), TokenSample([1, 9], [0, 1], [None, -2.5])]
    record = trajectory_to_dict(make_trajectory(samples=parts))
    assert record["samples"] == [
        {"token_ids": [1, 7], "loss_mask": [0, 1], "sampler_logprobs": [None, -1.5]},
        {"token_ids": [1, 9], "loss_mask": [0, 1], "sampler_logprobs": [None, -2.5]},
    ]
    assert not {"token_ids", "loss_mask", "sampler_logprobs"} & set(record)
    assert read(record).samples == parts


def read(record: dict[str, Any]) -> Trajectory:
    return trajectory_in_line(Path("t.jsonl"), 1, json.dumps(record).encode())


@pytest.mark.parametrize("changes", [{}, {"samples": []}, {"stop_reason": None, "exception": "OSError: disk"}])
def test_what_is_written_is_read_back_equal(tmp_path: Path, changes: dict[str, object]) -> None:
    trajectory = make_trajectory(**changes)
    with closing(TrajectoryWriter(tmp_path / "a.jsonl")) as writer:
        writer.append(trajectory)
    write_trajectories(tmp_path / "b.jsonl", [trajectory])
    assert list(read_trajectories(tmp_path / "a.jsonl")) == [trajectory]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_mail_text_of_any_kind_stays_on_one_line(tmp_path: Path) -> None:
    text = "a\nb\r\u2028\x00\x1b[31m\ud800 é"
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [make_trajectory(messages=[Message("tool", text)])])
    assert path.read_bytes().count(b"\n") == 1
    assert next(iter(read_trajectories(path))).messages[0].content == text


@given(cut=st.integers(0, 32))
def test_a_line_torn_anywhere_is_dropped_and_the_others_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "m.jsonl"
    last = json.dumps({"step": 2, "loss": 0.123456789})
    whole = '{"step":1}\n' + (f"{last}\n" if cut == len(last) else "")
    path.write_text('{"step":1}\n' + last[:cut])  # whole, if only its newline is missing
    assert list(read_records(path)) == [json.loads(line) for line in whole.splitlines()]
    with closing(JsonlWriter(path)) as writer:
        writer.write({"step": 3})
    assert path.read_text() == whole + '{"step":3}\n'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{broken", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b'\xff\xfe{"step":1}', r"not UTF-8 \(byte 0xff at position 1\)"),  # no UTF-16, whatever it begins with
        ('{"step":1}'.encode("utf-16"), r"not UTF-8 \(byte 0xff at position 1\)"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n\n' + line + b'\n{"step":2}\n')
    with pytest.raises(EmailRLError, match=complaint) as caught:
        list(read_records(path))
    assert f"{path}, line 3" in caught.value.message


WRONG: list[tuple[str, object, str, str]] = [
    ("id", 7, "id", "7"),
    ("step", True, "step", "true"),
    ("step", 10**20, "step", "100000000000000000000"),
    ("reward", None, "reward", "null"),
    ("reward", math.nan, "reward", "NaN"),
    ("reward", 10**400, "reward", "1000000000000000000000000000000000000000…"),
    ("reward_terms", {"found": "0.1"}, "reward_terms.found", '"0.1"'),
    ("rubric", [], "rubric", "a list"),
    ("rubric", {"prompt_tokens": "many"}, "rubric.prompt_tokens", '"many"'),
    ("scenario", {"id": "q1"}, "scenario.question is missing", ""),
    ("scenario.mood", 1, "scenario.mood is not a known field", ""),
    ("messages.1", "hello", "messages[1]", '"hello"'),
    ("messages.2.tool_calls.0.arguments", "x", "messages[2].tool_calls[0].arguments", '"x"'),
    ("turns.0.completion_ids", [7, -1], "turns[0].completion_ids[1]", "-1"),
    ("turns.0.logprobs", [True, -0.25], "turns[0].logprobs[0]", "true"),
    ("token_ids", [[1], 2, 3, 7, 8, 4], "token_ids[0]", "a list"),
    ("loss_mask", [0, 0, 0, 1, 2, 0], "loss_mask[4]", "2"),
    ("loss_mask", [1], "token_ids, loss_mask and sampler_logprobs differ in length", ""),
    ("sampler_logprobs", [None] * 5 + [math.inf], "sampler_logprobs[5]", "Infinity"),
    ("samples", [{"token_ids": [1], "loss_mask": [0]}], "samples[0].token_ids, loss_mask and sampler", ""),
    ("stop_reason", "tired", "stop_reason", '"tired"'),
    ("stop_reason", {}, "stop_reason", "an object"),
]
"""A field's place, a wrong value, the path by which the error names the field, and how it shows the value."""


def with_field(path: str, value: object) -> dict[str, Any]:
    """The record of a trajectory with another value at a path of names and numbers."""
    record: dict[str, Any] = json.loads(json.dumps(trajectory_to_dict(make_trajectory())))
    *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node: Any = record
    for part in outer:
        node = node[part]
    node[last] = value
    return record


@pytest.mark.parametrize(("path", "value", "named", "found"), WRONG)
def test_a_wrong_field_is_named_with_its_path_and_what_it_holds(
    tmp_path: Path, path: str, value: object, named: str, found: str
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f"\n{json.dumps(with_field(path, value))}\n")
    with pytest.raises(EmailRLError) as caught:
        list(read_trajectories(file))
    assert caught.value.message.startswith(f"{file}, line 2: not a trajectory ({named}")
    assert caught.value.message.endswith(f", not {found})." if found else ").")


def test_a_missing_field_is_named() -> None:
    record = trajectory_to_dict(make_trajectory())
    for name in record.keys() - {"final_answer", "final_sources", "exception"}:
        with pytest.raises(EmailRLError, match=rf"\({name} is missing\)"):
            read({key: value for key, value in record.items() if key != name})


def test_logprobs_whose_sum_is_infinite_are_read() -> None:
    record = with_field("sampler_logprobs", [1e308, 1e308, None, 0, -1, None])
    assert read(record).samples[0].sampler_logprobs[:2] == [1e308, 1e308]


def test_metrics_beyond_the_resumed_step_are_removed_and_the_rest_left_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.10}\n{"step": 2}\n{"step": 3}\n{"st')
    with closing(MetricsWriter(path, after_step=2)) as metrics:
        metrics.write({"step": 3, "loss": float("nan"), "deep": {"list": [float("inf"), 1.0]}})
    assert path.read_text() == (
        '{"step": 1, "loss": 0.10}\n{"step": 2}\n{"step":3,"loss":null,"deep":{"list":[null,1.0]}}\n'
    )


def test_a_metrics_line_whose_step_is_no_number_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":null}\n')
    with pytest.raises(EmailRLError, match=r"metrics\.jsonl: the step None is not a whole number"):
        MetricsWriter(path, after_step=1)


VALUES: list[Any] = [
    0, -1, 2**63, 10**40, True, None, 0.1, -0.0, 1e-5, 5e-324, 1e16, 123456789.123,
    "", "\x00\x7f\n\t\"\\", "é 😀 \u2028", [1, [2.5, None]], {"a": {"": []}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_back(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the standard library, which takes five times as long: 5 ms for a trajectory of 3,800 tokens."""
    with monkeypatch.context() as patch:
        patch.setattr(lines.json, "dumps", None)
        written = encode({"value": value})
    assert written.count(b"\n") == 1 and repr(json.loads(written)) == repr({"value": value})


def test_what_has_no_form_of_its_own_is_written_by_the_standard_library() -> None:
    assert encode({"a": "x\ud800y", "b": float("nan")}) == b'{"a":"x\\ud800y","b":null}\n'
    deep = reduce(lambda inner, _: [inner], range(600), 1.5)
    assert json.loads(encode({"deep": deep})) == {"deep": deep}
    assert encode({"a": float("inf"), "b": (1, float("nan"))}) == b'{"a":null,"b":[1,null]}\n'
    with pytest.raises(TypeError):
        encode({"a": object()})
