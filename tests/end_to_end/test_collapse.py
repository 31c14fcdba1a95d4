"""A run that collapses, stops, and goes back by the command it names."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.conftest import settle
from same_run import everything

from emailrl.checkpoints import list_checkpoints
from emailrl.cli.app import main
from emailrl.records import read_records

Options = Callable[..., dict[str, Any]]


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
