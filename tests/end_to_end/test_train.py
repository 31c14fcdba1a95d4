"""Whole runs on the CPU: what they leave, that only the adapter moves, and that a resumed run is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import assert_same_run, everything, lines, same, state_of

from emailrl.checkpoints import find_checkpoint, list_checkpoints, sha256_of, verify
from emailrl.errors import EmailRLError, UsageError
from emailrl.evaluation import wilson_interval
from emailrl.recording import read_records, read_trajectories
from emailrl.settings import Settings
from emailrl.training import run as run_module
from emailrl.training.assemble import open_run
from emailrl.training.loop import TrainResult, loop, train
from emailrl.training.update import Updater

MakeSettings = Callable[..., Settings]


# -- what a run leaves ----------------------------------------------------------------------------------------------


def test_a_run_leaves_best_final_and_numbered_checkpoints_that_verify(finished: TrainResult) -> None:
    checkpoints = {item.path.name: verify(item).metadata for item in list_checkpoints(finished.run_dir)}
    assert {name: (data.kind, data.step) for name, data in checkpoints.items()} == {
        "best_model": ("best", 0),  # no answer is right, and of equals the earlier stays
        "checkpoint-4": ("checkpoint", 4),
        "checkpoint-6": ("checkpoint", 6),
        "final": ("final", 6),
    }
    assert (finished.best_step, finished.best_accuracy, finished.steps) == (0, 0.0, 6)
    for name, data in checkpoints.items():
        files = {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "trainer_state.pt"}
        assert files <= set(data.files), name
        assert data.metrics["accuracy"] == 0.0 and "reward" in data.metrics
        assert (data.mode, data.algorithm, data.seed, data.parent) == ("masked", "grpo", 42, None)


def test_metrics_have_one_line_a_step_with_every_number(finished: TrainResult) -> None:
    metrics = list(read_records(finished.run_dir / "metrics.jsonl"))
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    names = (
        "loss policy_loss kl kl_coef reward_mean reward_std reward_median reward_min reward_max accuracy"
        " accuracy_moving accuracy_best answer_correct sources_correct num_turns duration trainable_tokens"
        " total_tokens trainable_share dropped exceptions clip_fraction entropy grad_norm learning_rate seconds"
    )
    for line in metrics:
        assert all(line[name] is not None for name in names.split())
        assert line["seconds"].keys() == {"rollout", "update", "evaluation", "total"}
        assert line["trainable_tokens"] == 2 * 3 * 8
        assert line["trainable_share"] == line["trainable_tokens"] / line["total_tokens"]
    assert [line["learning_rate"] for line in metrics] == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert ["eval_accuracy" in line for line in metrics] == [False, True] * 3
    evaluations = list(read_records(finished.run_dir / "evaluations.jsonl"))
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert [line["accuracy_high"] for line in evaluations] == [wilson_interval(0, 3)[1]] * 4
    assert "Step 6/6 | Loss " in (finished.run_dir / "training.log").read_text()


def test_trajectories_name_the_adapter_they_were_sampled_from(finished: TrainResult) -> None:
    run = finished.run_dir
    (last,) = {(t.policy_version, t.adapter_sha256) for t in read_trajectories(run / "trajectories/step-000006.jsonl")}
    assert last == ("v-000005", sha256_of(run / "policy/v-000005/adapter_model.safetensors"))
    (evaluated,) = {t.adapter_sha256 for t in read_trajectories(run / "trajectories/eval-000006.jsonl")}
    assert evaluated == sha256_of(run / "final/adapter_model.safetensors")


def test_training_notes_stand_under_the_trajectories_ids_and_fit_their_tokens(finished: TrainResult) -> None:
    run = finished.run_dir
    trajectories = {t.id: t for t in read_trajectories(run / "trajectories/step-000003.jsonl")}
    notes = {note["id"]: note for note in read_records(run / "training/step-000003.jsonl")}
    assert trajectories.keys() == notes.keys() and len(notes) == 6
    for name, note in notes.items():
        (sample,) = note["samples"]
        mask = trajectories[name].samples[0].loss_mask
        assert sample["loss_mask"] == mask[: len(sample["loss_mask"])] and sum(sample["loss_mask"]) == 8
        for values in (sample["old_logprobs"], sample["ratio"]):
            assert [value is not None for value in values] == [bool(on) for on in sample["loss_mask"]]
    for group in {note["group_id"] for note in notes.values()}:
        members = [note["advantage"] for note in notes.values() if note["group_id"] == group]
        assert sum(members) == pytest.approx(0, abs=1e-6)


def test_only_the_adapter_moves(make_settings: MakeSettings) -> None:
    with open_run(make_settings(max_steps=3), resume=None, overwrite=False, say=lambda line: None) as run:
        before = {name: parameter.detach().clone() for name, parameter in run.policy.model.named_parameters()}
        loop(run)
        moved = {
            name for name, parameter in run.policy.model.named_parameters() if not torch.equal(parameter, before[name])
        }
    assert moved and all("lora_" in name for name in moved)
    assert {name.partition("lora_")[2][0] for name in moved} == {"A", "B"}


# -- a resumed run is the same run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["rollout", "update", "evaluation"])
def test_ctrl_c_saves_the_last_step_and_the_resumed_run_equals_the_uninterrupted(
    moment: str, finished: TrainResult, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    said: list[str] = []
    where: dict[str, tuple[Any, str]] = {
        "rollout": (run_module.Run, "collect"),
        "update": (Updater, "step"),
        "evaluation": (run_module, "evaluate"),
    }
    owner, name = where[moment]
    original = getattr(owner, name)
    calls: list[None] = []

    def interrupted(*args: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **keywords)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        train(settings, progress=said.append)
    assert signal.getsignal(signal.SIGINT) is before
    saved = {"rollout": 2, "update": 3, "evaluation": 4}[moment]
    assert find_checkpoint("latest", settings.output.output_dir, "masked").metadata.step == saved
    assert f"Stopped after step {saved}" in said[-1]
    result = train(settings, resume="auto")
    drop = result.run_dir / "checkpoint-3"  # one more than the uninterrupted run saved, pruned with the others
    assert not drop.exists()
    assert_same_run(result.run_dir, finished.run_dir)


def test_ctrl_c_in_the_last_step_saves_the_end_and_is_not_swallowed(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(max_steps=1)
    original = Updater.step

    def interrupted(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **keywords)

    monkeypatch.setattr(Updater, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(settings)
    latest = find_checkpoint("latest", settings.output.output_dir).metadata
    assert (latest.kind, latest.step) == ("final", 1)


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing_more(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(save_steps=50)
    said: list[str] = []

    def twice(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal raises at once")

    monkeypatch.setattr(Updater, "step", twice)
    with pytest.raises(KeyboardInterrupt):
        train(settings, progress=said.append)
    assert any("at the end of this step" in line for line in said)
    assert find_checkpoint("latest", settings.output.output_dir).metadata.kind == "best"


def test_resuming_from_an_older_checkpoint_drops_what_came_after(
    finished: TrainResult, make_settings: MakeSettings
) -> None:
    settings = make_settings(save_total_limit=9)
    run = train(settings).run_dir
    result = train(settings, resume=str(run / "checkpoint-2"))
    assert result.run_dir == run
    assert [line["step"] for line in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")
    assert str(find_checkpoint("latest", settings.output.output_dir).metadata.parent).endswith(":2")
    assert same(state_of(run / "final"), state_of(finished.run_dir / "final"))
    again = train(settings, resume="best")  # step 0
    assert again.steps == 6 and lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")


def test_a_finished_run_resumes_to_its_end_or_goes_on_when_asked_for_more(make_settings: MakeSettings) -> None:
    first = train(make_settings(max_steps=2))
    assert train(make_settings(max_steps=2), resume="latest") == first
    more = train(make_settings(max_steps=4), resume="latest")
    assert (more.run_dir, more.steps) == (first.run_dir, 4)
    uninterrupted = train(make_settings(max_steps=4))
    assert uninterrupted.run_dir.name == "grpo_masked-2"
    assert lines(more.run_dir / "metrics.jsonl") == lines(uninterrupted.run_dir / "metrics.jsonl")


# -- directories ----------------------------------------------------------------------------------------------------


def test_a_new_run_takes_the_next_free_directory_unless_told_to_overwrite(make_settings: MakeSettings) -> None:
    settings = make_settings(max_steps=1, eval_steps=9)
    first, second = train(settings), train(settings)
    assert (first.run_dir.name, second.run_dir.name) == ("grpo_masked", "grpo_masked-2")
    assert find_checkpoint("latest", settings.output.output_dir, "masked").path.parent == second.run_dir
    (first.run_dir / "notes.txt").write_text("mine")
    before = find_checkpoint(str(first.run_dir / "final"), first.run_dir).metadata.run_id
    third = train(settings, overwrite=True)
    assert third.run_dir == first.run_dir
    assert find_checkpoint(str(first.run_dir / "final"), first.run_dir).metadata.run_id != before
    assert (first.run_dir / "notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="contradict"):
        train(settings, resume="latest", overwrite=True)


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_run_is_not_resumed_with_what_it_was_not_trained_on(
    make_settings: MakeSettings, workplace: Path, tmp_path: Path
) -> None:
    settings = make_settings(max_steps=1)
    run = train(settings).run_dir
    kept = everything(run)
    other_model = tmp_path / "model"
    other_model.symlink_to(workplace / "model")
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-r", str(workplace / "model"), str(copied)], check=True)
    fewer = tmp_path / "questions.jsonl"
    fewer.write_text("".join((workplace / "questions.jsonl").open().readlines()[1:]))
    from emailrl.store.build import build_database
    from emailrl.store.demo import make_world

    build_database(
        (mail for n, s in enumerate(["train", "train"]) for mail in make_world(7, s, n).emails), tmp_path / "o.db"
    )
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model_name": str(copied)}, r"was trained from .*, not from .*Resume with --model"),
        ({"questions": fewer}, "another set of questions"),
        ({"train_dataset_size": 4}, "another set of questions"),
        ({"emailrl_db": tmp_path / "o.db"}, "another database"),
        ({"lora_rank": 8}, "lora_rank 4, not 8.*LORA_RANK=4"),
    ]
    for changes, complaint in refused:
        with pytest.raises(UsageError, match=complaint):
            train(make_settings(max_steps=2, **changes), resume="latest")
    with pytest.raises(UsageError, match="is of mode masked"):
        train(make_settings(max_steps=2, mode="rollout"), resume=str(run / "final"))
    with pytest.raises(EmailRLError, match=r"No checkpoint under .*grpo_rollout"):
        train(make_settings(mode="rollout"), resume="latest")
    (run / "checkpoint-9").mkdir()
    with pytest.raises(UsageError, match=r"checkpoint-9 has no metadata\.json"):
        train(settings, resume=str(run / "checkpoint-9"))
    (run / "checkpoint-9").rmdir()
    weights = run / "final" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EmailRLError, match=r"adapter_model\.safetensors is damaged"):
        train(settings, resume="latest")
    weights.write_bytes(content)
    assert everything(run) == kept
    assert train(make_settings(max_steps=2, model_name=str(other_model)), resume="latest").steps == 2


@pytest.mark.parametrize("wrong", [{"reward": "nope.py:x"}, {"engine": "vllm"}], ids=str)
def test_wrong_settings_are_found_before_anything_on_disk_is_touched(
    wrong: dict[str, Any], make_settings: MakeSettings
) -> None:
    run = train(make_settings(max_steps=2, save_steps=1)).run_dir
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    settings = make_settings(**wrong)
    for how in ({"overwrite": True}, {"resume": str(run / "checkpoint-1")}, {}):
        with pytest.raises(EmailRLError):
            train(settings, **how)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept
    assert [path.name for path in run.parent.glob("grpo*")] == ["grpo_masked"]


def test_an_overwritten_run_comes_back_where_the_new_one_ends_before_its_first_checkpoint(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(max_steps=1)
    run = train(settings).run_dir
    kept = everything(run)

    def interrupted(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "evaluate", interrupted)
        train(settings, overwrite=True, progress=said.append)
    assert said[-1].endswith("the run that was to be replaced is back in its place.")
    assert everything(run) == kept and not (run / ".replaced").exists()


def test_one_rollout_a_question_is_too_few_to_compare(make_settings: MakeSettings) -> None:
    settings = make_settings(num_generations=1)
    with pytest.raises(UsageError, match="NUM_GENERATIONS=1 is too few for grpo"):
        train(settings)
    assert not settings.output.output_dir.parent.joinpath("grpo_masked").exists()


# -- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "steps"), [("simple", 3), ("rollout", 3), ("masked", 4)])
def test_epochs_bound_simple_and_rollout_and_max_steps_bounds_all(
    mode: str, steps: int, make_settings: MakeSettings
) -> None:
    settings = make_settings(
        mode=mode, max_steps=4, num_train_epochs=1, per_device_train_batch_size=4, eval_steps=9, num_mini_batches=1
    )
    result = train(settings)
    assert result.steps == steps and result.run_dir.name == f"grpo_{mode}"
    asked = [
        {t.scenario.id for t in read_trajectories(result.run_dir / f"trajectories/step-{step:06d}.jsonl")}
        for step in (1, 2, 3)
    ]
    assert [len(names) for names in asked] == [4, 4, 2] and len(set.union(*asked)) == 10  # an epoch, each once


def test_refills_pass_through_the_epochs_faster_and_end_the_run_with_them(make_settings: MakeSettings) -> None:
    settings = make_settings(
        mode="rollout", num_train_epochs=1, per_device_train_batch_size=4, eval_steps=9, max_refill_rounds=9,
        dynamic_filtering=True, filter_on="reward", filter_low=5, filter_high=6, overlong_buffer=4,
    )  # fmt: skip
    said: list[str] = []
    result = train(settings, progress=said.append)
    assert result.steps == 1 and any("Done after step 1: all 1 epochs done" in line for line in said)
    played = list(read_trajectories(result.run_dir / "trajectories/step-000001.jsonl"))
    assert len({t.id for t in played}) == 30 and len({t.scenario.id for t in played}) == 10  # the epoch, each once
    assert [t.id.split("-0000")[0] for t in played[::3]] == ["train"] * 4 + ["refill-1"] * 4 + ["refill-2"] * 2
    (line,) = read_records(result.run_dir / "metrics.jsonl")
    assert line["dropped"]["groups_below_range"] == 10 and line["loss"] is None and line["eval_accuracy"] == 0.0
    for t in played:  # 8 of 8 tokens: charged in full, and only in training
        assert t.reward_terms["overlong"] == -1.0 and t.reward == sum(t.reward_terms.values())
    for t in read_trajectories(result.run_dir / "trajectories/eval-000001.jsonl"):
        assert "overlong" not in t.reward_terms


def test_simple_mode_completes_a_static_prompt_that_holds_the_source_mail(make_settings: MakeSettings) -> None:
    settings = make_settings(mode="simple", max_steps=1, num_mini_batches=1)
    run = train(settings).run_dir
    for trajectory in read_trajectories(run / "trajectories/step-000001.jsonl"):
        assert [message.role for message in trajectory.messages] == ["system", "user", "assistant"]
        prompt = trajectory.messages[1].content
        assert prompt.startswith(trajectory.scenario.question)
        assert f"[{trajectory.scenario.message_ids[0]}]" in prompt
        assert set(trajectory.reward_terms) == {"readable", "valid", "useful", "brevity"}
        assert trajectory.mode == "simple"
    evaluated = next(iter(read_trajectories(run / "trajectories/eval-000001.jsonl")))
    assert evaluated.messages[1].content == evaluated.scenario.question
    assert set(evaluated.reward_terms) != {"readable", "valid", "useful", "brevity"}


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(options: Callable[..., dict[str, Any]], tmp_path: Path) -> list[str]:
    """``emailrl train`` where its settings lie in ``emailrl.toml``."""
    toml = [
        f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}"
        for name, value in options(tmp_path).items()
    ]
    (tmp_path / "emailrl.toml").write_text("\n".join(toml))
    return [sys.executable, "-c", "from emailrl.cli.app import main; main()", "train"]


def test_the_command_prints_its_result_and_exits_130_when_interrupted(command: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--max-steps", "500"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "grpo_masked" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Stopped after step" in errors and "interrupted" in errors and "Traceback" not in errors
    done = find_checkpoint("latest", tmp_path / "grpo").metadata.step
    finished = subprocess.run(
        [*command, "--resume", "latest", "--max-steps", str(done + 1), "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    (line,) = finished.stdout.splitlines()
    run = str((tmp_path / "grpo_masked").absolute())
    assert json.loads(line) == {"run_dir": run, "best_accuracy": 0.0, "best_step": 0, "steps": done + 1}
    assert f"Resuming at step {done} of {done + 1}" in finished.stderr
