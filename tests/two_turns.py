"""A hand-made trajectory and the tokenizer that made its ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from emailrl.records.trajectory import Message, Scenario, StopReason, TokenSample, ToolCall, Trajectory, Turn

WORDS = ["<|end|>", "Who", "Ġpaid", "<call>", "Ann", "Ġresult", "Ċ", "â", "Ĥ", "¬"]
"""Ids 0-9; the last three are the bytes of the euro sign."""


UNSEEN = {"ever_found_right_email": False, "ever_read_right_email": False}


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def trajectory() -> Trajectory:
    """Two turns: a search, then the answer. Prompt ids 1 2, turn ids 3 0, tool result ids 5 6, turn ids 4 0."""
    sample = TokenSample()
    sample.append_prompt([1, 2])
    sample.append_sampled([3, 0], [-0.25, -0.01])
    sample.append_prompt([5, 6])
    sample.append_sampled([4, 0], [-3.5, -0.5])
    search = ToolCall("search_emails", {"keywords": ["paid"]})
    answer = ToolCall("return_final_answer", {"answer": "Ann", "sources": ["<m1@x>"]})
    return Trajectory(
        id="t-7",
        group_id="g-2",
        scenario=Scenario("q1", "Who paid?", "Ann", ["<m1@x>"], "bob@example.com", "2001-05-14"),
        run_id="run",
        step=3,
        policy_version="v3",
        adapter_sha256="ab" * 32,
        messages=[
            Message("system", "You search mail."),
            Message("user", "Who paid?"),
            Message("assistant", "<call>", [search]),
            Message("tool", '[{"message_id": "<m1@x>", "snippet": "Ann <b>paid</b>"}]', name="search_emails"),
            Message("assistant", "Ann", [answer]),
        ],
        turns=[
            Turn([3, 0], [-0.25, -0.01], "stop", "search_emails", {"keywords": ["paid"]}, "[...]", 0.5),
            Turn([4, 0], [-3.5, -0.5], "stop", "return_final_answer", {"answer": "Ann"}, None, 0.25),
        ],
        samples=[sample],
        reward=1.38,
        reward_terms={"correct": 1.0, "sources": 0.3, "turns": 0.08},
        rubric={"answer_correct": True, "num_turns": 2, "sources_correct": True, **UNSEEN},
        final_answer="Ann",
        final_sources=["<m1@x>"],
        stop_reason=StopReason.ANSWERED,
        seconds=0.75,
    )
