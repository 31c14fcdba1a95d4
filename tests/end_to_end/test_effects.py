"""Settings that a flag of OpenRLHF comes to: each is read, and changes what the tests of its own room do not show."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from end_to_end.conftest import MakeSettings, settle
from tiny import collector_of
from training.updaters import PAID, make_updater, samples

import emailrl
from emailrl.base.errors import UsageError
from emailrl.cli.app import app
from emailrl.engines import build_engine
from emailrl.model import shard
from emailrl.model.policy import load_policy
from emailrl.openrlhf import FLAGS, to_toml
from emailrl.questions.load import read_jsonl, read_questions
from emailrl.ranks.launch import Launch
from emailrl.records import read_records
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import load_settings
from emailrl.settings.names import by_name
from emailrl.sft.searching import conversations
from emailrl.training.loop import train

PACKAGE = Path(emailrl.__file__).parent


def test_every_setting_that_a_flag_comes_to_is_read_where_it_acts() -> None:
    """As an attribute or by its name, by code that neither declares, converts nor plans."""
    read = {
        node.attr if isinstance(node, ast.Attribute) else node.value
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[0] not in ("settings", "openrlhf", "plan")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    wanted = {by_name()[key].field for flag in FLAGS for key in flag.settings}
    assert wanted - read == {"max_staleness"}  # by its section, which gives it a default


# -- updates

PPO = {"algorithm": "ppo"}
ROUGH = {"update_epochs": 3, "learning_rate": 5e-2}
"""Updates large enough that ratios leave the clip range."""

UPDATES: dict[str, tuple[dict[str, Any], Any]] = {
    "min_lr_ratio": ({"max_steps": 3, "lr_scheduler": "linear"}, 0.5),
    "warmup_ratio": ({"max_steps": 10}, 0.5),
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "weight_decay": ({}, 0.5),
    "seed": ({}, 7),
    "kl_horizon": ({"beta": 0.1, "kl_target": 1e-3}, 10),
    "kl_estimator": ({"beta": 0.1}, "k1"),
    "clip_low": (ROUGH, 0.0),
    "clip_high": (ROUGH, 0.0),
    "surrogate": (ROUGH, "cispo"),
    "dual_clip": (ROUGH, 1.001),
    "value_clip": (PPO | {"update_epochs": 3, "critic_learning_rate": 0.1}, 1e-4),
    "lora_alpha": ({}, 64),
    "lora_dropout": ({}, 0.5),
}
"""Setting whose effect no other test of the update shows → the settings around it, and a value unlike its default."""


def updated(model: Path, **changes: Any) -> list[torch.Tensor]:
    """The trained weights after two steps, and the weight of the KL."""
    updater = make_updater(model, **changes)
    for step in (1, 2):
        updater.train(samples(), PAID, step=step)
    return [*(parameter.detach().float() for parameter in updater.parameters), torch.tensor(updater.kl.coef)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("key", UPDATES)
def test_the_update_depends_on(tiny_model: Path, key: str) -> None:
    around, value = UPDATES[key]
    first = updated(tiny_model, **around)
    assert same(first, updated(tiny_model, **around))
    assert not same(first, updated(tiny_model, **around | {key: value}))


# -- rollouts

ENVIRONMENT = """
from emailrl.agent import MailEnvironment
def shout(scenario, mailbox, settings):
    agent = settings.agent.model_copy(update={"max_turns": 1, "question_template": "{}!!!"})
    return MailEnvironment(scenario, mailbox, agent)
"""


@pytest.fixture
def play(make_settings: MakeSettings) -> Callable[..., list[list[Trajectory]]]:
    """Play two questions of the workplace three times each."""

    def play(**changes: Any) -> list[list[Trajectory]]:
        settings = make_settings(**changes)
        policy = load_policy(settings)
        engine = build_engine(settings, policy)
        engine.load_adapter(None, "base")
        questions = read_questions(None, settings.data).of("train", limit=2, seed=1).scenarios
        groups = collector_of(settings, policy, engine).collect(questions, 3, step=0, seed=1)
        engine.close()
        return [each.trajectories for each in groups]

    return play


def sampled(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[turn.completion_ids for each in members for turn in each.turns] for members in groups]


def test_how_tokens_are_drawn_and_how_many(play: Any) -> None:
    free = sampled(play())
    assert max(len(ids) for members in free for ids in members) == 8
    assert max(len(ids) for members in sampled(play(max_tokens=5)) for ids in members) == 5
    assert sampled(play(max_model_len=32))[0] == [[], [], []]  # no prompt fits
    for greedy in {"top_k": 1}, {"top_p": 1e-6}:
        assert all(ids == members[0] for members in sampled(play(**greedy)) for ids in members)
    assert any(ids != members[0] for members in free for ids in members)


def test_what_the_policy_is_shown_and_paid_for(play: Any, tmp_path: Path) -> None:
    base = play()[0][0]
    assert play(question_template="Q: {}?!")[0][0].messages[1].content == f"Q: {base.messages[1].content}?!"
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{% endfor %}")
    bare = play(chat_template=tmp_path / "template.jinja", tool_dialect="hermes")[0][0]
    prompts = [each.samples[0].loss_mask.index(1) for each in (base, bare)]
    assert prompts[1] < prompts[0] / 2  # roles alone, no contents
    (tmp_path / "shout.py").write_text(ENVIRONMENT)
    shouted = play(environment=f"{tmp_path / 'shout.py'}:shout", reward="simple")[0][0]
    assert shouted.messages[1].content == f"{base.messages[1].content}!!!"
    assert (shouted.reward_terms.keys(), base.reward_terms.keys()) == ({"outcome"}, {"share_of_even_ids"})


THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


def test_a_run_says_that_its_template_splits_rollouts_and_counts_thoughts(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "thinks.jinja").write_text(THINKS)
    how = {
        "chat_template": tmp_path / "thinks.jinja",
        "tool_dialect": "hermes",
        "thinking": "on",
        "max_thinking_tokens": 5,
        "max_steps": 1,
    }
    notes = {}
    for mode in ("masked", "simple"):
        said: list[str] = []
        result = train(make_settings(mode=mode, **how), progress=said.append)
        notes[mode] = [line for text in said for line in text.splitlines() if "template changes earlier turns" in line]
        [line] = read_records(result.run_dir / "metrics.jsonl")
        # No random turn ends its thought: each is cut off at five tokens, and is the only one.
        assert line["thinking_tokens"] == 5
        settings = json.loads((result.run_dir / "final" / "metadata.json").read_text())["settings"]
        assert (settings["model"]["thinking"], settings["agent"]["max_thinking_tokens"]) == ("on", 5)
    assert [note.startswith("Note: ") and "up to 2 a rollout" in note for note in notes["masked"]] == [True]
    assert notes["simple"] == []  # of a single turn


# -- runs


def test_which_questions_are_trained_on(make_settings: MakeSettings, workplace: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (workplace / "questions.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"ask": f"Ask {number}?", "label": f"Label {number}"}
        if row["split"] == "train" and number % 2:
            row["split"] = "hard"
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def asked(**changes: Any) -> list[Scenario]:
        data = make_settings(**changes).data
        return read_questions(None, data).of("train", limit=data.train_dataset_size, seed=1).scenarios

    own = {"questions": tmp_path / "own.jsonl", "train_split": "hard"}
    everything = {scenario.id for scenario in read_jsonl(workplace / "questions.jsonl") if scenario.split == "train"}
    assert {scenario.id for scenario in asked()} == everything
    assert {scenario.id for scenario in asked(**own)} == {row["id"] for row in rows if row["split"] == "hard"}
    assert all(scenario.question.startswith("Ask ") for scenario in asked(**own, question_field="ask"))
    assert all(scenario.answer.startswith("Label ") for scenario in asked(**own, answer_field="label"))
    assert len(asked(train_dataset_size=3)) == 3 < len(everything)
    (tmp_path / "unsplit.jsonl").write_text(json.dumps({k: v for k, v in rows[0].items() if k != "split"}))
    with pytest.raises(UsageError, match="TRAIN_SPLIT=hard"):
        asked(**own | {"questions": tmp_path / "unsplit.jsonl"})
    for changes, taught in ({}, "Label"), ({"output_field": "ask"}, "Ask"):
        settings = make_settings(**own, answer_field="label", max_turns=10, **changes)
        spoken = [messages[-1].content for _, messages in conversations(settings, seed=1)[0]]
        assert spoken and all(f'"answer": "{taught} ' in text for text in spoken)


def test_how_often_a_run_says_its_steps(make_settings: MakeSettings) -> None:
    lines: list[str] = []
    train(make_settings(max_steps=4, num_generations=2, logging_steps=3), progress=lines.append)
    assert [line.split(" |")[0] for line in lines if line.startswith("Step ")] == ["Step 3/4"]


def test_the_command_goes_on_and_exports(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(**changes: Any) -> list[int]:
        settle(tmp_path, options(tmp_path) | changes)
        app(["train", "--max-steps", str(changes["max_steps"])], standalone_mode=False)
        return sorted(len(list(read_records(path))) for path in tmp_path.glob("grpo*/metrics.jsonl"))

    assert run(max_steps=1) == [1] and not (tmp_path / "out").exists()
    assert run(max_steps=2, resume="auto", export_dir=tmp_path / "out") == [2]  # the same run, one step further
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert not (tmp_path / "out/model.safetensors").exists()
    monkeypatch.setenv("EXPORT_FORMAT", "merged")  # a resumed run has its own options, but for flags and environment
    assert run(max_steps=2, resume="auto", export_dir=tmp_path / "out") == [2]
    assert (tmp_path / "out/model.safetensors").is_file()
    assert run(max_steps=1) == [1, 2]  # without it, another run


def test_ranks_and_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As converted from OpenRLHF's flags, ``emailrl train`` starts as many ranks, on as many hosts."""
    launched: list[Launch] = []
    monkeypatch.setattr("emailrl.cli.train.launch", lambda wanted, arguments, say: launched.append(wanted))
    monkeypatch.chdir(tmp_path)
    for flags, arguments in (
        ("--actor_num_gpus_per_node 8", []),
        ("--actor_num_nodes 2 --actor_num_gpus_per_node 8", ["--rdzv-endpoint", "first:29500"]),
    ):
        (tmp_path / "emailrl.toml").write_text(to_toml(flags))
        app(["train", "--trust", *arguments], standalone_mode=False)
    assert [(one.nproc, one.nnodes) for one in launched] == [(8, 1), (8, 2)]


def test_where_the_base_lies(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it is cut up over two ranks, and whether its parts stay in the host's memory."""
    policies: list[Any] = []
    monkeypatch.setattr(shard.fsdp, "fully_shard", lambda module, **given: policies.append(given["offload_policy"]))
    mesh: Any = SimpleNamespace(device_type="cpu", size=lambda: 2)
    served = {"model_name": str(tiny_model), "engine": "vllm", "vllm_urls": "http://one:8000"}
    for changes, kinds in (
        ({"shard": "auto"}, set()), ({"shard": "host"}, {"OffloadPolicy"}),
        ({"shard": "host", "shard_offload": True}, {"CPUOffloadPolicy"}),
    ):  # fmt: skip
        policy = load_policy(load_settings(served | changes, environ={}), trainable=True, mesh=mesh)
        assert (policy.sharded, {type(one).__name__ for one in policies}) == (bool(kinds), kinds)
        policies.clear()
