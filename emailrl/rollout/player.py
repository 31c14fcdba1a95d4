"""Play trajectories, each on its scenario's mailbox, all with one engine; audited but not scored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from emailrl.engines.base import Engine, SamplingParams
from emailrl.environment.custom import MAIL, load_task, mail_agent
from emailrl.rollout.audit import audit
from emailrl.rollout.runner import Environment, derive_seed, run
from emailrl.trajectory import Scenario, Trajectory

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.policy.load import Policy
    from emailrl.settings import Settings
    from emailrl.store import Mailbox

MakeEnvironment = Callable[[Scenario, "Mailbox", "Settings"], Environment]
"""Makes the environment of one trajectory on the scenario's open mailbox, which stays open until the rollouts end."""


class Plays(Protocol):
    """Interface for playing trajectories, in this process or several."""

    def play(
        self,
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        *,
        seed: int,
        progress: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """Play trajectories that hold only ids and metadata; returns them in order of completion.

        A trajectory's samples depend only on ``seed`` and its id. An exception in one is recorded in it; ``progress``
        is called with each one as it ends. Raises TokenDriftError if the token audit fails.
        """
        ...


class Player:
    """Plays with one engine. ``renderer`` is None for chat engines.

    ``make_environment`` creates the environment on a scenario's mailbox in ``db``; the mail agent by default.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer | None,
        settings: Settings,
        db: Path,
        *,
        make_environment: MakeEnvironment = mail_agent,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.settings = settings
        self.db = db
        self.make_environment = make_environment

    def play(
        self,
        trajectories: Sequence[Trajectory],
        sampling: SamplingParams,
        *,
        seed: int,
        progress: Callable[[Trajectory], None] | None = None,
    ) -> Sequence[Trajectory]:
        """See ``Plays.play``; trajectories are filled in place."""
        with ExitStack() as opened:
            run(
                [self.open_environment(trajectory.scenario, opened) for trajectory in trajectories],
                self.engine,
                self.renderer,
                sampling,
                seeds=[derive_seed(seed, trajectory.id) for trajectory in trajectories],
                trajectories=trajectories,
                progress=progress,
                stale_allowed=self.settings.vllm.stale_spans == "correct",
            )
        for trajectory in trajectories:
            if trajectory.exception is None:
                audit(trajectory)
        return trajectories

    def on(self, engine: Engine) -> Self:
        """The same player with another engine."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def open_environment(self, scenario: Scenario, opened: ExitStack) -> Environment:
        """The environment of a scenario, on its mailbox, which is closed with ``opened``."""
        from emailrl.store import open_mailbox

        agent = self.settings.agent
        mailbox = open_mailbox(
            self.db,
            scenario.inbox_address,
            until=scenario.query_date,
            order=agent.search_order,
            without_keywords=agent.search_without_keywords,
        )
        opened.enter_context(closing(mailbox))
        return self.make_environment(scenario, mailbox, self.settings)


def build_player(
    settings: Settings, policy: Policy, engine: Engine, *, make_environment: MakeEnvironment | None = None
) -> Player:
    """A player on ``settings.store.db`` that renders with the policy's own tokenizer and template.

    ``settings.agent.environment`` sets the environment and its tools; ``make_environment`` overrides it and uses the
    mail tools. Raises UsageError for an environment that cannot be loaded.
    """
    from emailrl.engines.renderer import ChatRenderer

    agent = settings.agent
    task = load_task(MAIL if make_environment else agent.environment, agent)
    renderer = ChatRenderer(policy.tokenizer, task.tools)
    return Player(engine, renderer, settings, settings.store.db, make_environment=make_environment or task.make)
