"""``emailrl train --resume`` alone goes on with the options the run was begun with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.commands import begin, exit_code
from same_run import assert_same_run, lines

from emailrl.checkpoints import list_checkpoints, read_checkpoint
from emailrl.training.loop import TrainResult

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
    options: Callable[..., dict[str, Any]],
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
