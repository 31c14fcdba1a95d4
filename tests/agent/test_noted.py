"""What rollouts note of their progress, so that those who wait for them learn where they hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from emailrl.agent.play import Noted
from emailrl.engines.base import Advance, Completion, Engine, Request, SamplingParams
from emailrl.ranks import Activity


class Heard(Activity):
    """Keeps what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, what: str, count: Callable[[], int] = lambda: 0) -> None:
        self.notes.append(what)

    def end(self) -> None:
        self.notes.append("")


class TwoTurns:
    """Completes each request, and its follow-ups."""

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        ended = []
        for first in requests:
            request: Request | None = first
            while request is not None:
                ended.append(Completion(request.trajectory_id, [1], [-0.5], "stop"))
                request = advance(ended[-1]) if advance else None
        return ended

    def close(self) -> None: ...


class Local(TwoTurns):
    """The same in this process."""

    steps = 0


@pytest.mark.parametrize(("engine", "sampling"), [(Local(), "sampling"), (TwoTurns(), "")])
def test_every_turn_is_progress_and_names_its_trajectory(engine: Engine, sampling: str) -> None:
    """Servers have time limits of their own: nothing is under way here while they sample."""
    activity, turns = Heard(), []

    def advance(completion: Completion) -> Request | None:
        assert activity.notes[-1] == "in the environment of train-1"
        turns.append(completion)
        return Request("train-1", SamplingParams(8)) if len(turns) < 2 else None

    ended = Noted(engine, activity).generate([Request("train-1", SamplingParams(8))], advance)
    assert ended == turns and len(turns) == 2
    assert activity.notes == [sampling, *["in the environment of train-1", sampling] * 2]
