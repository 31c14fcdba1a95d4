"""Options of commands come from the declarations of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from emailrl.cli.options import Overrides, setting_options


@pytest.fixture
def run() -> Any:
    """Run a command of five settings' options; returns (exit code, output, what the command got)."""
    got: dict[str, Any] = {}
    app = typer.Typer(rich_markup_mode=None, context_settings={"terminal_width": 200})

    @app.command()
    @setting_options("model_name mode db", "beta per_device_train_batch_size tensorboard target_accuracy")
    def command(overrides: Overrides, twice: bool = False) -> None:
        """Do it."""
        got.update(overrides, twice=twice)

    def call(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, done.output, got

    return call


def test_the_command_gets_what_was_given_by_setting_name(run) -> None:
    arguments = "--model nano --batch-size 3 --beta 0.5 --db a/b.db --tensorboard --twice"
    code, _, got = run(*arguments.split())
    assert code == 0
    assert got == {
        "model_name": "nano", "mode": None, "db": Path("a/b.db"), "beta": 0.5, "per_device_train_batch_size": 3,
        "tensorboard": True, "target_accuracy": None, "twice": True,
    }  # fmt: skip


def test_bounds_and_types_are_the_settings_own(run) -> None:
    for wrong in ("--batch-size 0", "--batch-size 1.5", "--beta=-1", "--target-accuracy 1.1", "--beta much"):
        assert run(*wrong.replace("=", " ").split())[0] == 2, wrong
    assert run("--target-accuracy", "1", "--beta", "0")[0] == 0
