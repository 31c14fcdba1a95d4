"""Parts of a user's own in whole runs: what fails is counted and told, and never trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end.conftest import MakeSettings

from emailrl.base.errors import UsageError
from emailrl.records import read_records, read_trajectories
from emailrl.training.loop import train

FRAGILE = """
from emailrl.agent import MailEnvironment


class Fragile(MailEnvironment):
    made = 0

    def __init__(self, scenario, mailbox, settings):
        super().__init__(scenario, mailbox, settings.agent.model_copy(update={"max_turns": 2}))
        Fragile.made += 1
        self.breaks = Fragile.made % 3 == 0

    def start(self):
        if self.breaks:
            raise KeyError("worn out")
        return super().start()
"""


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    return tmp_path / "fragile.py"


def test_trajectories_of_an_environment_that_breaks_are_counted_and_not_trained(
    make_settings: MakeSettings, fragile: Path
) -> None:
    settings = make_settings(environment=f"{fragile}:Fragile", max_steps=2, eval_steps=9)
    run = train(settings).run_dir
    for number, step in enumerate(read_records(run / "metrics.jsonl"), 1):
        assert step["exceptions"] == step["dropped"]["trajectories_exception"] == 2  # every third of six
        played = list(read_trajectories(run / f"trajectories/step-{number:06d}.jsonl"))
        name = f"{fragile}:Fragile"
        told = f"EmailRLError: start() of the environment {name} raised: {fragile}, line 15: KeyError: 'worn out'"
        assert {t.exception for t in played} == {None, told}
        noted = {line["id"]: line for line in read_records(run / f"training/step-{number:06d}.jsonl")}
        for trajectory in played:
            assert (noted[trajectory.id]["dropped"] == "exception") == (trajectory.exception is not None)
            assert not (trajectory.exception and noted[trajectory.id]["samples"])


def test_nothing_is_written_for_an_environment_that_does_not_belong(make_settings: MakeSettings, fragile: Path) -> None:
    settings = make_settings(environment=f"{fragile}:Fragile", mode="simple")
    with pytest.raises(UsageError, match="Mode simple trains on a static email prompt"):
        train(settings)
    assert not list(settings.output.output_dir.parent.glob("grpo*"))
