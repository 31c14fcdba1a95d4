"""Which token limit a model is played with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from emailrl.model.resolve import NANO_DIR, with_token_limit
from emailrl.quickstart import SETTINGS
from emailrl.settings import load_settings


@pytest.mark.parametrize(
    ("given", "own", "limit"), [({}, 96, 96), ({}, None, 4096), ({}, 8192, 4096), ({"max_tokens": 4096}, 96, 4096)]
)
def test_the_model_s_own_limit_holds_where_none_is_given(
    tmp_path: Path, given: dict[str, int], own: int | None, limit: int
) -> None:
    settings = load_settings(given, cwd=tmp_path, environ={})
    model = SimpleNamespace(generation_config=SimpleNamespace(max_new_tokens=own))
    assert with_token_limit(settings, model).agent.max_tokens == limit


def test_nano_s_own_limit_is_the_quickstart_s() -> None:
    own = GenerationConfig.from_pretrained(NANO_DIR).max_new_tokens
    assert own == 96 and f"max_tokens = {own}\n" in SETTINGS
