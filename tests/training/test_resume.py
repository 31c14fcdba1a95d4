"""Directories of runs, what a checkpoint must agree with, and what is removed when a run goes back to a step."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emailrl.checkpoints import Metadata, list_checkpoints, read_checkpoint, write_checkpoint
from emailrl.errors import EmailRLError, UsageError
from emailrl.settings import OutputSettings, Settings, TrainingSettings, load_settings
from emailrl.training.directory import discard_replaced, give_back_replaced, run_directory
from emailrl.training.resume import (
    base_of,
    check_agrees,
    choose_checkpoint,
    load_state,
    rewind,
    save_state,
    seed_generators,
    take_snapshot,
)
from emailrl.training.state import Cursor, RunState


def settings(output_dir: Path, mode: Any = "masked") -> Settings:
    return Settings(output=OutputSettings(output_dir=output_dir), training=TrainingSettings(mode=mode))


def write(path: Path, kind: str = "checkpoint", step: int = 1, state: RunState | None = None) -> None:
    def fill(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(f"weights of step {step}")
        save_state(directory / "trainer_state.pt", take_snapshot(state or RunState(step)), {"kl_coef": 0.5})

    metadata = Metadata(
        run_id="r", kind=kind, step=step, mode="masked", algorithm="grpo", base_model="nano", lora={}, metrics={},
        settings={}, parent=None, seed=1, versions={}, database_fingerprint="d", questions_fingerprint="q",
        git_commit=None,
    )  # fmt: skip
    write_checkpoint(path, metadata, fill)


# -- where a run begins


def test_a_new_run_takes_the_first_free_directory(tmp_path: Path) -> None:
    (tmp_path / "grpo_masked").mkdir()
    with run_directory(settings(tmp_path / "grpo"), None, overwrite=False) as first:
        assert first == tmp_path / "grpo_masked"  # there, but empty
        with run_directory(settings(tmp_path / "grpo"), None, overwrite=False) as second:
            assert second == tmp_path / "grpo_masked-2"
    with run_directory(settings(tmp_path / "grpo_rollout", "rollout"), None, overwrite=False) as third:
        assert third == tmp_path / "grpo_rollout"


def old_run(base: Path) -> None:
    """A run, and what its user put beside and into it."""
    write(base / "best_model", "best")
    write(base / "checkpoint-2")
    for name in ("trajectories/step-000001.jsonl", "training/step-000001.jsonl", "policy/v-000001/adapter"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("old")
    for name in ("metrics.jsonl", "evaluations.jsonl", "training.log"):
        (base / name).write_text("old")
    (base / ".git").mkdir()
    for name in (".git/config", ".env", "notes.md", "training/thesis.txt", "trajectories/.mine"):
        (base / name).write_text("mine")


def files(base: Path) -> dict[str, bytes]:
    return {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}


def test_overwriting_replaces_what_a_run_made_and_nothing_else(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    with run_directory(settings(tmp_path / "grpo"), None, overwrite=True) as directory:
        assert directory == base
        (base / "metrics.jsonl").write_text("new")
        write(base / "checkpoint-1")
        discard_replaced(base)
    left = {name for name in files(base) if not name.startswith("checkpoint-1/")}
    mine = {".git/config", ".env", "notes.md", "training/thesis.txt", "trajectories/.mine"}
    assert left == mine | {".lock", "metrics.jsonl"} and not (base / "policy").exists()
    assert (base / "metrics.jsonl").read_text() == "new" and (base / ".env").read_text() == "mine"


def test_a_run_without_a_checkpoint_gives_the_overwritten_one_back(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    before = files(base)
    with pytest.raises(OSError, match="no W&B"), run_directory(settings(tmp_path / "grpo"), None, overwrite=True):
        assert not list_checkpoints(base)
        (base / "trajectories" / "eval-000000.jsonl").write_text("new")
        (base / "metrics.jsonl").write_text("new")
        raise OSError("no W&B")
    assert files(base) == before | {".lock": b""}


def test_an_overwriting_that_died_is_settled_by_the_next(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    before = files(base) | {".lock": b""}
    (base / ".replacing").mkdir()
    (base / "best_model").rename(base / ".replacing" / "best_model")  # died on the way out
    with pytest.raises(KeyboardInterrupt), run_directory(settings(tmp_path / "grpo"), None, overwrite=True):
        assert {item.path.parent.name for item in list_checkpoints(base / ".replaced")} == {".replaced"}
        (base / ".replaced").rename(tmp_path / "replaced")  # dies here
        raise KeyboardInterrupt
    (tmp_path / "replaced").rename(base / ".replaced")
    (base / "training.log").write_text("new")
    with pytest.raises(KeyboardInterrupt), run_directory(settings(tmp_path / "grpo"), None, overwrite=True):
        raise KeyboardInterrupt
    assert files(base) == before


def test_the_next_run_gives_back_what_a_dead_overwriting_took(tmp_path: Path) -> None:
    base, wanted = tmp_path / "grpo_masked", settings(tmp_path / "grpo")
    old_run(base)
    before = files(base) | {".lock": b""}
    assert give_back_replaced(wanted) == [] and not (base / ".lock").exists()  # nothing was overwritten
    with pytest.raises(KeyboardInterrupt), run_directory(wanted, None, overwrite=True):
        assert give_back_replaced(wanted) == []  # it lives
        (base / ".replaced").rename(tmp_path / "replaced")  # dies here
        raise KeyboardInterrupt
    (tmp_path / "replaced").rename(base / ".replaced")
    (base / "metrics.jsonl").write_text("new")
    (said,) = give_back_replaced(wanted)
    assert said.startswith(f"{base} is again the run that --overwrite was to replace") and files(base) == before
    assert give_back_replaced(wanted) == []
    # One that had its first checkpoint, and died before it removed the old run, has replaced it.
    (base / ".replaced").mkdir()
    write(base / ".replaced" / "checkpoint-9", step=9)
    assert give_back_replaced(wanted) == [] and files(base) == before


@pytest.mark.parametrize("name", [".git/config", ".env", "training.log", "training/thesis.txt", "checkpoint-5/model"])
def test_a_folder_that_no_run_made_is_not_overwritten(name: str, tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    (base / name).parent.mkdir(parents=True)
    (base / name).write_text("mine")
    with (
        pytest.raises(UsageError, match=r"grpo_masked is no run of emailrl.*--output-dir"),
        run_directory(settings(tmp_path / "grpo"), None, overwrite=True),
    ):
        pass
    assert files(base) == {name: b"mine"}


def test_a_place_that_cannot_be_written_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "e").write_text("a file")
    with (
        pytest.raises(UsageError, match=r"e/x_masked cannot be written: Not a directory\..*--output-dir"),
        run_directory(settings(tmp_path / "e" / "x"), None, overwrite=False),
    ):
        pass


def try_to_hold(base: Path, answer: Any) -> None:
    write(base / "checkpoint-1")
    try:
        with run_directory(settings(base), read_checkpoint(base / "checkpoint-1"), overwrite=False):
            answer.put("held")
    except EmailRLError as error:
        answer.put(str(error))


def test_two_processes_never_train_in_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    with run_directory(settings(tmp_path / "grpo"), None, overwrite=False) as directory:
        child = context.Process(target=try_to_hold, args=(directory, answer))
        child.start()
        assert "Another process is training in" in answer.get(timeout=60)
        child.join()
    try_to_hold(directory, answer)
    assert answer.get(timeout=60) == "held"


def test_what_resume_means(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "grpo")
    assert choose_checkpoint(wanted, None, overwrite=False) is None
    assert choose_checkpoint(wanted, "auto", overwrite=False) is None
    for which in ("latest", "best"):
        with pytest.raises(EmailRLError, match="No checkpoint under"):
            choose_checkpoint(wanted, which, overwrite=False)
    write(tmp_path / "grpo_masked" / "best_model", "best", step=4)
    write(tmp_path / "grpo_masked" / "checkpoint-6", step=6)
    found = {which: choose_checkpoint(wanted, which, overwrite=False) for which in ("auto", "latest", "best")}
    assert {which: item.metadata.step for which, item in found.items() if item} == {"auto": 6, "latest": 6, "best": 4}
    (tmp_path / "grpo_masked" / "checkpoint-6" / "trainer_state.pt").rename(tmp_path / "away")
    with pytest.raises(EmailRLError, match=r"checkpoint-6 lacks trainer_state\.pt"):
        choose_checkpoint(wanted, str(tmp_path / "grpo_masked" / "checkpoint-6"), overwrite=False)


def test_a_model_that_nobody_named_is_the_checkpoints_own(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1")
    checkpoint = read_checkpoint(tmp_path / "checkpoint-1")
    unnamed = load_settings({}, environ={}, cwd=tmp_path)
    assert unnamed.model.name != "nano"
    found, said = base_of(checkpoint, unnamed)
    assert found.model.name == "nano" and said == ["no model was named: nano, as in the checkpoint"]
    named = load_settings({"model_name": "Qwen/Qwen3-0.6B"}, environ={}, cwd=tmp_path)
    assert base_of(checkpoint, named) == (named, []) and base_of(None, unnamed) == (unnamed, [])
    with pytest.raises(EmailRLError, match="Resume with --model nano"):
        check_agrees(checkpoint, named, "d", "q")


# -- state


def test_state_and_generators_come_back_as_they_were(tmp_path: Path) -> None:
    state = RunState(step=3, cursor=Cursor(1, 4), best_accuracy=0.25, best_step=2, recent_accuracies=[0.1, 0.2])
    seed_generators(11)
    random.random(), np.random.random(), torch.rand(1)
    write(tmp_path / "checkpoint-3", step=3, state=state)
    drawn = random.random(), np.random.random(), torch.rand(3).tolist()
    seed_generators(99)
    loaded, updater = load_state(read_checkpoint(tmp_path / "checkpoint-3"))
    assert (loaded, updater) == (state, {"kl_coef": 0.5})
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn


def test_a_trainer_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    write(tmp_path / "checkpoint-1")
    torch.save({"state": Payload()}, tmp_path / "checkpoint-1" / "trainer_state.pt")
    with pytest.raises(EmailRLError, match=r"trainer_state\.pt cannot be read"):
        load_state(read_checkpoint(tmp_path / "checkpoint-1"))
    assert not (tmp_path / "ran").exists()


# -- going back


def test_what_lies_beyond_the_step_is_removed(tmp_path: Path) -> None:
    for name in ("trajectories/step", "trajectories/eval", "training/step"):
        for step in (3, 4, 5):
            path = tmp_path / f"{name}-{step:06d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}\n")
    for step in (4, 5):
        (tmp_path / "policy" / f"v-{step:06d}").mkdir(parents=True)
    (tmp_path / "policy" / ".v-000005").mkdir()
    (tmp_path / "trajectories" / ".step-000004.jsonl.77").write_text("half")
    (tmp_path / "training" / "thesis.txt").write_text("mine")
    (tmp_path / "skipped").mkdir()
    for name in ("step-000004-1.json", "step-000005-1.json", "step-000005-1.safetensors", ".step-000004-2.json"):
        (tmp_path / "skipped" / name).touch()
    for step in (2, 4, 6):
        write(tmp_path / f"checkpoint-{step}", step=step)
    write(tmp_path / "final", "final", step=6)
    said = rewind(tmp_path, RunState(step=4))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*") if "checkpoint" not in str(path))
    assert left == [
        "policy/v-000004",
        "skipped/step-000004-1.json",
        *(f"training/step-00000{step}.jsonl" for step in (3, 4)),
        "training/thesis.txt",
        *(f"trajectories/eval-00000{step}.jsonl" for step in (3, 4)),
        *(f"trajectories/step-00000{step}.jsonl" for step in (3, 4)),
    ]
    assert [item.path.name for item in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert said == [f"removed {name}, which is beyond step 4" for name in ("checkpoint-6", "final")]


def test_a_best_model_from_beyond_is_put_back_from_the_best_step_where_that_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-2", step=2)
    write(tmp_path / "best_model", "best", step=6)
    (said,) = rewind(tmp_path, RunState(step=4, best_accuracy=0.5, best_step=2))
    best = read_checkpoint(tmp_path / "best_model")
    assert (best.metadata.kind, best.metadata.step) == ("best", 2) and "step 2 again" in said
    assert (best.path / "adapter_model.safetensors").read_text() == "weights of step 2"
    write(tmp_path / "best_model", "best", step=6)
    (said,) = rewind(tmp_path, RunState(step=4, best_accuracy=0.5, best_step=0))
    assert "holds step 6" in said and read_checkpoint(tmp_path / "best_model").metadata.step == 6
