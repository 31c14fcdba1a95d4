"""Which run goes on, which begins anew, and what a run refuses to go on with."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from same_run import everything, lines, same, state_of

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import find_checkpoint
from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.training import run as run_module
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater

MakeSettings = Callable[..., Settings]


def test_resuming_from_an_older_checkpoint_drops_what_came_after(
    finished: TrainResult, make_settings: MakeSettings
) -> None:
    settings = make_settings(save_total_limit=9)
    run = train(settings).run_dir
    kept = everything(run)
    for earlier, removed in (
        (str(run / "checkpoint-2"), "checkpoint-4, checkpoint-6, final"),
        ("best", "checkpoint-2, checkpoint-4, checkpoint-6, final"),
    ):
        with pytest.raises(UsageError, match=rf"removes later work in .*steps \d to 6, {removed}\.") as refused:
            train(settings, resume=earlier)
        assert "--overwrite" in refused.value.hint and everything(run) == kept
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
    evaluate, update = run_module.evaluate, Updater.train

    def failing(*args: Any, step: int, **how: Any) -> Any:
        if step == 2:
            raise EmailRLError("The mailbox is away.")
        return evaluate(*args, step=step, **how)

    def broken(self: Updater, *given: Any, step: int) -> Any:
        if step == 3:
            raise RuntimeError("a crash")
        return update(self, *given, step=step)

    with monkeypatch.context() as patch, pytest.raises(EmailRLError):
        patch.setattr(run_module, "evaluate", failing)
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
    assert said == [f"Nothing left to do in {first.run_dir}: it ended after step 2, all steps done."]
    assert train(make_settings(max_steps=1), resume="auto", progress=said.append) == first and len(said) == 2
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
    fourth = train(settings, resume=str(third.run_dir), overwrite=True)  # consent to lose what is not lost
    assert fourth == third and (first.run_dir / "notes.txt").read_text() == "mine"


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
    from emailrl.mail.build import build_database
    from emailrl.mail.demo import make_world

    build_database(
        (mail for n, s in enumerate(["train", "train"]) for mail in make_world(7, s, n).emails), tmp_path / "o.db"
    )
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model_name": str(copied)}, r"was trained from .*, not from .*Resume with --model"),
        ({"questions": fewer}, r"other questions: QUESTIONS was .*, now .*questions\.jsonl\."),
        ({"train_dataset_size": 4}, r"other questions: TRAIN_DATASET_SIZE was 3000, now 4\."),
        ({"emailrl_db": tmp_path / "o.db"}, r"on the database .*mail\.db, not on .*o\.db\. Resume with --db"),
        ({"lora_rank": 8}, "lora_rank 4, not 8.*LORA_RANK=4"),
    ]
    for changes, complaint in refused:
        with pytest.raises(UsageError, match=complaint):
            train(make_settings(max_steps=2, **changes), resume="latest")
    with pytest.raises(UsageError, match="is from mode masked"):
        train(make_settings(max_steps=2, mode="rollout"), resume=str(run / "final"))
    with pytest.raises(EmailRLError, match="No rollout run has a checkpoint"):
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
    assert said[-1].endswith("the run being replaced is restored.")
    assert everything(run) == kept and not (run / ".replaced").exists()
