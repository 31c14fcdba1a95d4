"""Runs that go on: resumed, overwritten, with their own options, after a collapse, with each algorithm bit for bit."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.commands import begin, exit_code, interrupted
from end_to_end.conftest import MakeSettings, Options, settle
from same_run import assert_same_run, everything, lines, same, state_of

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import find_checkpoint, list_checkpoints, read_checkpoint
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
    shutil.copytree(workplace / "model", tmp_path / "copied")
    for changes, complaint in (
        ({"model_name": str(tmp_path / "copied")}, r"was trained from .*, not from .*Resume with --model"),
        ({"train_dataset_size": 4}, r"other questions: TRAIN_DATASET_SIZE was 3000, now 4\."),
    ):
        with pytest.raises(UsageError, match=complaint):
            train(make_settings(max_steps=2, **changes), resume="latest")
    with pytest.raises(UsageError, match="is from mode masked"):
        train(make_settings(max_steps=2, mode="rollout"), resume=str(run / "final"))
    weights = run / "final" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EmailRLError, match=r"adapter_model\.safetensors is damaged"):
        train(settings, resume="latest")
    weights.write_bytes(content)
    assert everything(run) == kept
    (tmp_path / "model").symlink_to(workplace / "model")  # the same model by another path
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


def test_an_overwritten_run_comes_back_where_the_new_one_ends_before_its_first_checkpoint(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings(max_steps=1)
    run = train(settings).run_dir
    kept = everything(run)
    said: list[str] = []
    with interrupted(run_module.TrainingRun, "measure"):
        train(settings, overwrite=True, progress=said.append)
    assert said[-1].endswith("the run being replaced is restored.")
    assert everything(run) == kept and not (run / ".replaced").exists()


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``emailrl train`` in ``tmp_path``, with these arguments and environment: exit code and what it prints."""
    printed = tmp_path / "output.txt"

    def run(*arguments: str, **environ: str) -> tuple[int, str]:
        printed.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            code = exit_code(begin(tmp_path, "train", *arguments))
        return code, printed.read_text()

    return run


def test_a_run_goes_on_with_its_own_options_and_with_those_given_now(
    command: Command,
    options: Options,
    tmp_path: Path,
    finished: TrainResult,
) -> None:
    chosen = options(tmp_path, max_steps=2)
    own = chosen.pop("reward")
    chosen["output_dir"] = tmp_path / "outputs" / "grpo"  # the default, from here
    names = {"model_name", "emailrl_db", "kl_target", "kl_horizon"}
    environ = {name.upper(): str(value) for name, value in chosen.items()}
    environ["EMAILRL_QUESTIONS"] = environ.pop("QUESTIONS")
    assert names <= chosen.keys()
    code, said = command("--reward", own, **environ)
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
    assert lines(run / "metrics.jsonl") == lines(finished.run_dir / "metrics.jsonl")
    assert_same_run(run, finished.run_dir)
    assert read_checkpoint(run / "final").metadata.settings["lora"]["lora_rank"] == 4


class Terminal(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answered", [False, True], ids=["flag", "yes"])
def test_a_run_whose_kl_runs_away_stops_and_the_command_it_names_goes_on_from_before(
    answered: bool,
    options: Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def emailrl(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, "".join(capsys.readouterr())

    given = options(tmp_path, max_steps=8, on_collapse="stop", kl_target=1e-6)
    settle(tmp_path, given)  # its reward is code
    monkeypatch.chdir(tmp_path)
    code, said = emailrl("emailrl train")
    assert code == 1 and "Warning at step 5: the KL to the reference policy is" in said
    run = tmp_path / "grpo_masked"
    assert {item.path.name: item.metadata.step for item in list_checkpoints(run)} == {
        "best_model": 0, "checkpoint-2": 2, "checkpoint-4": 4, "final": 5,
    }  # fmt: skip
    last = said.strip().splitlines()[-1]
    assert (
        "Stopped at step 5 on signs of collapse (ON_COLLAPSE=stop). Make that change and return to step 0 (before this)"
        in last
    )
    (back,) = re.findall(r"emailrl train --resume \S+ --overwrite", last)

    kept = everything(run)
    code, said = emailrl(back.removesuffix(" --overwrite"))
    assert code == 2 and everything(run) == kept
    assert said.splitlines()[-1].endswith(
        "steps 1 to 5, checkpoint-2, checkpoint-4, final. Add --overwrite to do so, or copy the run first to keep both."
    )
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, said = emailrl(back.removesuffix(" --overwrite"))
    assert code == 1 and "Remove it and continue?" in said and everything(run) == kept
    monkeypatch.setattr(sys, "stdin", Terminal("y\n" if answered else ""))
    back = back.removesuffix(" --overwrite") if answered else back

    monkeypatch.setenv("KL_TARGET", "10")  # else the same happens again: the run goes on with its own options
    monkeypatch.setenv("ON_COLLAPSE", "warn")  # an untrained policy never answers, which is a sign of its own
    code, said = emailrl(back)
    assert code == 0 and "Done after step 8: all steps done." in said and "the KL to the reference" not in said
    assert [line["step"] for line in read_records(run / "metrics.jsonl")] == list(range(1, 9))


REFILL = {"filter_on": "reward", "filter_low": 0.4, "filter_high": 0.7, "overlong_buffer": 0, "max_refill_rounds": 2}
"""Random completions have about as many even as odd ids: some groups fall out, some stay."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, REFILL if algorithm.dynamic_filtering else {}) for name, algorithm in ALGORITHMS.items()),
    ("grpo", {"dynamic_filtering": True, "update_epochs": 2} | REFILL),
    ("ppo", {"critic_warmup_steps": 2, "update_epochs": 2, "max_steps": 4}),
]


@pytest.mark.parametrize(("algorithm", "changes"), CASES, ids=[f"{name}-{len(changes)}" for name, changes in CASES])
def test_a_resumed_run_equals_the_uninterrupted(
    algorithm: str, changes: dict[str, Any], make_settings: MakeSettings
) -> None:
    wanted: dict[str, Any] = {
        "algorithm": algorithm, "max_steps": 3, "save_total_limit": 1, "lr_scheduler": "cosine",
        "per_device_train_batch_size": 3, "min_group_std": 0.01,
    } | changes  # fmt: skip
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
