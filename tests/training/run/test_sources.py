"""What a run learns from, recorded so that a resumed run can say what has changed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emailrl.settings import Settings, load_settings
from emailrl.training.run.data import changed_sources, digests_of, save_digests

REWARD = "import imported_scales.grams\n\n\ndef reward(trajectory):\n    return 1.0\n"
LARGE = 8 << 20


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test imports from its own folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("imported_scales", "imported_scales.grams"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def fill(folder: Path) -> Settings:
    """A folder with sources of every kind, as the settings of a run name them."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(LARGE))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "template.jinja").write_text("{{ messages }}")
    (folder / "mail.db").write_bytes(bytes(LARGE))
    (folder / "reward.py").write_text(REWARD)
    (folder / "imported_scales").mkdir()
    (folder / "imported_scales" / "grams.py").write_text("ONE = 1\n")
    (folder / "not_imported.py").write_text("ONE = 1\n")
    (folder / "world.py").write_text("class World:\n    pass\n")
    given = {
        "model_name": str(model), "chat_template": folder / "template.jinja", "db": folder / "mail.db",
        "reward": f"{folder}/reward.py:reward", "environment": f"{folder}/world.py:World",
    }  # fmt: skip
    return load_settings(given, environ={}, cwd=folder)


def every_byte(path: Path) -> None:
    path.write_bytes(b"\1" * path.stat().st_size)


def one_line(path: Path) -> None:
    path.write_text(f"{path.read_text()}# and a line\n")


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("model/model.safetensors", every_byte, "MODEL_NAME"),
        ("model/config.json", one_line, "MODEL_NAME"),
        ("model/chat_template.jinja", Path.unlink, "MODEL_NAME"),
        ("template.jinja", one_line, "CHAT_TEMPLATE"),
        ("mail.db", every_byte, "EMAILRL_DB"),
        ("reward.py", one_line, "REWARD"),
        ("imported_scales/grams.py", one_line, "imported_scales/grams.py"),
        ("world.py", one_line, "ENVIRONMENT"),
    ],
)
def test_a_source_whose_content_has_changed_is_named(
    tmp_path: Path, file: str, change: Callable[[Path], None], named: str
) -> None:
    settings = fill(tmp_path)
    save_digests(tmp_path, digests_of(settings))
    assert changed_sources(tmp_path, digests_of(settings)) == []
    one_line(tmp_path / "not_imported.py")
    change(tmp_path / file)
    assert changed_sources(tmp_path, digests_of(settings)) == [named]


def test_copies_and_times_are_no_change(tmp_path: Path) -> None:
    save_digests(tmp_path, digests_of(fill(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/model/README.md").write_text("Of no effect.")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (0, 0))
    copied = load_settings(
        {
            "model_name": str(tmp_path / "b/model"), "chat_template": tmp_path / "b/template.jinja",
            "db": tmp_path / "b/mail.db", "reward": f"{tmp_path}/b/reward.py:reward",
            "environment": f"{tmp_path}/b/world.py:World",
        },
        environ={}, cwd=tmp_path,
    )  # fmt: skip
    assert changed_sources(tmp_path, digests_of(copied)) == []


@pytest.mark.parametrize("content", [None, "{", '{"MODEL_NAME": 3}'])
def test_a_checkpoint_without_digests_says_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "sources.json").write_text(content)
    assert changed_sources(tmp_path, {"MODEL_NAME": "a"}) == []


def test_a_built_in_reward_and_a_model_of_the_hub_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mail.db").write_bytes(b"mail")
    snapshot = tmp_path / "hub/models--some--model/snapshots/0123abcd"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(snapshot / "config.json"))
    settings = load_settings({"model_name": "some/model", "db": tmp_path / "mail.db"}, environ={}, cwd=tmp_path)
    found = digests_of(settings)
    assert found.keys() == {"MODEL_NAME", "EMAILRL_DB"} and found["MODEL_NAME"] == "0123abcd"
