"""An engine that notes what its rollouts wait for, so that those who wait for them can tell that they hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emailrl.engines.base import Advance, Completion, Engine, LocalEngine, Request
from emailrl.ranks import Activity


@dataclass(frozen=True, slots=True)
class Noted:
    """``engine`` with its progress in ``activity``: every turn of a conversation, and every step of a local engine.

    Waiting for a server is not noted: requests have time limits of their own.
    """

    engine: Engine
    activity: Activity

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``."""

        def advanced(completion: Completion) -> Request | None:
            assert advance is not None
            self.activity.note(f"in the environment of {completion.trajectory_id}")
            following = advance(completion)
            self._sampling()
            return following

        self._sampling()
        try:
            return self.engine.generate(requests, None if advance is None else advanced)
        except BaseException:
            self.activity.end()
            raise

    def close(self) -> None:
        """See ``Engine.close``."""
        self.engine.close()

    def _sampling(self) -> None:
        engine = self.engine
        if isinstance(engine, LocalEngine):
            self.activity.note("sampling", lambda: engine.steps)
        else:
            self.activity.end()
