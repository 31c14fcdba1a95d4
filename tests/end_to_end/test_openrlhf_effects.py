"""Every setting that a flag of OpenRLHF comes to changes what emailrl does: one observation with it, one without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training.updaters import PAID, make_updater, samples

from emailrl.checkpoints import list_checkpoints
from emailrl.engines import build_engine
from emailrl.engines.transformers_engine import TransformersEngine
from emailrl.engines.vllm_arguments import engine_arguments
from emailrl.errors import EmailRLError, UsageError
from emailrl.openrlhf import FLAGS
from emailrl.policy.load import load_policy
from emailrl.recording import read_records
from emailrl.rewards import http_reward
from emailrl.rollout.collect import build_collector
from emailrl.scenarios import load_scenario_set, read_jsonl
from emailrl.settings import Settings, trust_folder
from emailrl.sft.searching import conversations
from emailrl.training.loop import train
from emailrl.training.mix import resolve
from emailrl.training.run import tracking
from emailrl.training.run.assemble import _total_steps, _training_scorer
from emailrl.training.run.filtering import make_filter
from emailrl.training.run.modes import MODES
from emailrl.training.run.tracking import Tracker, start_wandb
from emailrl.trajectory import Scenario, Trajectory, TrajectoryGroup, Turn

MakeSettings = Callable[..., Settings]
SHOWN: set[str] = set()
"""Settings with a test in this module."""


def shows(*keys: str) -> Callable[[Any], Any]:
    """Note which settings a test shows the effect of."""
    SHOWN.update(keys)
    return lambda test: test


# -- the update: two steps on four samples of a tiny model ------------------------------------------------------------

PPO = {"algorithm": "ppo"}
ROUGH = {"update_epochs": 3, "learning_rate": 5e-2}
"""Updates large enough that ratios leave the clip range."""

UPDATES: dict[str, tuple[dict[str, Any], Any]] = {
    "learning_rate": ({}, 2e-2),
    "critic_learning_rate": (PPO, 1e-2),
    "lr_scheduler": ({"max_steps": 3}, "linear"),
    "min_lr_ratio": ({"max_steps": 3, "lr_scheduler": "linear"}, 0.5),
    "warmup_ratio": ({"max_steps": 10}, 0.5),
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "weight_decay": ({}, 0.5),
    "max_grad_norm": ({}, 1e-3),
    "num_mini_batches": ({}, 2),
    "update_epochs": ({}, 2),
    "seed": ({}, 7),
    "beta": ({}, 0.1),
    "kl_target": ({"beta": 0.1}, 1e-3),
    "kl_horizon": ({"beta": 0.1, "kl_target": 1e-3}, 10),
    "kl_in": ({"beta": 0.1}, "reward"),
    "kl_estimator": ({"beta": 0.1}, "k1"),
    "algorithm": ({}, "dr_grpo"),
    "whiten_advantages": ({}, True),
    "loss_aggregation": ({}, "sequence_mean"),
    "clip_low": (ROUGH, 0.0),
    "clip_high": (ROUGH, 0.0),
    "dual_clip": (ROUGH, 1.001),
    "value_clip": (PPO | {"update_epochs": 3, "critic_learning_rate": 0.1}, 1e-4),
    "gamma": (PPO, 0.5),
    "gae_lambda": (PPO, 0.5),
    "ratio_level": ({"update_epochs": 2}, "sequence"),
    "entropy_coef": ({}, 0.1),
    "importance_correction": ({}, "tis"),
    "correction_low": ({"importance_correction": "icepop"}, 1.0),
    "correction_high": ({"importance_correction": "icepop"}, 1.0),
    "temperature": ({}, 1.0),
    "lora_alpha": ({}, 64),
    "lora_dropout": ({}, 0.5),
    "dtype": ({}, "bf16"),
}
"""Setting → the settings around it, and a value for it that its default is not."""


def updated(model: Path, **changes: Any) -> list[torch.Tensor]:
    """The trained weights after two steps, and the weight of the KL."""
    updater = make_updater(model, **changes)
    for step in (1, 2):
        updater.train(samples(), PAID, step=step)
    return [*(parameter.detach().float() for parameter in updater.parameters), torch.tensor(updater.kl.coef)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_same_settings_give_the_same_update(tiny_model: Path) -> None:
    """Without this the differences below would show nothing."""
    for around in ({}, PPO, ROUGH):
        assert same(updated(tiny_model, **around), updated(tiny_model, **around))


@shows(*UPDATES)
@pytest.mark.parametrize("key", UPDATES)
def test_the_update_depends_on(tiny_model: Path, key: str) -> None:
    around, value = UPDATES[key]
    assert not same(updated(tiny_model, **around), updated(tiny_model, **around | {key: value}))


@shows("lora_rank", "target_modules", "max_rows_per_micro_batch", "max_tokens_per_micro_batch", "packing")
@shows("gradient_checkpointing", "attn_implementation", "load_in_4bit")
def test_the_model_and_its_batches(tiny_model: Path) -> None:
    plain = make_updater(tiny_model)
    assert {min(parameter.shape) for parameter in plain.parameters} == {4}
    assert {min(parameter.shape) for parameter in make_updater(tiny_model, lora_rank=8).parameters} == {8}
    assert all("q_proj" in name for name in make_updater(tiny_model, target_modules="q_proj").names)
    assert not all("q_proj" in name for name in plain.names)
    for cap, expected in (
        ({}, [4]),
        ({"max_rows_per_micro_batch": 3}, [2, 2]),
        ({"max_tokens_per_micro_batch": 14}, None),
    ):
        batches = make_updater(tiny_model, **cap).scorer.micro_batches(samples())
        rows = [len(batch.indices) for batch in batches]
        assert rows == expected if expected else len(rows) >= 3
    assert plain.policy.packs and not make_updater(tiny_model, packing=False).policy.packs
    assert not plain.policy.model.is_gradient_checkpointing
    assert make_updater(tiny_model, gradient_checkpointing="on").policy.model.is_gradient_checkpointing
    for wanted in "eager", "sdpa":
        model = make_updater(tiny_model, attn_implementation=wanted, packing=False).policy.model
        assert model.config._attn_implementation == wanted
    with pytest.raises(EmailRLError, match="LOAD_IN_4BIT needs a CUDA GPU"):
        make_updater(tiny_model, load_in_4bit=True)


@shows("num_train_epochs", "max_steps", "per_device_train_batch_size")
def test_how_long_a_run_is(make_settings: MakeSettings) -> None:
    rollout = MODES["rollout"]
    many = {"max_steps": 100, "num_train_epochs": 2}
    assert _total_steps(make_settings(**many), rollout, 10) == 10  # 10 questions / 2 a step x 2
    assert _total_steps(make_settings(**many | {"num_train_epochs": 3}), rollout, 10) == 15
    assert _total_steps(make_settings(**many | {"max_steps": 7}), rollout, 10) == 7
    assert _total_steps(make_settings(**many | {"per_device_train_batch_size": 5}), rollout, 10) == 4


@shows("reward_clip_low", "reward_clip_high")
def test_rewards_are_clipped(tiny_model: Path) -> None:
    free = updated(tiny_model)
    assert not same(free, updated(tiny_model, reward_clip_low=-0.1))
    assert not same(free, updated(tiny_model, reward_clip_high=0.1))
    assert same(free, updated(tiny_model, reward_clip_low=-10, reward_clip_high=10))


# -- which rollouts, and what they are worth ---------------------------------------------------------------------------


def group(*, rewards: list[float], right: list[bool]) -> TrajectoryGroup:
    scenario = Scenario("q", "?", "!", [], "a@x", "2001-01-01")
    members = [
        Trajectory(str(n), "g", scenario, reward=reward, rubric={"answer_correct": correct})
        for n, (reward, correct) in enumerate(zip(rewards, right, strict=True))
    ]
    return TrajectoryGroup("g", scenario, members)


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


@shows("overlong_buffer", "overlong_penalty")
def test_long_completions_are_charged(make_settings: MakeSettings) -> None:
    def charge(**changes: Any) -> float | None:
        settings = make_settings(reward="simple", **changes)  # 8 tokens at most
        played = group(rewards=[0.0], right=[False]).trajectories[0]
        played.turns = [Turn([1] * 7, [0.0] * 7, "stop")]
        _training_scorer(settings, MODES["masked"], resolve(settings)).score([played])
        return played.reward_terms.get("overlong")

    assert charge() is None
    assert charge(overlong_buffer=4) == -0.75  # 7 tokens: 3 of the 4 before the limit
    assert charge(overlong_buffer=4, overlong_penalty=2.0) == -1.5


# -- rollouts ----------------------------------------------------------------------------------------------------------

ENVIRONMENT = """
from emailrl.environment import MailEnvironment
def shout(scenario, mailbox, settings):
    environment = MailEnvironment(scenario, mailbox, max_turns=1)
    environment.question_template = "{}!!!"
    return environment
"""


@pytest.fixture
def play(make_settings: MakeSettings) -> Callable[..., list[list[Trajectory]]]:
    """Play two questions of the workplace three times each."""

    def play(**changes: Any) -> list[list[Trajectory]]:
        settings = make_settings(**changes)
        policy = load_policy(settings)
        engine = build_engine(settings, policy)
        engine.load_adapter(None, "base")
        questions = load_scenario_set(None, "train", limit=2, seed=1, data=settings.data).scenarios
        groups = build_collector(settings, policy, engine).collect(questions, 3, step=0, seed=1)
        engine.close()
        return [each.trajectories for each in groups]

    return play


def sampled(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[turn.completion_ids for each in members for turn in each.turns] for members in groups]


@shows("max_tokens", "top_p", "top_k", "max_model_len", "question_template", "chat_template", "environment", "reward")
def test_what_is_sampled_and_shown(play: Any, make_settings: MakeSettings, tmp_path: Path, workplace: Path) -> None:
    base = play()
    lengths = {len(ids) for members in sampled(base) for ids in members}
    assert max(lengths) == 8 and max(len(ids) for members in sampled(play(max_tokens=5)) for ids in members) == 5
    for greedy in {"top_k": 1}, {"top_p": 1e-6}:
        assert all(ids == members[0] for members in sampled(play(**greedy)) for ids in members)
    assert any(ids != members[0] for members in sampled(base) for ids in members)
    assert sampled(play(max_model_len=32))[0] == [[], [], []]  # no prompt fits
    question = base[0][0].messages[1].content
    assert play(question_template="Q: {}?!")[0][0].messages[1].content == f"Q: {question}?!"
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}")
    [bare, *_] = play(chat_template=tmp_path / "template.jinja")[0]
    prompts = [each.samples[0].loss_mask.index(1) for each in (base[0][0], bare)]
    assert prompts[1] < prompts[0] / 2  # roles alone, no contents
    (tmp_path / "shout.py").write_text(ENVIRONMENT)
    [shouted, *_] = play(environment=f"{tmp_path / 'shout.py'}:shout", reward="simple")[0]
    assert shouted.messages[1].content == f"{question}!!!"
    assert (shouted.reward_terms.keys(), base[0][0].reward_terms.keys()) == ({"outcome"}, {"share_of_even_ids"})


@shows("max_batch_trajectories", "max_tokens_per_rollout_pass")
def test_how_much_the_engine_reads_at_once(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, int]] = []
    inputs = TransformersEngine._inputs

    def counted(self: Any, rows: Any, ids: list[list[int]], *, fills: bool) -> Any:
        if fills:
            passes.append((len(self._schedule.running), len(ids) * len(ids[0])))
        return inputs(self, rows, ids, fills=fills)

    monkeypatch.setattr(TransformersEngine, "_inputs", counted)

    def most(**changes: Any) -> tuple[int, int]:
        passes.clear()
        play(**changes)
        return max(rows for rows, _ in passes), max(tokens for _, tokens in passes)

    rows, tokens = most()
    assert rows == 6 and tokens > 100
    assert most(max_batch_trajectories=2)[0] == 2
    assert most(max_tokens_per_rollout_pass=64)[1] <= 64


@shows("reward_batch_size")
def test_how_many_trajectories_one_request_has(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def scored(self: Any, batch: Any) -> list[dict[str, float]]:
        sizes.append(len(batch))
        return [{"x": 1.0}] * len(batch)

    monkeypatch.setattr(http_reward.HttpReward, "_score", scored)
    five = group(rewards=[0.0] * 5, right=[False] * 5).trajectories
    for size in (32, 2):
        settings = make_settings(reward_batch_size=size).rewards
        http_reward.HttpReward("http://h/", settings, concurrency=1).score_batch(five)
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
    with pytest.raises(EmailRLError, match="The engine vllm is not installed"):
        build_engine(make_settings(engine="vllm"), policy)


VLLM = {
    "vllm_tensor_parallel_size": ("tensor_parallel_size", 1, 2),
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization", 0.45, 0.5),
    "vllm_enforce_eager": ("enforce_eager", False, True),
    "vllm_enable_prefix_caching": ("enable_prefix_caching", True, False),
    "vllm_enable_sleep": ("enable_sleep_mode", True, False),
}


@shows(*VLLM)
@pytest.mark.parametrize("key", VLLM)
def test_what_vllm_is_started_with(make_settings: MakeSettings, key: str) -> None:
    argument, default, other = VLLM[key]
    for value, changes in (default, {}), (other, {key: other}):
        arguments = engine_arguments(make_settings(**changes), model="m", dtype="bfloat16", lora_rank=8, can_sleep=True)
        assert arguments[argument] == value


# -- questions ---------------------------------------------------------------------------------------------------------


@shows("questions", "question_field", "answer_field", "train_split", "train_dataset_size", "output_field")
def test_which_questions_are_trained_on(make_settings: MakeSettings, workplace: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (workplace / "questions.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"ask": f"Ask {number}?", "label": f"Label {number}"}
        if row["split"] == "train" and number % 2:
            row["split"] = "hard"
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def asked(**changes: Any) -> list[Scenario]:
        data = make_settings(**changes).data
        return load_scenario_set(None, "train", limit=data.train_dataset_size, seed=1, data=data).scenarios

    own = {"questions": tmp_path / "own.jsonl", "train_split": "hard"}
    everything = {scenario.id for scenario in read_jsonl(workplace / "questions.jsonl") if scenario.split == "train"}
    hard = {row["id"] for row in rows if row["split"] == "hard"}
    assert {scenario.id for scenario in asked()} == everything > hard
    assert {scenario.id for scenario in asked(**own)} == hard
    assert {scenario.split for scenario in asked(**own)} == {"train"}
    assert all(scenario.question.startswith("Ask ") for scenario in asked(**own, question_field="ask"))
    assert all(scenario.answer.startswith("Label ") for scenario in asked(**own, answer_field="label"))
    assert not any(scenario.question.startswith("Ask ") for scenario in asked(**own))
    assert len(asked(train_dataset_size=3)) == 3 < len(asked())
    (tmp_path / "unsplit.jsonl").write_text(json.dumps({k: v for k, v in rows[0].items() if k != "split"}))
    with pytest.raises(UsageError, match="TRAIN_SPLIT=hard, but the questions name no splits"):
        asked(**own | {"questions": tmp_path / "unsplit.jsonl"})
    for changes, taught in ({}, "Label"), ({"output_field": "ask"}, "Ask"):
        settings = make_settings(**own, answer_field="label", max_turns=10, **changes)
        spoken = [messages[-1].content for _, messages in conversations(settings, seed=1)]
        assert spoken and all(f'"answer": "{taught} ' in text for text in spoken)


# -- runs --------------------------------------------------------------------------------------------------------------


@shows("num_generations", "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps")
def test_what_a_run_leaves(make_settings: MakeSettings, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> tuple[Path, list[str]]:
        lines: list[str] = []
        settings = make_settings(output_dir=tmp_path / name, max_steps=4, **changes)
        result = train(settings, progress=lines.append)
        return result.run_dir, [line for line in lines if line.startswith("Step ")]

    first, first_lines = run("a", save_steps=1, save_total_limit=2, eval_steps=2)
    second, second_lines = run("b", save_steps=2, save_total_limit=1, eval_steps=4, num_generations=2, logging_steps=3)
    assert (first.name, second.name) == ("a_masked", "b_masked")
    numbered = [
        [c.metadata.step for c in list_checkpoints(run) if c.metadata.kind == "checkpoint"] for run in (first, second)
    ]
    assert numbered == [[3, 4], [4]]
    evaluated = [[line["step"] for line in read_records(run / "evaluations.jsonl")] for run in (first, second)]
    assert evaluated == [[0, 2, 4], [0, 4]]
    played = [len(list(read_records(run / "trajectories/step-000001.jsonl"))) for run in (first, second)]
    assert played == [2 * 3, 2 * 2]
    assert [line.split(" |")[0] for line in first_lines] == ["Step 1/4", "Step 2/4", "Step 3/4", "Step 4/4"]
    assert [line.split(" |")[0] for line in second_lines] == ["Step 3/4"]
    assert len(list(read_records(second / "metrics.jsonl"))) == 4


@shows("resume", "export_dir", "export_format")
def test_the_command_goes_on_and_exports(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from emailrl.cli.train import train as command

    monkeypatch.chdir(tmp_path)

    def run(**changes: Any) -> list[int]:
        given = options(tmp_path, max_steps=1) | changes
        lines = [
            f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}" for name, value in given.items()
        ]
        (tmp_path / "emailrl.toml").write_text("\n".join(lines))
        trust_folder(tmp_path)
        command(max_steps=changes.get("max_steps"))
        return sorted(len(list(read_records(path))) for path in tmp_path.glob("grpo*/metrics.jsonl"))

    assert run() == [1]
    assert not (tmp_path / "out").exists()
    assert run(max_steps=2, resume="auto", export_dir=tmp_path / "out") == [2]  # the same run, one step further
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert not (tmp_path / "out/model.safetensors").exists()
    monkeypatch.setenv("EXPORT_FORMAT", "merged")  # a resumed run has its own options, but for flags and environment
    assert run(max_steps=2, resume="auto", export_dir=tmp_path / "out") == [2]
    assert (tmp_path / "out/model.safetensors").is_file()
    assert run() == [1, 2]  # without it, another run


class StubWandB:
    """Stands for the module: notes what it is called with."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **options: Any) -> StubWandB:
        self.begun.append(options)
        return self


@shows("wandb_mode", "wandb_project", "wandb_name", "tensorboard", "tensorboard_dir")
def test_where_numbers_go(make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, folders = StubWandB(), []
    monkeypatch.setitem(sys.modules, "wandb", stub)
    assert start_wandb(make_settings(), tmp_path, "r", lambda line: None) is None
    named = {"wandb_mode": "offline", "wandb_project": "p", "wandb_name": "n"}
    start_wandb(make_settings(**named), tmp_path, "r", lambda line: None)
    [begun] = stub.begun
    assert (begun["mode"], begun["project"], begun["name"]) == ("offline", "p", "n")

    class StubBoard:
        def __init__(self, directory: Path, step: int) -> None:
            folders.append(directory)

        def close(self) -> None: ...

    monkeypatch.setattr(tracking, "TensorBoard", StubBoard)
    for changes in {}, {"tensorboard": True}, {"tensorboard": True, "tensorboard_dir": tmp_path / "all"}:
        Tracker(tmp_path / "run", make_settings(**changes), run_id="r7", step=0, say=lambda line: None).close()
    assert folders == [tmp_path / "run" / "tensorboard", tmp_path / "all" / "r7"]


def test_every_setting_that_a_flag_comes_to_is_shown() -> None:
    assert {key for flag in FLAGS for key in flag.settings} - SHOWN == set()
