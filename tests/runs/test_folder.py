"""Directories of runs: which one a run takes, what overwriting replaces and gives back, who holds it."""

from __future__ import annotations

import multiprocessing
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from runs.run_files import PLANTED, plant, tree, write

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import list_checkpoints
from emailrl.runs import folder
from emailrl.runs.folder import RECORD_FOLDERS, clear_run, give_back_replaced, held, new_directory
from emailrl.runs.resume import resumed, rewind, run_to_resume
from emailrl.training.state import RunState


def test_a_new_run_takes_the_first_free_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, another = tmp_path / "grpo_masked", tmp_path / "grpo_rollout"
    base.mkdir()
    with new_directory(base, overwrite=False) as first, new_directory(base, overwrite=False) as second:
        assert (first, second) == (base, tmp_path / "grpo_masked-2")  # the first is there, but empty

    def taken_meanwhile(free: Path) -> Path:
        monkeypatch.undo()
        other.enter_context(held(another))
        return free

    with ExitStack() as other:
        monkeypatch.setattr(folder, "free_directory", taken_meanwhile)
        with new_directory(another, overwrite=False) as third:
            assert third == tmp_path / "grpo_rollout-2" and (another / ".lock").exists()


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


@pytest.mark.parametrize("remove", [clear_run, lambda run: rewind(run, RunState(step=0))], ids=["clear", "rewind"])
def test_a_runs_own_records_are_the_same_names_for_all_who_remove_them(tmp_path: Path, remove: Any) -> None:
    own = ["policy/v-000001", "policy/.v-000001.trash", "skipped/step-000001-1.json"]
    own += ["skipped/.step-000001-1.json.7", "trajectories/.eval-000001.jsonl.7"]
    mine = ["policy/step-3", "policy/v-1.jsonl", "training/step-000001.txt"]
    for name in own + mine:
        (tmp_path / name).mkdir(parents=True)
    remove(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == set(mine)
    shutil.rmtree(tmp_path / "policy")
    half = [f".{name}.7" for name in ("metrics.jsonl", "evaluations.jsonl", "confirmed.json", "curve.png", "curve.svg")]
    for name in (*half, ".notes.md.7", ".metrics.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with held(tmp_path):  # a killed process was writing them
        assert {path.name for path in tmp_path.glob(".*")} == {".notes.md.7", ".metrics.jsonl", ".lock"}


def test_overwriting_replaces_what_a_run_made_and_nothing_else(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    with new_directory(tmp_path / "grpo_masked", overwrite=True) as directory:
        assert directory == base
        (base / "metrics.jsonl").write_text("new")
        write(base / "checkpoint-1")
    left = {name for name in files(base) if not name.startswith("checkpoint-1/")}
    mine = {".git/config", ".env", "notes.md", "training/thesis.txt", "trajectories/.mine"}
    assert left == mine | {".lock", "metrics.jsonl"} and not (base / "policy").exists()
    assert (base / "metrics.jsonl").read_text() == "new" and (base / ".env").read_text() == "mine"


def test_a_run_without_a_checkpoint_gives_the_overwritten_one_back(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    before = files(base)
    for _ in range(2):  # it can be repeated
        with pytest.raises(OSError, match="no W&B"), new_directory(tmp_path / "grpo_masked", overwrite=True):
            assert not list_checkpoints(base)
            (base / "policy" / "v-000000").mkdir(parents=True)
            (base / "metrics.jsonl").write_text("new")
            raise OSError("no W&B")
        assert files(base) == before | {".lock": b""}


def overwriting_dies(base: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_directory(base, overwrite=True):
        assert {item.path.parent.name for item in list_checkpoints(base / ".replaced")} == {".replaced"}
        assert give_back_replaced(base) == []  # it lives
        (base / ".replaced").rename(base.parent / "replaced")  # dies here
        raise KeyboardInterrupt
    (base.parent / "replaced").rename(base / ".replaced")
    (base / "metrics.jsonl").write_text("new")


def test_the_next_run_gives_back_what_a_dead_overwriting_took(tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    old_run(base)
    before = files(base) | {".lock": b""}
    assert give_back_replaced(base) == [] and not (base / ".lock").exists()  # nothing was overwritten
    (base / ".replacing").mkdir()
    (base / "best_model").rename(base / ".replacing" / "best_model")  # died on the way out
    overwriting_dies(base)
    with pytest.raises(KeyboardInterrupt), new_directory(base, overwrite=True):
        raise KeyboardInterrupt
    assert files(base) == before
    overwriting_dies(base)
    (said,) = give_back_replaced(base)
    assert said.startswith(f"{base} is restored: the run that --overwrite started") and files(base) == before
    assert give_back_replaced(base) == []
    # One that had its first checkpoint, and died before it removed the old run, has replaced it.
    (base / ".replaced").mkdir()
    write(base / ".replaced" / "checkpoint-9", step=9)
    assert give_back_replaced(base) == [] and files(base) == before


def test_a_run_that_died_before_its_first_checkpoint_is_found(tmp_path: Path) -> None:
    def found(mode: str = "masked") -> Path | None:
        return run_to_resume("auto", tmp_path / "grpo", mode)

    base = tmp_path / "grpo_masked"
    base.mkdir()
    (base / "training.log").write_text("x")
    assert found() is None  # no run was ever held here
    with held(base):
        pass
    assert found() == base and found("rollout") is None
    (base / "checkpoint-5").mkdir()  # damaged: it may hold what its owner can still use
    assert found() is None
    with held(tmp_path / "grpo_masked-10"), held(tmp_path / "grpo_masked-9"):
        assert found() == tmp_path / "grpo_masked-10"


@pytest.mark.parametrize("name", [".git/config", ".env", "training.log", "training/thesis.txt", "checkpoint-5/model"])
def test_a_folder_that_no_run_made_is_not_overwritten(name: str, tmp_path: Path) -> None:
    base = tmp_path / "grpo_masked"
    (base / name).parent.mkdir(parents=True)
    (base / name).write_text("mine")
    with pytest.raises(UsageError, match=r"is not an emailrl run.*--out"), new_directory(base, overwrite=True):
        pass
    assert files(base) == {name: b"mine"}


@pytest.mark.parametrize(("name", "said"), [("e/x_masked", "cannot be written"), ("post\udcff", "is not valid UTF-8")])
def test_a_place_that_cannot_be_written_names_the_flag(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "e").write_text("a file")
    with pytest.raises(UsageError, match=rf"{said}.*--out"), new_directory(tmp_path / name, overwrite=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


OF_A_STEP = [f"{folder}/step-000001.jsonl" for folder in ("trajectories", "training")]
UNFINISHED = [f".checkpoint-2.{end}" for end in ("incoming", "outgoing", "trash")]
WRITTEN = [
    *(".", ".lock", "training.log", "metrics.jsonl", "evaluations.jsonl", "confirmed.json"),
    *("curve.png", ".metrics.jsonl.7", "wandb", ".wandb", "wandb/latest-run", "wandb/run-1/logs/debug.log"),
    *("tensorboard", "tensorboard/events", "skipped", "skipped/step-000001-1.json", *RECORD_FOLDERS, *OF_A_STEP),
    *("policy/v-000001", "policy/.v-000001", "policy/.v-000001.trash", "policy/v-000001/adapter", *UNFINISHED),
    *("checkpoint-2", "checkpoint-2/metadata.json", "checkpoint-3", "best_model", "final"),
    *(".replaced", ".replacing", ".replaced/wandb", ".replacing/trajectories"),
]
"""Names in a run's directory; the first is the directory itself."""


def resumes(base: Path) -> None:
    with held(base):
        rewind(base, RunState(step=0))


def overwrites(base: Path) -> None:
    with new_directory(base, overwrite=True):
        pass


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("enter", [resumes, overwrites, give_back_replaced])
def test_who_enters_a_directory_finds_only_its_own_files(tmp_path: Path, kind: str, enter: Any) -> None:
    """Otherwise neither the directory nor what it leads to changes."""
    victim, restores = tmp_path / "victim", enter is give_back_replaced
    old_run(victim)
    before = tree(victim)
    for number, name in enumerate((".replaced", ".replacing", ".lock", "training.log") if restores else WRITTEN):
        base = tmp_path / f"{number}" / "grpo_masked"
        shutil.copytree(victim, base)
        if restores:
            (base / ".replaced").mkdir()
        plant(base / name, kind, victim)
        own = tree(base.parent)
        with suppress(UsageError) if restores else pytest.raises(UsageError):  # a broken link is no run to restore
            enter(base)
        assert tree(victim) == before and tree(base.parent) == own, name


@pytest.mark.parametrize("kind", PLANTED)
def test_a_new_run_is_written_where_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    victim, base = tmp_path / "victim", Path("outputs/grpo_masked")
    old_run(victim)
    old_run(base)
    before = tree(victim)
    for path in (base / "trajectories", Path("outputs/grpo_masked-2"), base, base.parent):
        plant(path, kind, victim)
        try:
            with new_directory(base, overwrite=False) as directory:
                (directory / "training.log").write_text("new")
            assert directory.resolve().parent == tmp_path / "outputs"  # the next free number
        except UsageError as error:
            assert path != base / "trajectories"
            assert kind != "link to a folder" or f"--out {path.resolve()}" in str(error)
        else:
            assert path != base.parent
        assert tree(victim) == before, path


def test_a_run_reached_through_a_link_is_resumed_by_its_real_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old_run(tmp_path / "real" / "run")
    Path("link").symlink_to("real")
    with pytest.raises(UsageError, match=f"--resume {tmp_path}/real/run"), resumed("link/run", Path("link/run")):
        pass


def test_links_of_wandbs_stay(tmp_path: Path) -> None:
    base, cache = tmp_path / "grpo_masked", tmp_path / "core.log"
    old_run(base)
    logs = base / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    cache.write_text("W&B's own")
    (base / "wandb" / "latest-run").symlink_to("run-1")
    (logs / "debug-core.log").symlink_to(cache)
    with held(base):
        assert (base / "wandb" / "latest-run").is_symlink()
    clear_run(base)
    assert not (base / "wandb").exists() and cache.read_text() == "W&B's own"


def try_to_hold(base: Path, answer: Any) -> None:
    write(base / "checkpoint-1")
    try:
        with held(base):
            answer.put("held")
    except EmailRLError as error:
        answer.put(str(error))


def test_two_processes_never_train_in_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    with new_directory(tmp_path / "grpo_masked", overwrite=False) as directory:
        child = context.Process(target=try_to_hold, args=(directory, answer))
        child.start()
        assert "Another process is training in" in answer.get(timeout=300)
        child.join()
    try_to_hold(directory, answer)
    assert answer.get(timeout=300) == "held"
