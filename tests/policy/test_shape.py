"""Configs of models that cannot be: refused in one line, with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emailrl.errors import EmailRLError
from emailrl.policy.shape import read_shape

SIZES = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": -16}, "head_dim is -16"),
        ({"vocab_size": 0}, "vocab is 0"),
        ({"num_hidden_layers": -1}, "layers is -1"),
        ({"num_key_value_heads": 3}, "4 heads over 3 of keys"),
        ({"hidden_size": "wide"}, "wide"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES))
    assert read_shape(config).parameters > 0
    config.write_text(json.dumps(SIZES | changes))
    with pytest.raises(EmailRLError, match=f"lacks or garbles a size: .*{reason}"):
        read_shape(config)


def test_a_config_that_nests_too_deep(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"a":' * 100_000)
    with pytest.raises(EmailRLError, match="cannot be read"):
        read_shape(config)
