"""A sharded base against a whole one, in two and three real processes, and the settings that cannot be sharded."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from model.sharded_ranks import found
from ranks.processes import in_ranks

from emailrl.base.errors import UsageError
from emailrl.model.layout import shards_base
from emailrl.model.shard import check_shardable
from emailrl.settings import ModelSettings, Settings

SERVED = {"agent": {"engine": "vllm"}, "vllm": {"vllm_urls": "http://gpu1:8000"}}


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def ranks(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, float]]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("ranks")
    return in_ranks(request.param, partial(found, tiny_model, out), out, seconds=300)


def test_gradients_and_weights_are_those_of_the_whole_base(ranks: list[dict[str, dict[str, float]]]) -> None:
    for cases in ranks:
        assert len(cases) == 10
        for case, gaps in cases.items():
            for name, gap in gaps.items():
                assert name == "share" or gap <= 1e-5, (case, name, gap)


def test_a_rank_holds_its_part_of_the_base(ranks: list[dict[str, dict[str, float]]]) -> None:
    # All but the final norm is; three divide no row count of this model.
    for cases in ranks:
        assert cases["held"]["share"] <= 1 / len(ranks) + 0.05


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"load_in_4bit": True}}, "SHARD does not work with LOAD_IN_4BIT"),
        ({"model": {"backend": "unsloth"}}, "SHARD does not work with BACKEND=unsloth"),
        ({"agent": {"engine": "transformers"}}, "transformers engine cannot sample"),
        ({"vllm": {"vllm_urls": ""}}, "In-process vLLM needs the whole base"),
    ],
)
def test_what_cannot_be_sharded_is_refused(sections: dict[str, Any], message: str) -> None:
    for given, refusal in ((sections, pytest.raises(UsageError, match=message)), ({}, nullcontext())):
        settings = Settings.model_validate(SERVED | given)
        with refusal:
            check_shardable(settings.model, settings.agent, settings.vllm)


@pytest.mark.parametrize(
    ("model", "gigabytes", "cards", "expected"),
    [
        ({}, 57, 2, True),  # more than 0.7 of 80
        ({}, 55, 2, False),
        ({}, 65, 1, False),  # nothing to share it with
        ({"load_in_4bit": True}, 65, 2, False),
        ({"backend": "unsloth"}, 65, 2, False),
        ({"shard": "off"}, 65, 2, False),
        ({"shard": "host"}, 1, 2, True),
    ],
)
def test_auto_shards_what_is_too_large_for_a_card(
    model: dict[str, Any], gigabytes: int, cards: int, expected: bool
) -> None:
    weight_bytes = gigabytes * 10**9
    assert shards_base(ModelSettings(**model), weight_bytes=weight_bytes, card_bytes=80e9, cards=cards) is expected
