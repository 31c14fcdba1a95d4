"""TRL's trainer in our environment: the same conversations earn the same rewards, and two steps train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documents.pages import DOCS
from tiny import make_model

from emailrl.agent.email_agent import EmailAgent
from emailrl.integrations import trl as ours
from emailrl.questions.load import write_demo
from emailrl.records.trajectory import Scenario
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import StoreSettings, load_settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The demo mailbox in the working directory, with settings in emailrl.toml."""
    write_demo(tmp_path / "mail.db", settings=StoreSettings(), seed=42, overwrite=True)
    (tmp_path / "emailrl.toml").write_text('emailrl_db = "mail.db"\nmax_turns = 4\njudge = "offline"\n')
    monkeypatch.chdir(tmp_path)
    ours._shared.cache_clear()
    yield tmp_path
    ours._shared.cache_clear()


def test_a_conversation_earns_what_it_earns_in_a_rollout(folder: Path) -> None:
    settings = load_settings()
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent)
    agent, search = EmailAgent("nano"), ours.MailSearch()
    rows = [*ours.rows("train", 6)]
    rewards = []
    for row in rows:
        scenario = Scenario(**{name: value for name, value in row.items() if name != "prompt"})
        played = agent.answer(scenario.question, scenario.inbox_address, query_date=scenario.query_date).trajectory
        played = replace(played, scenario=scenario)
        assert row["prompt"] == [{"role": m.role, "content": m.content} for m in played.messages[:2]]
        search.reset(**row)
        for message in played.messages[2:]:
            for call in message.tool_calls[:1]:
                getattr(search, call.name)(**call.arguments)
        # The sources of the question are known to the environment of training alone: count them as it does.
        rubric = {name: value for name, value in played.rubric.items() if "right_email" in name or "sources_c" in name}
        assert set(rubric.values()) == {False}
        rewards.append(search.get_reward())
        again = replace(search._trajectory, rubric=dict(search._trajectory.rubric), reward=0.0, reward_terms={})
        scorer.score([again])
        assert again.reward == rewards[-1] == sum(search._trajectory.reward_terms.values())
        assert (played.final_answer, played.stop_reason) == (search._trajectory.final_answer, again.stop_reason)
        assert "over" in search.search_emails(["lease"])
    assert len(set(rewards)) > 1
    agent.close()


@pytest.mark.slow
def test_trl_trains_two_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed (make test-clients)")
    make_model(folder / "model")
    templates = Path(trl.__file__).parent / "chat_templates"
    (folder / "model/chat_template.jinja").write_text((templates / "qwen3.jinja").read_text())
    [script] = re.findall(r"```python\n(.+?)```", (DOCS / "guides/trl.md").read_text(), re.DOTALL)
    assert "Qwen/Qwen3-0.6B" in script
    names: dict[str, Any] = {}
    exec(script.replace("Qwen/Qwen3-0.6B", "model").replace("report_to=[]", "report_to=[], use_cpu=True"), names)
    steps = [entry for entry in names["trainer"].state.log_history if "reward" in entry]
    assert len(steps) == 2 and all("rewards/MailSearch/mean" in entry for entry in steps)
