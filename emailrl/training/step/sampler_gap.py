"""End the run before an update on log-probabilities that servers cannot have computed from the policy they were given.

The probe scores one completion per server and version; this compares every trained token, which costs nothing.
"""

from __future__ import annotations

from emailrl.engines import has_servers
from emailrl.errors import EmailRLError
from emailrl.settings import Settings
from emailrl.training.step.meter import Meter

LARGEST_GAP = 1.0
"""Mean absolute difference in nats. Rounding stays below 0.1 in 16 bits; the policies of ``MAX_STALENESS`` steps differ
in single tokens, but not by a factor of e on average."""
TIMES_TOLERANCE = 10
"""The limit is at least this multiple of VLLM_PROBE_TOLERANCE, which allows for another base or precision."""


def check_gap(meter: Meter, settings: Settings, step: int) -> None:
    """Raise EmailRLError if the gap of a mini-batch to the servers' log-probabilities is above the limit."""
    weight = meter.weights.get("sampler_gap_mean")
    if not weight or not has_servers(settings):
        return
    gap = meter.sums["sampler_gap_mean"] / weight
    limit = max(LARGEST_GAP, TIMES_TOLERANCE * (settings.vllm.vllm_probe_tolerance or 0.0))
    if gap > limit:
        raise EmailRLError(
            f"Step {step} is not trained: the log-probabilities from the vLLM servers {settings.vllm.vllm_urls} are"
            f" off by {gap:.2f} nats on average, above {limit:g}.",
            "Check that nothing caches or changes their replies and restart them; then resume with MAX_STALENESS=0 to"
            " sample the step again.",
        )
