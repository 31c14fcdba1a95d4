"""What the in-process engine takes."""

from __future__ import annotations

import pytest

from emailrl.engines.budget import merges, most_requests, most_rows, rows_per_server
from emailrl.settings import AgentSettings


def test_servers_take_more_conversations_at_once_unless_told() -> None:
    """As many as the client sends them, and ``emailrl serve`` starts them for."""
    assert rows_per_server(AgentSettings()) == 256 and most_requests(AgentSettings(), 3) == 768
    few = AgentSettings(max_batch_trajectories=8)
    assert rows_per_server(few) == 8 and most_requests(few, 3) == 24
    assert most_requests(AgentSettings(rollout_concurrency=10), 3) == 10


def test_small_models_are_sampled_from_merged_weights() -> None:
    assert merges(10**9, quantized=False)
    assert not merges(10**9 + 1, quantized=False) and not merges(1, quantized=True)


@pytest.mark.parametrize(
    ("given", "parameters", "on_gpu", "rows"),
    [
        ({}, 50_000_000, False, 16),
        ({}, 49_999_999, False, 64),
        ({}, 50_000_000, True, 64),
        ({"max_batch_trajectories": 48}, 50_000_000, False, 48),
        ({"max_batch_trajectories": 8}, 50_000_000, False, 8),
    ],
)
def test_a_cpu_holds_fewer_conversations_of_a_larger_model_unless_told(
    given: dict[str, int], parameters: int, on_gpu: bool, rows: int
) -> None:
    assert most_rows(AgentSettings(**given), parameters, on_gpu=on_gpu) == rows
