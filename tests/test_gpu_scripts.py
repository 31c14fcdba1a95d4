"""The scripts of tests/gpu load without a GPU: what they import of the package is still there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py") if not file.name.startswith(("test_", "conftest")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    importlib.import_module(name)
    for loaded in (set(sys.modules) - before) & set(SCRIPTS):
        del sys.modules[loaded]  # other tests import them as parts of ``gpu``


def test_every_benchmark_is_in_the_list_of_them() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    runnable = [name for name in SCRIPTS if "__main__" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")]
    assert [name for name in runnable if f"`{name}.py`" not in text] == []


def test_commands_use_options_that_their_scripts_have() -> None:
    found = 0
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    batch = next(line for line in text.splitlines() if line.startswith("BATCH="))
    for line in text.replace("$BATCH", batch).splitlines():
        names = re.findall(r"(\w+)\.py", line)
        if len(names) != 1 or names[0] not in SCRIPTS:
            continue
        source = (FOLDER / f"{names[0]}.py").read_text(encoding="utf-8")
        options = re.findall(r"--[a-z][a-z-]*", line.split(".py", 1)[1])
        assert [option for option in options if f'"{option}"' not in source] == [], line
        found += len(options)
    assert found > 40
