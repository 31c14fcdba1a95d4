"""The scripts of tests/gpu without a GPU and without vLLM: they load, and what they use of the package is there."""

from __future__ import annotations

import ast
import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stand_in import install

from emailrl.model.load import load_policy
from emailrl.settings import load_settings

FOLDER = Path(__file__).parent / "gpu"
FILES = sorted(FOLDER.glob("*.py"))
SCRIPTS = [file.stem for file in FILES if not file.name.startswith(("test_", "conftest"))]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder's modules can be imported by name, as the scripts do it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for loaded in (set(sys.modules) - before) & set(SCRIPTS):
        del sys.modules[loaded]  # other tests import them as parts of ``gpu``


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_loads(name: str, scripts: None) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_script_takes_from_the_package_is_there(file: Path) -> None:
    """Inside functions too, which no import of the script runs; and attributes of the package's modules."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "emailrl":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                found = getattr(module, name.name, None) or importlib.import_module(f"{node.module}.{name.name}")
                if isinstance(found, type(sys)):
                    modules[name.asname or name.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)


@pytest.fixture
def without_vllm(scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for vLLM samples from `nano`."""
    settings = load_settings({"model_name": "nano"}, environ={}, cwd=tmp_path)
    install(monkeypatch, load_policy(settings))
    monkeypatch.chdir(tmp_path)


def test_the_clocks_of_a_training_step_fit_the_run(without_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps with everything replaced and timed that ``bench_grpo_step`` replaces and times."""
    bench = importlib.import_module("bench_grpo_step")
    monkeypatch.setattr(sys, "argv", ["bench", "--smoke", "--steps", "2", "--completion", "4"])
    run, *steps, micro_batch = bench.measure(bench.arguments())
    assert [run["engine"], micro_batch["kind"]] == ["vllm", "micro_batch"]
    for number, step in enumerate(steps, 1):
        assert (step["number"], step["batch"]["sampled_tokens"]) == (number, 6 * 4)
        assert step["batch"]["vllm"]["prompt_steps"] == 6 and step["batch"]["proof_gap"] < 0.1
        assert {"adapter/save", "adapter/load", "sampling/mailbox", "scoring", "backward"} <= step["calls"].keys()
    assert len(steps) == 2


def test_sides_are_handed_out_one_at_a_time_on_each_gpu(scripts: None) -> None:
    processes = importlib.import_module("processes")
    busy: set[str] = set()

    def run(name: str, gpu: str) -> str:
        assert gpu not in busy
        busy.add(gpu)
        time.sleep(0.01)
        busy.remove(gpu)
        return name.upper()

    assert processes.hand_out("abcdef", ["0", "1"], run) == list("ABCDEF")


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("print('hello'); print('{\"a\": 1}')", {"a": 1}),
        ("raise ValueError('no')", {"error": "ValueError: no"}),
        ("import time; time.sleep(60)", {"error": "over 1 s"}),
        ("pass", {"error": "?"}),
    ],
)
def test_what_a_process_prints_last_or_how_it_failed_is_a_row(
    code: str, row: dict[str, Any], scripts: None, tmp_path: Path
) -> None:
    processes = importlib.import_module("processes")
    limit = 1 if "sleep" in code else 60
    found = processes.row_of([sys.executable, "-c", code], log=tmp_path / "log", limit=limit)
    assert {name: value for name, value in found.items() if name != "wall"} == row


def test_a_process_that_ignores_its_end_is_killed(scripts: None) -> None:
    processes = importlib.import_module("processes")
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not processes.in_time(process, 0.01, grace=0.2)
    assert process.returncode == -signal.SIGKILL


def test_a_short_row_of_a_table_is_filled_up(scripts: None) -> None:
    measured = importlib.import_module("measured")
    assert measured.markdown(["a", "b", "c"], [[1, 2.5, "x"], ["y"]]).splitlines() == [
        "| a | b | c |", "|---|---|---|", "| 1 | 2.5 | x |", "| y | | |",
    ]  # fmt: skip


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
