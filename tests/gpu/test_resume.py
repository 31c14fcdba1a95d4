"""A run on a GPU goes on where it was, though kernels that add in any order keep it from being bit for bit the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpu.loop import RunLeft, finish, make_workplace, start

from emailrl.records import read_trajectories

pytestmark = pytest.mark.gpu


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Four steps, and the last two again from the checkpoint of the second."""
    folder = make_workplace(tmp_path / "work")
    finish(start(folder, "--max-steps", "4", "--save-steps", "2", "--out", "outputs/whole"))
    whole, again = (RunLeft(folder / "outputs" / f"{name}_masked") for name in ("whole", "again"))
    shutil.copytree(whole.directory, again.directory)
    resume = ("--resume", str(again.directory / "checkpoint-2"), "--overwrite")
    finish(start(folder, "--max-steps", "4", "--out", "outputs/again", *resume))
    assert [one["step"] for one in again.metrics] == [1, 2, 3, 4]
    third = Path("trajectories") / "step-000003.jsonl"
    left, right = (
        {one.id.split(":", 1)[-1]: one for one in read_trajectories(run.directory / third)} for run in (whole, again)
    )
    assert left.keys() == right.keys()
    assert [one.scenario.id for one in left.values()] == [one.scenario.id for one in right.values()]
    alike = sum(one.messages == right[name].messages for name, one in left.items()) / len(left)
    print(f"step 3: {alike:.0%} of {len(left)} conversations the same")
    assert alike > 0.5
    rates = [[one["learning_rate"] for one in run.metrics] for run in (whole, again)]
    assert rates[0] == rates[1]
