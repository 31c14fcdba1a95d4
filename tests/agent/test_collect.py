"""Groups collected from a real mailbox: identities, seeds, rewards, and one trajectory's failure kept to itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database, make_questions, settings_of

from emailrl.agent.play import Collector, Noted, Stage, TokenDriftError
from emailrl.agent.task import mail_agent
from emailrl.engines.base import Advance, Completion, Engine, Request, SamplingParams
from emailrl.engines.renderer import ChatRenderer
from emailrl.ranks import Activity
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import AgentSettings


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SEARCH = call("search_emails", keywords=["lease"])
ANSWER = call("return_final_answer", answer="31 May 2002", sources=["<m0@x>"])
DONT_KNOW = call("return_final_answer", answer="I don't know", sources=[])


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("mail") / "mail.db")


@pytest.fixture
def collect(
    db: Path, tmp_path: Path, renderer: ChatRenderer, scripted: Callable[..., Any]
) -> Callable[..., tuple[list[Trajectory], Any]]:
    """``collect(scripts, scenarios, group_size, **changes)`` → all trajectories, and the engine they came from."""

    def run(
        scripts: Any, scenarios: Sequence[Scenario], group_size: int, **changes: Any
    ) -> tuple[list[Trajectory], Any]:
        settings = settings_of(tmp_path, emailrl_db=db, max_tokens=64)
        engine = scripted(scripts)
        make_environment = changes.pop("make_environment", partial(mail_agent, settings.agent))
        play = Stage(settings.agent, db, make_environment, renderer).on(engine)
        scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent)
        collector = Collector(play, scorer.score, settings.agent, settings.training.mode, run_id="run")
        groups = collector.collect(scenarios, group_size, **({"step": 3, "seed": 1} | changes))
        assert [group.scenario for group in groups] == list(scenarios)
        assert all(t.group_id == group.id for group in groups for t in group.trajectories)
        return [trajectory for group in groups for trajectory in group.trajectories], engine

    return run


def test_a_group_is_played_and_scored(collect: Any) -> None:
    answered, gave_up = collect(
        lambda name: [SEARCH, ANSWER] if name.endswith("-0") else [DONT_KNOW], make_questions(1), 2
    )[0]
    assert answered.messages[3].content.startswith('[{"message_id":"<m0@x>","snippet":')
    assert (answered.rubric["answer_correct"], answered.rubric["sources_correct"]) == (True, True)
    assert answered.reward > 1 > gave_up.reward
    assert answered.reward == sum(answered.reward_terms.values())
    assert gave_up.rubric["returned_i_dont_know"]
    assert [turn.tool_name for turn in answered.turns] == ["search_emails", "return_final_answer"]


def test_trajectories_are_named_and_stamped_and_sampled_at_the_temperature_of_training(collect: Any) -> None:
    (first, second, third, fourth), engine = collect([DONT_KNOW], make_questions(2), 2)
    assert engine.requests[0].sampling.temperature == 0.7
    _, engine = collect([DONT_KNOW], make_questions(1), 1, temperature=0.0)
    assert engine.requests[0].sampling.temperature == 0.0
    assert [t.id for t in (first, second, third, fourth)] == [
        "train-000003-q0-0", "train-000003-q0-1", "train-000003-q1-0", "train-000003-q1-1",
    ]  # fmt: skip
    assert (first.group_id, first.run_id, first.step, first.mode) == ("train-000003-q0", "run", 3, "masked")
    assert (first.policy_version, first.adapter_sha256) == ("v1", "ab12")


def test_seeds_do_not_depend_on_company_or_order(collect: Any) -> None:
    def seeds(scenarios: Sequence[Scenario], size: int, **changes: Any) -> dict[str, int]:
        return {r.trajectory_id: r.seed for r in collect([DONT_KNOW], scenarios, size, **changes)[1].requests}

    one, two, three = make_questions(3)
    apart, together = seeds([two], 1), seeds([three, two, one], 4)
    assert apart["train-000003-q1-0"] == together["train-000003-q1-0"]
    assert len(set(together.values())) == 12
    assert seeds([two], 1, step=4)["train-000004-q1-0"] not in together.values()
    assert seeds([two], 1, seed=2)["train-000003-q1-0"] not in together.values()
    assert seeds([two], 1, split_label="val")["val-000003-q1-0"] not in together.values()


def test_a_question_that_comes_twice_in_a_step_is_two_groups(collect: Any) -> None:
    (question,) = make_questions(1)
    trajectories, engine = collect([DONT_KNOW], [question, question], 1)
    assert [t.group_id for t in trajectories] == ["train-000003-q0", "train-000003-q0.2"]
    assert len({request.seed for request in engine.requests}) == 2


def test_one_failure_loses_no_other_trajectory(collect: Any) -> None:
    def fragile(scenario: Scenario, mailbox: Any) -> Any:
        if scenario.id == "q0":
            mailbox.search = None  # TypeError when the tool calls it
        return mail_agent(AgentSettings(), scenario, mailbox)

    ended: list[str] = []
    broken, sound = collect(
        [SEARCH, ANSWER], make_questions(2), 1, make_environment=fragile, progress=lambda t: ended.append(t.id)
    )[0]
    assert broken.exception is not None and broken.exception.startswith("TypeError")
    assert (broken.reward, broken.reward_terms, broken.stop_reason) == (0.0, {}, StopReason.EXCEPTION)
    assert (sound.exception, sound.rubric["answer_correct"]) == (None, True)
    assert sorted(ended) == [broken.id, sound.id]


def test_drift_stops_the_collector(collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TokenSample.append_sampled

    def retokenize(self: TokenSample, ids: list[int], logprobs: list[float]) -> None:
        original(self, [ids[0] + 1, *ids[1:]], logprobs)

    monkeypatch.setattr(TokenSample, "append_sampled", retokenize)
    with pytest.raises(TokenDriftError, match="turn 0, token 0"):
        collect([DONT_KNOW], make_questions(1), 1)


class Heard(Activity):
    """Keeps what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, what: str, count: Callable[[], int] = lambda: 0) -> None:
        self.notes.append(what)

    def end(self) -> None:
        self.notes.append("")


class TwoTurns:
    """Completes each request, and its follow-ups."""

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        ended = []
        for first in requests:
            request: Request | None = first
            while request is not None:
                ended.append(Completion(request.trajectory_id, [1], [-0.5], "stop"))
                request = advance(ended[-1]) if advance else None
        return ended

    def close(self) -> None: ...


class Local(TwoTurns):
    """The same in this process."""

    steps = 0


@pytest.mark.parametrize(("engine", "sampling"), [(Local(), "sampling"), (TwoTurns(), "")])
def test_every_turn_is_progress_and_names_its_trajectory(engine: Engine, sampling: str) -> None:
    """Servers have time limits of their own: nothing is under way here while they sample."""
    activity, turns = Heard(), []

    def advance(completion: Completion) -> Request | None:
        assert activity.notes[-1] == "in the environment of train-1"
        turns.append(completion)
        return Request("train-1", SamplingParams(8)) if len(turns) < 2 else None

    ended = Noted(engine, activity).generate([Request("train-1", SamplingParams(8))], advance)
    assert ended == turns and len(turns) == 2
    assert activity.notes == [sampling, *["in the environment of train-1", sampling] * 2]
