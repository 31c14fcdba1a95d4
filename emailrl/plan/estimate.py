"""A run's memory and time with given settings on a given device: of one GPU, or of several that are divided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from emailrl.engines import vllm_in_process
from emailrl.plan.cluster import Cluster, Fabric, Split
from emailrl.plan.gpus import Device
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Seconds, plan_seconds
from emailrl.plan.tokens import Measured, Tokens, count_tokens
from emailrl.plan.ways import Estimate
from emailrl.policy.shape import Shape, find_shape
from emailrl.settings import Settings


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates a run with ``shape``, unless another model is named."""

    shape: Shape
    settings: Settings
    per_trajectory: int | None
    trainable_share: float | None
    measured: Measured | None
    utilization: float | None
    confirmed: float
    """As in ``Tokens``."""

    def tokens(self, ranks: int) -> Tokens:
        """Tokens of a step with this many ranks."""
        return count_tokens(
            self.shape, self.settings, per_trajectory=self.per_trajectory, trainable_share=self.trainable_share,
            measured=self.measured, ranks=ranks, confirmed=self.confirmed,
        )  # fmt: skip

    def __call__(
        self, settings: Settings, device: Device, share: Tokens | None = None, cards: int = 1
    ) -> tuple[Memory, Seconds]:
        """Memory of one of ``cards`` ranks on its host, which trains ``share``."""
        shape, tokens = self._shape_of(settings), share or self.tokens(1)
        needed = plan_memory(shape, settings, device, tokens, cards=cards)
        return needed, plan_seconds(shape, settings, device, tokens, needed, utilization=self.utilization)

    def on(self, fabric: Fabric, *, shared: bool) -> Estimate:
        """Estimates memory of one GPU and seconds of all, or of one if the run does not fit."""

        def estimate(settings: Settings, device: Device) -> tuple[Memory, Seconds]:
            memory, seconds = self(settings, device, cards=1 if shared else fabric.per_host)
            split = self.split(settings, device, fabric.with_device(device), shared=shared) if memory.fits else None
            return (split.memory, split.seconds) if split else (memory, seconds)

        return estimate

    def split(self, settings: Settings, device: Device, fabric: Fabric, *, shared: bool) -> Split | None:
        """The best split of several GPUs into trainers and servers, or all of them ``shared``.

        None for what does not fit, and for one GPU.
        """
        if fabric.gpus == 1:
            return None
        settings = _in_process(settings) if shared else _served(settings)
        own = cache(lambda share, cards: self(settings, device, share, cards))
        cluster = Cluster(self._shape_of(settings), settings, device, fabric, self.tokens, own)
        return cluster.shared() if shared else cluster.best()

    def _shape_of(self, settings: Settings) -> Shape:
        return self.shape if settings.model.name == self.settings.model.name else find_shape(settings.model.name)


def on_several(settings: Settings) -> tuple[Settings, bool]:
    """The settings for several GPUs, and whether all of them train and sample in turn."""
    return (settings, True) if _names_engine_in_process(settings) else (_served(settings), False)


def _names_engine_in_process(settings: Settings) -> bool:
    """Whether every rank would sample, with the engine that the settings name; ``auto`` leaves it to the plan."""
    return settings.agent.engine == "transformers" or vllm_in_process(settings)


def _served(settings: Settings) -> Settings:
    """The same run with vLLM servers on separate GPUs."""
    return _with_vllm(settings, settings.vllm.vllm_urls or "http://servers")


def _in_process(settings: Settings) -> Settings:
    """The same run with engines in the trainers' processes, where sampling and training take turns."""
    if _names_engine_in_process(settings):
        return settings
    inside = _with_vllm(settings, "")
    return inside.model_copy(update={"vllm": inside.vllm.model_copy(update={"max_staleness": None})})


def _with_vllm(settings: Settings, urls: str) -> Settings:
    agent = settings.agent.model_copy(update={"engine": "vllm"})
    vllm = settings.vllm.model_copy(update={"vllm_urls": urls})
    return settings.model_copy(update={"agent": agent, "vllm": vllm})
