"""The three modes as data: source of trajectories, reward, and which tokens are trained.

=========  ==============================  ====================  ==============================  ==================
mode       trajectories                    reward                trained tokens                  bounded by
=========  ==============================  ====================  ==============================  ==================
masked     agent rollouts                  as the settings say   sampled ones                    MAX_STEPS
rollout    agent rollouts                  as the settings say   all after the prompt, tool      MAX_STEPS, epochs
                                                                 results included
simple     one completion on a static      ``rewards.heuristic`` sampled ones (the completion)   MAX_STEPS, epochs
           prompt with a few mails
=========  ==============================  ====================  ==============================  ==================

In every mode, evaluations are agent rollouts with the settings' reward, so the accuracy that selects the best model is
the one ``benchmark`` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emailrl.agent.runner import Environment
from emailrl.agent.static_prompt import StaticPromptEnvironment
from emailrl.records.trajectory import Scenario
from emailrl.training.algorithms import LossMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from emailrl.mail import Mailbox
    from emailrl.settings import AgentSettings


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train; the loop reads these fields and never the name."""

    name: str
    summary: str
    """Description for a run's header."""
    loss_mask: LossMask
    make_environment: Callable[[AgentSettings, Scenario, Mailbox], Environment] | None = None
    """Replaces the settings' environment; None keeps it."""
    reward: str | None = None
    """Replaces the settings' reward, by name; None keeps it."""
    epochs_bound: bool = False
    """NUM_TRAIN_EPOCHS ends the run; otherwise the questions repeat until MAX_STEPS."""


def static_prompt(agent: AgentSettings, scenario: Scenario, mailbox: Mailbox) -> Environment:
    """One prompt with the question and a few emails."""
    return StaticPromptEnvironment(scenario, mailbox, question_template=agent.question_template)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("masked", "real rollouts, training only the tokens the policy sampled", "sampled"),
        Mode("rollout", "real rollouts, training everything after the prompt", "after_prompt", epochs_bound=True),
        Mode(
            "simple",
            "static prompts and a heuristic reward, for smoke tests",
            "completion",
            make_environment=static_prompt,
            reward="heuristic",
            epochs_bound=True,
        ),
    )
}
