"""An opened policy: the model, an optional adapter, and the engine that samples from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emailrl.engines import PolicyEngine, build_engine
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.model.resolve import with_token_limit
from emailrl.settings import Settings


@dataclass(frozen=True, slots=True)
class OpenPolicy:
    """A loaded policy and its engine; the caller closes it."""

    settings: Settings
    """The effective settings: those given, within the model's own limits."""
    policy: Policy
    engine: PolicyEngine

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def open_policy(settings: Settings, adapter: Path | None = None) -> OpenPolicy:
    """Load the base model that the settings name, and an engine that samples from it with ``adapter``.

    Raises the errors of `load_policy` and `build_engine`.
    """
    policy = load_policy(settings)
    settings = settings.model_copy(update={"agent": with_token_limit(settings.agent, policy.model)})
    opened = OpenPolicy(settings, policy, build_engine(settings, policy))
    if adapter is not None:
        try:
            opened.engine.load_adapter(adapter, str(adapter.absolute()))
        except BaseException:
            opened.close()
            raise
    return opened
