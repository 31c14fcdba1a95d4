"""Runs that go on: resumed, overwritten, with their own options, after a collapse, with each algorithm bit for bit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Terminal
from end_to_end.commands import begin, exit_code, interrupted
from end_to_end.conftest import MakeSettings, Options, settle
from same_run import assert_same_run, everything, lines, same, state_of

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import find_checkpoint, list_checkpoints, sha256_of
from emailrl.cli.app import main
from emailrl.records import read_records
from emailrl.training import run as run_module
from emailrl.training.algorithms import ALGORITHMS
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater


def test_resuming_from_an_older_checkpoint_drops_what_came_after(
    finished: TrainResult, make_settings: MakeSettings
) -> None:
    settings = make_settings(save_total_limit=9)
    run = train(settings).run_dir
    result = train(settings, resume=str(run / "checkpoint-2"), overwrite=True)
    assert result.run_dir == run
    assert [line["step"] for line in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")
    assert str(find_checkpoint("latest", settings.output.output_dir).metadata.resumed_from).endswith(":2")
    assert same(state_of(run / "final"), state_of(finished.run_dir / "final"))
    again = train(settings, resume="best", overwrite=True)  # step 0
    assert again.steps == 6 and lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")


def test_an_evaluation_that_no_checkpoint_has_is_repeated_and_recorded_once(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is saved without its evaluation, which the resumed run makes up for and dies before the next save."""
    settings = make_settings(max_steps=4, save_steps=100)
    measure, update = run_module.TrainingRun.measure, Updater.train

    def failing(run: Any, questions: Any, step: int, label: str) -> Any:
        if step == 2:
            raise EmailRLError("The mailbox is away.")
        return measure(run, questions, step, label)

    def broken(self: Updater, *given: Any, step: int) -> Any:
        if step == 3:
            raise RuntimeError("a crash")
        return update(self, *given, step=step)

    with monkeypatch.context() as patch, pytest.raises(EmailRLError):
        patch.setattr(run_module.TrainingRun, "measure", failing)
        train(settings)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Updater, "train", broken)
        train(settings, resume="latest")
    run = train(settings, resume="latest").run_dir
    assert [line["step"] for line in read_records(run / "evaluations.jsonl")] == [0, 2, 4]


def test_a_finished_run_resumes_to_its_end_or_goes_on_when_asked_for_more(make_settings: MakeSettings) -> None:
    first, said = train(make_settings(max_steps=2)), list[str]()
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()}
    assert train(make_settings(max_steps=2), resume="latest", progress=said.append) == first
    line = f"Nothing left to do in {first.run_dir}: it ended after step 2, all steps done."
    assert said == [line]
    assert train(make_settings(max_steps=1), resume="auto", progress=said.append) == first
    assert said[1:] == [f"{line} Without effect, changed since the checkpoint: max_steps 2 -> 1."]
    assert {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()} == before
    (first.run_dir / "curve.svg").unlink()  # killed before it was drawn
    train(make_settings(max_steps=2), resume="auto")
    assert (first.run_dir / "curve.svg").exists()
    more = train(make_settings(max_steps=4), resume="latest")
    assert (more.run_dir, more.steps) == (first.run_dir, 4)
    uninterrupted = train(make_settings(max_steps=4))
    assert uninterrupted.run_dir.name == "grpo_masked-2"
    assert lines(more.run_dir / "metrics.jsonl") == lines(uninterrupted.run_dir / "metrics.jsonl")
    (more.run_dir / "best_model" / "adapter_model.safetensors").write_bytes(b"damaged")
    train(make_settings(max_steps=4), resume=str(more.run_dir), progress=said.append)
    assert "Note: best_model is damaged" in "".join(said)


def test_a_run_is_resumed_with_the_same_model_by_another_path_but_not_with_damaged_weights(
    make_settings: MakeSettings, workplace: Path, tmp_path: Path
) -> None:
    settings = make_settings(max_steps=1)
    run = train(settings).run_dir
    kept, weights = everything(run), run / "final" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EmailRLError, match=r"adapter_model\.safetensors is damaged"):
        train(settings, resume="latest")
    weights.write_bytes(content)
    assert everything(run) == kept
    (tmp_path / "model").symlink_to(workplace / "model")
    assert train(make_settings(max_steps=2, model_name=str(tmp_path / "model")), resume="latest").steps == 2


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


def test_a_run_goes_on_with_its_own_options_and_with_those_given_now(
    options: Options, tmp_path: Path, finished: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        (printed := tmp_path / "output.txt").unlink(missing_ok=True)
        return exit_code(begin(tmp_path, "train", *arguments)), printed.read_text()

    chosen = options(tmp_path, max_steps=2)
    own, questions = chosen.pop("reward"), chosen.pop("questions")
    chosen["output_dir"] = tmp_path / "outputs" / "grpo"  # the default, from here
    with monkeypatch.context() as patch:
        for name, value in (chosen | {"emailrl_questions": questions}).items():
            patch.setenv(name.upper(), str(value))
        code, said = command("--reward", own)
    assert code == 0, said
    run = tmp_path / "outputs" / "grpo_masked"
    code, said = command("--resume", "latest")
    assert code == 2
    assert said.splitlines()[-1].startswith(f"error: The run was trained with EMAILRL_REWARD={own}, which")
    (tmp_path / "emailrl.toml").write_text("warmup_steps = 77")
    for resume, steps in (("latest", 4), (str(run), 6)):
        code, said = command("--resume", resume, "--reward", own, "--max-steps", str(steps))
        assert code == 0, said
        assert "ignored in favor of the run's own settings: WARMUP_STEPS=77 (the run: " in said
        assert "Resuming from " in said and list_checkpoints(run)[-1].metadata.step == steps
    assert_same_run(run, finished.run_dir)


def test_a_run_whose_kl_runs_away_stops_and_the_command_it_names_goes_on_from_before(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def emailrl(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, "".join(capsys.readouterr())

    settle(tmp_path, options(tmp_path, max_steps=8, on_collapse="stop", kl_target=1e-6))  # its reward is code
    monkeypatch.chdir(tmp_path)
    code, said = emailrl("emailrl train")
    assert code == 1 and "Warning at step 5: the KL to the reference policy is" in said
    run = tmp_path / "grpo_masked"
    steps = {item.path.name: item.metadata.step for item in list_checkpoints(run)}
    assert steps == {"best_model": 0, "checkpoint-2": 2, "checkpoint-4": 4, "final": 5}
    last = said.strip().splitlines()[-1]
    assert "Stopped at step 5 on signs of collapse (ON_COLLAPSE=stop)" in last
    (back,) = re.findall(r"(emailrl train --resume \S+) --overwrite", last)

    kept = everything(run)
    code, said = emailrl(back)
    assert code == 2 and everything(run) == kept
    assert "steps 1 to 5, checkpoint-2, checkpoint-4, final. Add --overwrite to do so" in said.splitlines()[-1]
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, said = emailrl(back)
    assert code == 1 and "Remove it and continue?" in said and everything(run) == kept

    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    monkeypatch.setenv("KL_TARGET", "10")  # else the same happens again: the run goes on with its own options
    monkeypatch.setenv("ON_COLLAPSE", "warn")  # an untrained policy never answers, which is a sign of its own
    code, said = emailrl(back)
    assert code == 0 and "Done after step 8: all steps done." in said and "the KL to the reference" not in said
    assert [line["step"] for line in read_records(run / "metrics.jsonl")] == list(range(1, 9))


def test_distillation_needs_no_answers_and_a_resume_names_another_teacher(
    options: Options, finished: TrainResult, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def emailrl(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["emailrl", "train", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = "".join(capsys.readouterr())
        assert caught.value.code == 0, said
        return said

    rows = [json.loads(line) for line in (workplace / "questions.jsonl").read_text().splitlines()]
    for row in rows:
        if row["split"] == "train":
            del row["answer"], row["message_ids"]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    teacher = shutil.copytree(finished.run_dir / "policy" / "v-000005", tmp_path / "teacher")
    settle(tmp_path, options(tmp_path, questions=tmp_path / "questions.jsonl", num_generations=1, max_steps=2))
    monkeypatch.chdir(tmp_path)
    said = emailrl("--algorithm", "opd", "--teacher", str(teacher))
    assert "KL to the teacher: " in said
    run = tmp_path / "grpo_masked"
    for line in read_records(run / "metrics.jsonl"):
        assert (line["accuracy"], line["exceptions"], line["num_trajectories"]) == (None, 0, 2) and line["teacher_kl"]
    known = find_checkpoint(run / "final", tmp_path).metadata.versions["teacher"]
    assert known == sha256_of(teacher / "adapter_model.safetensors")
    assert "the content of TEACHER" not in emailrl("--resume", "latest", "--max-steps", "3")
    shutil.copytree(finished.run_dir / "policy" / "v-000006", teacher, dirs_exist_ok=True)
    assert "changed since the checkpoint: the content of TEACHER" in emailrl("--resume", "latest", "--max-steps", "4")


REFILL = {"filter_on": "reward", "filter_low": 0.4, "filter_high": 0.7, "overlong_buffer": 0, "max_refill_rounds": 2}
"""Random completions have about as many even as odd ids: some groups fall out, some stay."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("grpo", "gspo", "reinforce_pp", "opd")),
    ("dapo", REFILL),
    ("grpo", {"dynamic_filtering": True, "update_epochs": 2} | REFILL),
    ("ppo", {"critic_warmup_steps": 2, "update_epochs": 2, "max_steps": 4}),
]


@pytest.mark.parametrize(("algorithm", "changes"), CASES, ids=[f"{name}-{len(changes)}" for name, changes in CASES])
def test_a_resumed_run_equals_the_uninterrupted(
    algorithm: str, changes: dict[str, Any], make_settings: MakeSettings, finished: TrainResult
) -> None:
    wanted: dict[str, Any] = {
        "algorithm": algorithm, "max_steps": 3, "save_total_limit": 1, "lr_scheduler": "cosine",
        "per_device_train_batch_size": 3, "min_group_std": 0.01,
    } | changes  # fmt: skip
    wanted |= {"teacher": str(finished.run_dir / "final")} if ALGORITHMS[algorithm].has_teacher else {}
    settings = make_settings(**wanted)
    whole = train(settings)
    with interrupted(Updater, "train", step=wanted["max_steps"] - 1):
        train(settings)
    resumed = train(settings, resume="auto")  # in a directory of its own, where it finds itself again
    assert whole.run_dir != resumed.run_dir and resumed.steps == wanted["max_steps"]
    assert_same_run(resumed.run_dir, whole.run_dir)
    metrics = list(read_records(whole.run_dir / "metrics.jsonl"))
    assert len({line["kl_coef"] for line in metrics if line["kl_coef"] is not None}) > 1  # it adapts
    state = state_of(whole.run_dir / "final")
    moments = state["updater"]["optimizer"]["state"]
    assert any(float(moment["exp_avg"].abs().max()) > 0 for moment in moments.values())
    if changes.get("max_refill_rounds"):
        assert sum(line["refill_rounds"] for line in metrics) > 0
        assert any(line["groups_kept"] for line in metrics)
    if ALGORITHMS[algorithm].has_critic:
        assert any(name.startswith("value_head.") for name in state["updater"]["parameters"])
        assert (whole.run_dir / "final" / "value_head.safetensors").is_file()
