"""Settings that a flag of OpenRLHF comes to change what a run is and leaves: one observation with each, one without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from end_to_end import test_effects_rollouts, test_effects_update
from end_to_end.effects import SHOWN, group, shows

from emailrl.base.errors import UsageError
from emailrl.checkpoints import list_checkpoints
from emailrl.cli import ranks
from emailrl.cli.app import app
from emailrl.engines.vllm import serve
from emailrl.model import shard
from emailrl.model.load import load_policy
from emailrl.openrlhf import FLAGS, to_toml
from emailrl.questions import load_scenario_set, read_jsonl
from emailrl.ranks import ALONE
from emailrl.ranks.launch import Launch
from emailrl.records import read_records
from emailrl.records.trajectory import Scenario, Turn
from emailrl.runs import log
from emailrl.runs.log import Display, Tracker
from emailrl.settings import Settings, load_settings, trust_folder
from emailrl.sft.searching import conversations
from emailrl.training.assemble import open_run
from emailrl.training.loop import train
from emailrl.training.run import TrainingRun

MakeSettings = Callable[..., Settings]


@pytest.fixture
def opened(make_settings: MakeSettings) -> Callable[..., TrainingRun]:
    """Put a run together and take it apart again."""

    def opened(**changes: Any) -> TrainingRun:
        settings = make_settings(**changes)
        with open_run(settings, ALONE, Display(), resume=None, overwrite=False) as run:
            return run

    return opened


@shows("overlong_buffer", "overlong_penalty")
def test_long_completions_are_charged(opened: Any) -> None:
    def charge(**changes: Any) -> float | None:
        run = opened(reward="simple", **changes)  # 8 tokens at most
        played = group(rewards=[0.0], right=[False]).trajectories[0]
        played.turns = [Turn([1] * 7, [0.0] * 7, "stop")]
        run.rollouts.collector.scorer.score([played])
        return played.reward_terms.get("overlong")

    assert charge() is None
    assert charge(overlong_buffer=4) == -0.75  # 7 tokens: 3 of the 4 before the limit
    assert charge(overlong_buffer=4, overlong_penalty=2.0) == -1.5


@shows("num_train_epochs", "max_steps", "per_device_train_batch_size")
def test_how_long_a_run_is(opened: Any) -> None:
    def steps(**changes: Any) -> int:
        return opened(
            **{"mode": "rollout", "max_steps": 100, "num_train_epochs": 2, "train_dataset_size": 10} | changes
        ).total_steps

    assert steps() == 10  # 10 questions / 2 a step x 2
    assert steps(num_train_epochs=3) == 15
    assert steps(max_steps=7) == 7
    assert steps(per_device_train_batch_size=5) == 4


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
    with pytest.raises(UsageError, match="TRAIN_SPLIT=hard, but the questions have no splits"):
        asked(**own | {"questions": tmp_path / "unsplit.jsonl"})
    for changes, taught in ({}, "Label"), ({"output_field": "ask"}, "Ask"):
        settings = make_settings(**own, answer_field="label", max_turns=10, **changes)
        spoken = [messages[-1].content for _, messages in conversations(settings, seed=1)]
        assert spoken and all(f'"answer": "{taught} ' in text for text in spoken)


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

    def track(**changes: Any) -> None:
        Tracker(tmp_path / "run", make_settings(**changes), Display(), run_id="r7", mode="masked", step=0)

    track()
    assert not stub.begun
    track(wandb_mode="offline", wandb_project="p", wandb_name="n")
    [begun] = stub.begun
    assert (begun["mode"], begun["project"], begun["name"]) == ("offline", "p", "n")

    class StubBoard:
        def __init__(self, directory: Path, step: int) -> None:
            folders.append(directory)

        def close(self) -> None: ...

    monkeypatch.setattr(log, "TensorBoard", StubBoard)
    for changes in {}, {"tensorboard": True}, {"tensorboard": True, "tensorboard_dir": tmp_path / "all"}:
        track(**changes)
    assert folders == [tmp_path / "run" / "tensorboard", tmp_path / "all" / "r7"]


@shows("nproc", "nnodes")
def test_ranks_and_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As converted from OpenRLHF's flags, ``emailrl train`` starts as many ranks, on as many hosts."""
    launched: list[Launch] = []
    monkeypatch.setattr(ranks, "launch", lambda wanted, arguments, say: launched.append(wanted))
    monkeypatch.chdir(tmp_path)
    for flags, arguments in (
        ("--actor_num_gpus_per_node 8", []),
        ("--actor_num_nodes 2 --actor_num_gpus_per_node 8", ["--rdzv-endpoint", "first:29500"]),
    ):
        (tmp_path / "emailrl.toml").write_text(to_toml(flags))
        app(["train", "--trust", *arguments], standalone_mode=False)
    assert [(one.nproc, one.nnodes) for one in launched] == [(8, 1), (8, 2)]


@shows("shard", "shard_offload")
def test_where_the_base_lies(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it is cut up over two ranks, and whether its parts stay in the host's memory."""
    policies: list[Any] = []
    monkeypatch.setattr(shard, "fully_shard", lambda module, **given: policies.append(given["offload_policy"]))
    mesh: Any = SimpleNamespace(device_type="cpu", size=lambda: 2)
    served = {"model_name": str(tiny_model), "engine": "vllm", "vllm_urls": "http://one:8000"}
    found = {}
    for changes in ({"shard": "off"}, {"shard": "auto"}, {"shard": "host"}, {"shard": "host", "shard_offload": True}):
        policy = load_policy(load_settings(served | changes, environ={}), trainable=True, mesh=mesh)
        found[str(changes)] = policy.sharded, {type(one).__name__ for one in policies}
        policies.clear()
    assert list(found.values()) == [
        (False, set()), (False, set()), (True, {"OffloadPolicy"}), (True, {"CPUOffloadPolicy"}),
    ]  # fmt: skip


@shows("max_staleness")
def test_servers_have_room_for_the_versions_of_steps_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: True)

    def room(flags: str) -> str:
        (tmp_path / "emailrl.toml").write_text(to_toml(f"{flags} --vllm_num_engines 2 --pretrain nano"))
        settings = load_settings(cwd=tmp_path, environ={}, trust=True)
        words = serve.server_command(settings, host="h", port=1, on_gpu=False)
        return words[words.index("--max-loras") + 1]

    assert (room("--async_train"), room("--async_train --async_queue_size 3")) == ("3", "5")


def test_every_setting_that_a_flag_comes_to_is_shown() -> None:
    assert test_effects_rollouts and test_effects_update  # imported, they note what they show
    assert {key for flag in FLAGS for key in flag.settings} - SHOWN == set()
