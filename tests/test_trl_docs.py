"""``docs/guides/trl.md``: its settings exist with the defaults it names, and its example loads and can be trained."""

from __future__ import annotations

import re
from pathlib import Path

from emailrl.settings import load_settings
from emailrl.settings.names import by_name
from emailrl.training.algorithms import resolve

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "guides/trl.md").read_text(encoding="utf-8")


def shown(value: object) -> str:
    return "–" if value in (None, "") else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_the_settings_named_have_the_defaults_named() -> None:
    rows = [
        line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 6
    ]
    assert len(rows) > 20
    for _, _, settings, default, _ in rows[1:]:
        keys = re.findall(r"`(\w+)`", settings)
        assert ", ".join(shown(by_name()[key].default) for key in keys) == default, settings


def test_what_is_left_out_has_the_same_name() -> None:
    same = re.findall(r"`(\w+)`", PAGE.partition("left out:")[2].partition("Their defaults")[0])
    assert len(same) == 16 and [name for name in same if name not in by_name()] == []


def test_the_example_loads_and_can_be_trained(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "emailrl.toml").write_text(text)
    settings = load_settings(cwd=tmp_path, environ={})
    assert (settings.training.num_generations, settings.training.adam_beta2) == (8, 0.999)
    algorithm = resolve(settings)
    assert (algorithm.aggregation, algorithm.clip_low, algorithm.advantage) == ("token_mean", 0.2, "group_norm")
