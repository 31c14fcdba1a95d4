"""An opened policy: the model, an optional adapter, and the engine that samples from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.engines import PolicyEngine, build_engine
from emailrl.model.load import Policy, load_policy
from emailrl.model.resolve import with_token_limit
from emailrl.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def open_policy(
    settings: Settings, adapter: Path | None = None, *, trainable: bool = False, mesh: DeviceMesh | None = None
) -> OpenPolicy:
    """Load the base model that the settings name, and an engine that samples from it with ``adapter``.

    ``trainable`` puts the adapter (a fresh one by default) into the policy for training instead: the trainer passes
    each version of it to the engine, and MAX_TOKENS stays as set. ``mesh`` as for `load_policy`. Raises the errors of
    `load_policy` and `build_engine`.
    """
    if trainable:
        policy = load_policy(settings, adapter=adapter, trainable=True, mesh=mesh)
        return OpenPolicy(settings, policy, build_engine(settings, policy))
    policy = load_policy(settings)
    settings = with_token_limit(settings, policy.model)
    opened = OpenPolicy(settings, policy, build_engine(settings, policy))
    if adapter is not None:
        try:
            opened.engine.load_adapter(adapter, str(adapter.absolute()))
        except BaseException:
            opened.close()
            raise
    return opened
