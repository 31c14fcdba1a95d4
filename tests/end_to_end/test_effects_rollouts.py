"""Settings that a flag of OpenRLHF comes to change the rollouts: one observation with each, one without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.effects import group, shows
from rewards.stub_scorer import StubScorer
from tiny import collector_of

from emailrl.base.errors import EmailRLError
from emailrl.engines import build_engine
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.vllm.arguments import Trainer, engine_arguments, sleeps
from emailrl.model.load import load_policy
from emailrl.questions import load_scenario_set
from emailrl.records.trajectory import Trajectory
from emailrl.rewards.custom import HttpReward
from emailrl.settings import Settings
from emailrl.training.mix import resolve
from emailrl.training.run.filtering import make_filter

MakeSettings = Callable[..., Settings]


@shows("dynamic_filtering", "filter_on", "filter_low", "filter_high")
def test_dynamic_filtering(make_settings: MakeSettings) -> None:
    def sifted(**changes: Any) -> str:
        settings = make_settings(**changes)
        played = group(rewards=[0.5, 1.0], right=[True, True])
        kept = make_filter(resolve(settings), settings.algorithm, answers=True).sift(played)
        return kept if isinstance(kept, str) else "kept"

    on = {"dynamic_filtering": True}
    assert sifted() == "kept"
    assert sifted(**on) == "group_above_range"  # every answer is right
    assert sifted(**on, filter_on="reward") == "kept"  # a mean reward of 0.75
    assert sifted(**on, filter_on="reward", filter_low=0.8) == "group_below_range"
    assert sifted(**on, filter_on="reward", filter_high=0.7) == "group_above_range"


ENVIRONMENT = """
from emailrl.agent import MailEnvironment
def shout(scenario, mailbox, settings):
    environment = MailEnvironment(scenario, mailbox, max_turns=1)
    environment.question_template = "{}!!!"
    return environment
"""


@pytest.fixture
def play(make_settings: MakeSettings) -> Callable[..., list[list[Trajectory]]]:
    """Play two questions of the workplace three times each."""

    def play(watch: Any = None, **changes: Any) -> list[list[Trajectory]]:
        """``watch`` is given the shape of the tokens of each pass through the model."""
        settings = make_settings(**changes)
        policy = load_policy(settings)
        if watch is not None:
            embedding = policy.model.get_input_embeddings()
            embedding.register_forward_pre_hook(lambda module, given: watch(tuple(given[0].shape)))
        engine = build_engine(settings, policy)
        engine.load_adapter(None, "base")
        questions = load_scenario_set(None, "train", limit=2, seed=1, data=settings.data).scenarios
        groups = collector_of(settings, policy, engine).collect(questions, 3, step=0, seed=1)
        engine.close()
        return [each.trajectories for each in groups]

    return play


def sampled(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[turn.completion_ids for each in members for turn in each.turns] for members in groups]


@shows("max_tokens", "max_model_len")
def test_how_long_what_is_sampled_may_be(play: Any) -> None:
    assert max(len(ids) for members in sampled(play()) for ids in members) == 8
    assert max(len(ids) for members in sampled(play(max_tokens=5)) for ids in members) == 5
    assert sampled(play(max_model_len=32))[0] == [[], [], []]  # no prompt fits


@shows("top_p", "top_k")
def test_how_tokens_are_drawn(play: Any) -> None:
    for greedy in {"top_k": 1}, {"top_p": 1e-6}:
        assert all(ids == members[0] for members in sampled(play(**greedy)) for ids in members)
    assert any(ids != members[0] for members in sampled(play()) for ids in members)


@shows("question_template", "chat_template")
def test_what_the_policy_is_shown(play: Any, tmp_path: Path) -> None:
    base = play()[0][0]
    assert play(question_template="Q: {}?!")[0][0].messages[1].content == f"Q: {base.messages[1].content}?!"
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}")
    bare = play(chat_template=tmp_path / "template.jinja")[0][0]
    prompts = [each.samples[0].loss_mask.index(1) for each in (base, bare)]
    assert prompts[1] < prompts[0] / 2  # roles alone, no contents


@shows("environment", "reward")
def test_what_is_played_for_which_reward(play: Any, tmp_path: Path) -> None:
    base = play()[0][0]
    (tmp_path / "shout.py").write_text(ENVIRONMENT)
    shouted = play(environment=f"{tmp_path / 'shout.py'}:shout", reward="simple")[0][0]
    assert shouted.messages[1].content == f"{base.messages[1].content}!!!"
    assert (shouted.reward_terms.keys(), base.reward_terms.keys()) == ({"outcome"}, {"share_of_even_ids"})


@shows("max_batch_trajectories", "max_tokens_per_rollout_pass")
def test_how_much_the_engine_reads_at_once(play: Any) -> None:
    def most(**changes: Any) -> tuple[int, int]:
        passes: list[tuple[int, int]] = []
        play(watch=passes.append, **changes)
        return max(rows for rows, _ in passes), max(rows * tokens for rows, tokens in passes)

    rows, tokens = most()
    assert rows == 6 and tokens > 100
    assert most(max_batch_trajectories=2)[0] == 2
    assert most(max_tokens_per_rollout_pass=64)[1] <= 64


@shows("reward_batch_size")
def test_how_many_trajectories_one_request_has(make_settings: MakeSettings) -> None:
    five = group(rewards=[0.0] * 5, right=[False] * 5).trajectories
    sizes = []
    for size in (32, 2):
        stub = StubScorer(lambda body, number: (200, json.dumps({"rewards": [1.0] * len(body["query"])})))
        HttpReward(stub.url, make_settings(reward_batch_size=size).rewards, concurrency=1).score_batch(five)
        stub.close()
        sizes += [len(body["query"]) for body in stub.requests]
    assert sizes == [5, 2, 2, 1]


@shows("engine", "vllm_urls", "model_name")
def test_which_engine_samples_from_which_model(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings()
    policy = load_policy(settings)
    assert isinstance(build_engine(settings, policy), TransformersEngine)
    assert load_policy(make_settings(model_name="nano")).base_model == "nano" != policy.base_model
    served = build_engine(make_settings(engine="vllm", vllm_urls="http://127.0.0.1:9/v1", vllm_retries=0), policy)
    assert type(served).__name__ == "VllmServers"
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    with pytest.raises(EmailRLError, match="The vllm engine is not installed"):
        build_engine(make_settings(engine="vllm"), policy)


VLLM = {
    "vllm_tensor_parallel_size": ("tensor_parallel_size", 1, 2),
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization", 0.45, 0.5),
    "vllm_enforce_eager": ("enforce_eager", False, True),
    "vllm_enable_prefix_caching": ("enable_prefix_caching", True, False),
}


@shows("vllm_enable_sleep")
def test_vllm_sleeps_as_it_is_told(make_settings: MakeSettings) -> None:
    small = Trainer(weights=1, adapter=1, activations=1)
    chosen = [make_settings(vllm_enable_sleep=value) for value in ("auto", "on", "off")]
    assert [sleeps(each.agent, each.vllm, small, 100) for each in chosen] == [False, True, False]


@shows(*VLLM)
@pytest.mark.parametrize("key", VLLM)
def test_what_vllm_is_started_with(make_settings: MakeSettings, key: str) -> None:
    argument, default, other = VLLM[key]
    for value, changes in (default, {}), (other, {key: other}):
        arguments = engine_arguments(
            make_settings(**changes), model="m", dtype="bfloat16", lora_rank=8, on_gpu=True, sleeps=True
        )
        assert arguments[argument] == value
