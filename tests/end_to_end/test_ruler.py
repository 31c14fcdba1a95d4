"""RULER and --max-cost through the command line: nano on the demo mailbox, a stub for the judge, or for the policy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from end_to_end.commands import begin, exit_code
from engines.chat_server import ANSWER, SEARCH, StubServer, said
from questions.llm.chat_stub import ChatStub

from emailrl.base.http import _event_loop
from emailrl.questions.load import write_demo
from emailrl.records import read_records, read_trajectories
from emailrl.settings import StoreSettings, trust_folder

PRICE = 0.25
SETTINGS = """\
emailrl_db = "mail.db"
max_turns = 3
max_tokens = 96
judge = "offline"
wandb_mode = "disabled"
rollout_concurrency = 1
num_generations = 3
per_device_train_batch_size = 2
temperature = 1.2
"""
TRAIN = ("train", "--model", "nano", "--reward", "ruler", "--max-steps", "2", "--eval-size", "3", "--eval-steps", "2")


def judge(body: dict[str, Any], number: int) -> tuple[int, str]:
    """Prefers longer attempts; the first judgment of all cannot be read, however often it is asked for."""
    attempts = json.loads(body["messages"][1]["content"])["attempts"]
    scores = {name: {"why": "", "score": len(json.dumps(each)) / 100_000} for name, each in attempts.items()}
    return 200, "No." if number <= 4 else json.dumps(scores)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo mailbox; ``bare.jsonl`` has its questions, those of train without answers and sources."""
    write_demo(tmp_path / "mail.db", settings=StoreSettings(), seed=42, overwrite=True)
    rows = list(read_records(tmp_path / "mail_questions.jsonl"))
    bare = [row | {"answer": None, "message_ids": []} if row["split"] == "train" else row for row in rows]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    (tmp_path / "none.jsonl").write_text("".join(json.dumps(row | {"answer": ""}) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def paid_judge(folder: Path, waits: list[float]) -> Iterator[ChatStub]:
    with closing(ChatStub(judge, usage={"prompt_tokens": 9, "completion_tokens": 9, "cost": PRICE})) as stub:
        settle(folder, f'judge_base_url = "{stub.url}"')
        yield stub


def settle(folder: Path, line: str) -> None:
    (folder / "emailrl.toml").write_text(SETTINGS + line)
    trust_folder(folder)


def emailrl(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    (folder / "output.txt").unlink(missing_ok=True)
    _event_loop.cache_clear()  # a forked child has no thread for its parent's
    code = exit_code(begin(folder, *arguments))
    return code, (folder / "output.txt").read_text()


def test_two_steps_on_questions_without_answers(folder: Path, paid_judge: ChatStub) -> None:
    code, told = emailrl(folder, *TRAIN, "--questions", "bare.jsonl", "--max-cost", "100")
    assert code == 0 and re.search(r"^mail goes to 127.0.0.1:\d+: ruler$", told, re.MULTILINE), told
    assert "accuracy on 3 validation questions with answers" in told
    assert f"The judge cost ${PRICE * len(paid_judge.requests):.4g}." in told
    run = folder / "outputs/grpo_masked"
    steps = list(read_records(run / "metrics.jsonl"))
    assert [step["dropped"]["groups_unscored"] for step in steps] == [1, 0]
    assert [step["accuracy"] for step in steps] == [None, None] and steps[1]["eval_num_questions"] == 3
    first, second = (list(read_trajectories(run / f"trajectories/step-00000{n}.jsonl")) for n in (1, 2))
    assert sum(each.exception is not None for each in first) == 3  # of six: never a reward of 0
    assert {each.exception[:11] for each in first if each.exception} == {"JudgeError:"}
    for each in second:
        assert each.scenario.answer == "" and each.exception is None
        assert each.reward_terms == {"ruler": each.reward} and 0 < each.reward < 1
    groups: dict[tuple[str, str], set[float]] = {}
    for each in second:
        groups.setdefault((each.group_id, json.dumps([m.content for m in each.messages])), set()).add(each.reward)
    assert all(len(rewards) == 1 for rewards in groups.values())  # equal trajectories, equal rewards
    # Evaluations go by answers: 1 or 0.
    assert {each.reward for each in read_trajectories(run / "trajectories/eval-000002.jsonl")} <= {0.0, 1.0}


def test_the_bound_stops_training_with_the_last_step_saved(folder: Path, paid_judge: ChatStub) -> None:
    options = (*TRAIN, "--questions", "none.jsonl")
    code, told = emailrl(
        folder, *options, "--max-cost", str(5.5 * PRICE)
    )  # 4 for the unreadable reply, 1, and in step 2, where a group is all equal, none
    assert code == 1 and "nothing is evaluated" in told, told
    assert told.splitlines()[-1].startswith("error: --max-cost 1.375 was reached: 5 requests cost $1.25. Use --resume")
    run = folder / "outputs/grpo_masked"
    assert [step["step"] for step in read_records(run / "metrics.jsonl")] == [1] and (run / "checkpoint-1").is_dir()
    code, told = emailrl(folder, "train", "--resume", "latest")
    assert code == 0, told
    assert len(paid_judge.requests) == 5 + 1
    assert [step["step"] for step in read_records(run / "metrics.jsonl")] == [1, 2]
    assert (run / "final").is_dir() and not (run / "best_model").exists()


def test_what_ruler_cannot_compare_is_refused(folder: Path, paid_judge: ChatStub) -> None:
    for arguments in (
        (*TRAIN, "--num-generations", "1"),
        (*TRAIN, "--mode", "simple"),
        ("rollout", "--model", "nano", "--reward", "ruler"),
    ):
        code, told = emailrl(folder, *arguments, "--questions", "mail_questions.jsonl")
        assert code == 2 and "compare" in told and "the rollouts of one question" in told, told
    code, told = emailrl(folder, "benchmark", "--model", "nano", "--reward", "ruler", "--questions", "none.jsonl")
    assert code == 2 and "no question has an answer" in told
    assert not paid_judge.requests


@pytest.mark.parametrize("command", ["rollout", "benchmark"])
def test_the_bound_stops_a_chat_engine_with_what_has_ended_saved(folder: Path, command: str) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "cost": PRICE}

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, said(None, ANSWER if len(body["messages"]) > 2 else SEARCH, usage=usage)

    with closing(StubServer(reply)) as stub:
        settle(folder, f'openai_base_url = "{stub.url}"\nquestions = "mail_questions.jsonl"')
        file = {"rollout": "out.jsonl", "benchmark": "out/trajectories/00-org-big.jsonl"}[command]
        out = "out.jsonl" if command == "rollout" else "out"
        options = (command, "--engine", "openai", "--model", "org/big", "--limit", "4", "--out", out)
        code, told = emailrl(
            folder, *options, "--max-cost", str(5 * PRICE)
        )  # two conversations of two turns, and a turn
        assert code == 1 and len(stub.requests) == 5, told
        assert told.splitlines()[-1].startswith("error: --max-cost 1.25 was reached: 5 requests cost $1.25."), told
        assert len(list(read_trajectories(folder / file))) == 2 and "2 " in told and "saved in" in told
        code, told = emailrl(folder, *options, "--resume")
        assert code == 0 and len(stub.requests) == 5 + 4, told
        played = list(read_trajectories(folder / file))
        assert len(played) == 4 and all(each.turns[0].cost == PRICE and each.reward_terms for each in played)
