"""The benchmarks and scripts of tests/gpu without a GPU and without vLLM: they load, rehearse, and count rightly."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents.commands import check, commands
from engines.vllm_stub import install

from emailrl.model.policy import load_policy
from emailrl.settings import load_settings

FOLDER = Path(__file__).parent / "gpu"
FILES = sorted([*FOLDER.glob("*.py"), *(FOLDER.parent / "benchmarks").glob("*.py")])
SCRIPTS = [file.stem for file in FOLDER.glob("*.py") if not file.name.startswith(("test_", "conftest"))]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder's modules can be imported by name, as the scripts do it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield
    for loaded in (set(sys.modules) - before) & set(SCRIPTS):
        del sys.modules[loaded]  # other tests import them as parts of ``gpu``


def test_what_a_script_takes_from_the_package_is_there() -> None:
    """Inside functions too, which no import of the script runs; and attributes of the package's modules."""
    missing = []
    for file in FILES:
        tree, modules = ast.parse(file.read_text(encoding="utf-8")), dict[str, Any]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "emailrl":
                module = importlib.import_module(node.module or "")
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
                    found = getattr(module, name.name)
                    if isinstance(found, type(sys)):
                        modules[name.asname or name.name] = found
        missing += [
            f"{file.name}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
            if not hasattr(modules[node.value.id], node.attr)
        ]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "words", "shown"),
    [
        pytest.param("bench_train_step", [], {"computed", "mfu", "seconds"}, marks=pytest.mark.slow),
        ("bench_sft", [], {"tokens_per_second", "loss"}),
        ("bench_scaling", ["--ranks", "1"], {"of_one", "grad_norm", "hash"}),
    ],
)
def test_a_rehearsal_ends_with_a_table(
    name: str, words: list[str], shown: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module(name).BENCH
    rows = bench.main(["--smoke", "--out", str(tmp_path), *words], apart=False)
    assert rows and shown <= rows[-1].keys()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("| ")
    assert bench.main(["--report", "--out", str(tmp_path)])[-1]["case"] == rows[-1]["case"]


def test_what_needs_more_than_a_cpu_loads(tmp_path: Path) -> None:
    bench = importlib.import_module("bench_async").BENCH
    assert bench.cases(bench.arguments(["--out", str(tmp_path)]))


@pytest.mark.slow
def test_the_clocks_of_a_training_step_fit_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps with everything replaced and timed that ``bench_grpo_step`` replaces and times."""
    install(monkeypatch, load_policy(load_settings({"model_name": "nano"}, environ={}, cwd=tmp_path)))
    monkeypatch.chdir(tmp_path)
    bench = importlib.import_module("bench_grpo_step").BENCH
    *steps, mean = bench.main(["--smoke", "--steps", "2", "--out", str(tmp_path)], apart=False)
    assert [step["step"] for step in steps] == [1, 2] and mean["step"] == "mean"
    parts = {"adapter/save", "adapter/load", "adapter/read", "sampling/mailbox", "sampling/engine"}
    for step in steps:
        assert step["sampled_tokens"] == 6 * 4
        assert parts | {"scoring", "forward", "backward", "optimizer", "records"} <= step["own"].keys()
        assert sum(step["own"].values()) == pytest.approx(step["seconds"])
        assert min(step["own"].values()) >= 0


def test_every_script_is_in_the_list_of_them_and_its_commands_can_be_run() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    runnable = [name for name in SCRIPTS if "__main__" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")]
    assert [name for name in runnable if name != "shapes" and f"`{name}.py`" not in text] == []
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    found = [words for script in blocks for words in commands(script) if words[0] == "python"]
    assert len(found) > 10
    for words in found:
        check(words)
