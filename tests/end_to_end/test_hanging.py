"""Environments that hang while servers sample: the run ends in bounded time, and says in which environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stub import VllmStub
from ranks.processes import in_ranks

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import list_checkpoints
from emailrl.engines.base import Completion
from emailrl.engines.vllm.replica import read_completion
from emailrl.ranks import Place
from emailrl.settings import Settings, load_settings
from emailrl.training.loop import train
from emailrl.training.team import follow

HANGING = """
import time
from pathlib import Path

from emailrl.agent import MailEnvironment


class Hanging(MailEnvironment):
    def __init__(self, scenario, mailbox, settings):
        super().__init__(scenario, mailbox, max_turns=2)

    def step(self, message):
        if Path(__file__).with_name("hang").exists():
            time.sleep(3600)
        return super().step(message)
"""
"""Hangs in the first turn, while a file says so."""


def stopped(*given: Any) -> Completion:
    """As if the policy had ended its turn, so that the environment takes one."""
    completion = read_completion(*given)
    completion.finish_reason = "stop"
    return completion


@pytest.fixture
def settings(
    options: Callable[..., dict[str, Any]], stub: VllmStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Settings]:
    """Settings of a run whose environments hang from the start."""
    monkeypatch.setattr("emailrl.engines.vllm.servers.read_completion", stopped)
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "hang").touch()

    def make(**changes: Any) -> Settings:
        given = {"engine": "vllm", "vllm_urls": stub.url, "environment": f"{tmp_path / 'hanging.py'}:Hanging"}
        limits = {"rank_timeout": 4, "rank_start_timeout": 60, "vllm_return_timeout": 0}
        return load_settings(options(tmp_path, **given | limits | changes), environ={}, cwd=tmp_path)

    return make


def test_ahead_of_the_trainer(settings: Callable[..., Settings], tmp_path: Path) -> None:
    (tmp_path / "hang").unlink()

    def hang_after_the_evaluation(line: str) -> None:
        if "Model saved to" in line:
            (tmp_path / "hang").touch()

    begun = time.monotonic()
    with pytest.raises(EmailRLError, match=r"step 1 made no progress for 4 s: in the environment of train-000001-"):
        train(settings(max_steps=2), progress=hang_after_the_evaluation)
    assert time.monotonic() - begun < 50


def test_while_the_other_ranks_wait(settings: Callable[..., Settings], tmp_path: Path) -> None:
    def run() -> None:
        train(settings(max_staleness=0)) if Place.here().rank == 0 else follow(
            settings().training, settings().model.device
        )

    zero, one = in_ranks(2, run, tmp_path)
    expected = "Rollouts on rank 0 of 2 made no progress for 4 s: in the environment of val-000000-"
    assert isinstance(zero, EmailRLError) and zero.message.startswith(expected) and one is None
    assert list_checkpoints(tmp_path / "grpo_masked") == []  # nothing was evaluated or learned
