"""Groups collected from a real mailbox: identities, seeds, rewards, and one trajectory's failure kept to itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import collector_of, make_database, make_questions, settings_of
from transformers import AutoTokenizer

from emailrl.agent.play import Collector, Stage, TokenDriftError, audit
from emailrl.agent.task import MailEnvironment
from emailrl.agent.tools import tool_schemas
from emailrl.engines import build_engine
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.build import build_database
from emailrl.mail.demo import ask, make_world
from emailrl.model.policy import load_policy
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup
from emailrl.rewards.scorer import build_scorer
from emailrl.training.batch import make_samples


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SEARCH = call("search_emails", keywords=["lease"])
ANSWER = call("return_final_answer", answer="31 May 2002", sources=["<m0@x>"])
DONT_KNOW = call("return_final_answer", answer="I don't know", sources=[])


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_database(tmp_path_factory.mktemp("mail") / "mail.db")


Collect = Callable[..., tuple[list[Trajectory], Any]]


@pytest.fixture
def collect(db: Path, tmp_path: Path, renderer: ChatRenderer, scripted: Callable[..., Any]) -> Collect:
    """``collect(scripts, scenarios, group_size, **changes)`` → all trajectories, and the engine they came from."""

    def run(scripts: Any, scenarios: Sequence[Scenario], group_size: int, **changes: Any) -> Any:
        settings = settings_of(tmp_path, emailrl_db=db, max_tokens=64, max_turns=3)
        template = changes.pop("renderer", renderer)
        engine = scripted(scripts, renderer=template)
        make_environment = changes.pop("make_environment", partial(MailEnvironment, agent=settings.agent))
        play = Stage(settings.agent, db, make_environment, template).on(engine)
        scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent)
        collector = Collector(play, scorer.score, settings.agent, settings.training.mode, run_id="run")
        groups = collector.collect(scenarios, group_size, **({"step": 3, "seed": 1} | changes))
        assert [group.scenario for group in groups] == list(scenarios)
        assert all(t.group_id == group.id for group in groups for t in group.trajectories)
        return [trajectory for group in groups for trajectory in group.trajectories], engine

    return run


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
    twice = seeds([two, two], 1)  # a question that comes twice in a step is two groups
    assert list(twice) == ["train-000003-q1-0", "train-000003-q1.2-0"] and len(set(twice.values())) == 2


def test_one_failure_loses_no_other_trajectory(collect: Any) -> None:
    def fragile(scenario: Scenario, mailbox: Any) -> Any:
        if scenario.id == "q0":
            mailbox.search = None  # TypeError when the tool calls it
        return MailEnvironment(scenario, mailbox)

    ended: list[str] = []
    how = {"make_environment": fragile, "progress": lambda trajectory: ended.append(trajectory.id)}
    (broken, sound), _ = collect([SEARCH, ANSWER], make_questions(2), 1, **how)
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


@pytest.mark.parametrize(("end", "num_samples"), [("<|im_end|>", 1), ("<|endoftext|>", 3)])
def test_a_call_that_ends_with_the_sequence_unclosed_is_played_and_trained_as_it_was_sampled(
    collect: Collect, shared_data: Path, end: str, num_samples: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
    tokenizer.eos_token = end
    qwen = ChatRenderer(tokenizer, tool_schemas())
    said = [text.removesuffix("</tool_call>") for text in (SEARCH, call("read_email", message_id="<m0@x>"), ANSWER)]
    sampled = [[*qwen.tokenize(text), *qwen.tokenize(end)] for text in said]
    ([trajectory], _) = collect(said, make_questions(1), 1, renderer=qwen)
    assert (trajectory.exception, trajectory.stop_reason) == (None, StopReason.ANSWERED)
    assert [turn.tool_name for turn in trajectory.turns] == ["search_emails", "read_email", "return_final_answer"]
    assert [turn.completion_ids for turn in trajectory.turns] == sampled
    # A base model's own end of text is not the template's: each new prompt then begins a sample.
    assert len(trajectory.samples) == num_samples
    trained = [token for ids in sampled for token in ids]
    assert audit(trajectory) == len(trained)
    samples, left_out = make_samples([TrajectoryGroup("g", trajectory.scenario, [trajectory])], "sampled")
    assert not any(left_out.values())
    learnt = [t for sample in samples for t, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert learnt == trained


def test_what_the_packaged_policy_samples_with_an_adapter_is_what_the_trainer_computes(tmp_path: Path) -> None:
    world, rng = make_world(3, "train", 0), random.Random(3)
    build_database(world.emails, tmp_path / "mail.db")
    given = {"model_name": "nano", "emailrl_db": tmp_path / "mail.db", "max_tokens": 96, "max_turns": 5}
    settings = settings_of(tmp_path, temperature=0.8, **given)
    policy = load_policy(settings, trainable=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    policy.save_adapter(tmp_path / "adapter")
    engine = build_engine(settings, policy)
    engine.load_adapter(tmp_path / "adapter", "v1")
    scenarios = [ask(world, fact, rng) for fact in world.facts[:3]]
    groups = collector_of(settings, policy, engine).collect(scenarios, 2, step=1, seed=1)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert max(len(trajectory.turns) for trajectory in trajectories) > 1
    policy.model.eval()
    for trajectory in trajectories:
        assert trajectory.exception is None
        (sample,) = trajectory.samples  # the packaged template never breaks a prefix
        assert audit(trajectory) == sum(sample.loss_mask)
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, :-1].float() / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        for computed, sampled in zip(logprobs, sample.sampler_logprobs[1:], strict=True):
            assert sampled is None or sampled == pytest.approx(computed, abs=1e-4)
