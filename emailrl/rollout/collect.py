"""Collect groups: several rollouts of each scenario under one policy, played, audited and scored."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from emailrl.engines.base import Engine, SamplingParams
from emailrl.environment.custom import MAIL, load_task, mail_agent
from emailrl.rollout.audit import audit
from emailrl.rollout.runner import Environment, derive_seed, run
from emailrl.trajectory import Scenario, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.policy.load import Policy
    from emailrl.settings import Settings
    from emailrl.store import Mailbox

MakeEnvironment = Callable[[Scenario, "Mailbox", "Settings"], Environment]
"""Makes the environment of one trajectory on the scenario's open mailbox, which stays open until the rollouts end."""


class Scores(Protocol):
    """What the collector asks of ``rewards.Scorer``."""

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Fill rewards in place."""
        ...


class Collector:
    """Plays scenarios with one engine. ``renderer`` is None for chat engines.

    ``make_environment`` says what is played on a scenario's mailbox in ``db``; by default the mail agent.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer | None,
        settings: Settings,
        scorer: Scores,
        db: Path,
        *,
        run_id: str = "",
        make_environment: MakeEnvironment = mail_agent,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.settings = settings
        self.scorer = scorer
        self.db = db
        self.run_id = run_id
        self.make_environment = make_environment

    def on(self, engine: Engine) -> Collector:
        """The same collector, sampling from another engine."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def collect(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        *,
        step: int,
        seed: int,
        temperature: float | None = None,
        split_label: str = "train",
        progress: Callable[[Trajectory], None] | None = None,
        played: Mapping[str, Trajectory] = MappingProxyType({}),
    ) -> list[TrajectoryGroup]:
        """Roll out every scenario ``group_size`` times and score what came of it; one group for each, in their order.

        ``temperature`` None takes that of training rollouts. What a trajectory samples depends on seed, step, label,
        scenario and its number in the group alone. An exception in one trajectory is recorded in it; ``progress`` hears
        of each one as it ends, before it is scored. Those ``played`` before, by id, take their places again, and are
        scored where they have no reward. Raises TokenDriftError when the token audit fails.
        """
        groups = self._empty_groups(scenarios, group_size, step, split_label, played)
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        trajectories = [trajectory for trajectory in everything if trajectory.id not in played]
        agent = self.settings.agent
        sampling = SamplingParams(
            agent.max_tokens,
            agent.temperature if temperature is None else temperature,
            top_p=agent.top_p,
            top_k=agent.top_k,
        )
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
        self.scorer.score([trajectory for trajectory in everything if not trajectory.reward_terms])
        return groups

    def _empty_groups(
        self,
        scenarios: Sequence[Scenario],
        group_size: int,
        step: int,
        label: str,
        played: Mapping[str, Trajectory],
    ) -> list[TrajectoryGroup]:
        """Groups of trajectories, unplayed but for those ``played``.

        A scenario that comes twice in one step gets a group each time.
        """
        times: Counter[str] = Counter()
        groups = []
        for scenario in scenarios:
            times[scenario.id] += 1
            repeat = f".{times[scenario.id]}" if times[scenario.id] > 1 else ""
            group_id = f"{label}-{step:06d}-{scenario.id}{repeat}"
            members = [
                played.get(f"{group_id}-{member}")
                or Trajectory(
                    f"{group_id}-{member}",
                    group_id,
                    scenario,
                    run_id=self.run_id,
                    step=step,
                    mode=self.settings.training.mode,
                )
                for member in range(group_size)
            ]
            groups.append(TrajectoryGroup(group_id, scenario, members))
        return groups

    def open_environment(self, scenario: Scenario, opened: ExitStack) -> Environment:
        """What is played for a scenario, on its mailbox, which is closed with ``opened``."""
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


def build_collector(
    settings: Settings,
    policy: Policy,
    engine: Engine,
    *,
    scorer: Scores | None = None,
    run_id: str = "",
    make_environment: MakeEnvironment | None = None,
) -> Collector:
    """A collector on ``settings.store.db`` that renders with the policy's own tokenizer and template.

    What is played, and with which tools, ``settings.agent.environment`` says; ``make_environment`` takes its place,
    with the mail tools. Raises UsageError for an environment that cannot be loaded.
    """
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.rewards.build import build_scorer

    agent = settings.agent
    task = load_task(MAIL if make_environment else agent.environment, agent)
    return Collector(
        engine,
        ChatRenderer(policy.tokenizer, task.tools),
        settings,
        scorer or build_scorer(settings),
        settings.store.db,
        run_id=run_id,
        make_environment=make_environment or task.make,
    )


def build_chat_collector(settings: Settings, *, scorer: Scores | None = None) -> Collector:
    """A collector that plays with the chat server of ``settings.openai``, without a policy; its engine is to be closed.

    Raises UsageError for an environment that cannot be loaded, or a missing key.
    """
    from emailrl.engines import build_chat_engine
    from emailrl.rewards.build import build_scorer

    task = load_task(settings.agent.environment, settings.agent)
    scorer = scorer or build_scorer(settings)
    engine = build_chat_engine(settings, task.tools)
    return Collector(engine, None, settings, scorer, settings.store.db, make_environment=task.make)
