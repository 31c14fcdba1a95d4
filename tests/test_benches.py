"""The benchmarks and scripts of tests/gpu without a GPU and without vLLM: they load, rehearse, and count rightly."""

from __future__ import annotations

import ast
import importlib
import json
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents.commands import check, commands
from engines.vllm_stub import install
from safetensors.torch import save_file

from emailrl.model.load import load_policy
from emailrl.records.trajectory import Scenario, StopReason, Trajectory, Turn
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
        ("bench_train_step", [], {"computed", "mfu", "seconds"}),
        ("bench_sampling", [], {"trajectories_per_second", "tools", "wake"}),
        ("bench_sft", [], {"tokens_per_second", "loss"}),
        ("bench_scaling", ["--ranks", "1"], {"of_one", "grad_norm", "hash"}),
        ("bench_grpo_trl", [], {"rest", "rate", "hand-over"}),
    ],
)
def test_a_rehearsal_ends_with_a_table(
    name: str, words: list[str], shown: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module(name).BENCH
    rows = bench.main(["--smoke", "--out", str(tmp_path), *words], apart=False)
    assert rows and all("error" not in row for row in rows)
    assert shown <= rows[-1].keys()
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("| ")
    capsys.readouterr()
    assert bench.main(["--report", "--out", str(tmp_path)])[-1]["case"] == rows[-1]["case"]


@pytest.mark.parametrize("name", ["bench_async", "bench_vllm_memory", "shard_memory"])
def test_what_needs_more_than_a_cpu_loads(name: str, tmp_path: Path) -> None:
    bench = importlib.import_module(name).BENCH
    assert bench.cases(bench.arguments(["--out", str(tmp_path)]))


def test_the_clocks_of_a_training_step_fit_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps with everything replaced and timed that ``bench_grpo_step`` replaces and times."""
    install(monkeypatch, load_policy(load_settings({"model_name": "nano"}, environ={}, cwd=tmp_path)))
    monkeypatch.chdir(tmp_path)
    bench = importlib.import_module("bench_grpo_step").BENCH
    *steps, mean = bench.main(["--smoke", "--steps", "2", "--out", str(tmp_path)], apart=False)
    assert [step["step"] for step in steps] == [1, 2] and mean["step"] == "mean"
    parts = {"adapter/save", "adapter/load", "adapter/read", "sampling/mailbox", "sampling/prompts"}
    for step in steps:
        assert step["sampled_tokens"] == 6 * 4 and step["vllm"]["prompt_steps"] == 6
        assert parts | {"scoring", "forward", "backward", "optimizer", "records"} <= step["own"].keys()
        assert sum(step["own"].values()) == pytest.approx(step["seconds"])
        assert min(step["own"].values()) >= 0


def test_own_seconds_and_the_rest_are_the_wall_time() -> None:
    clocks = importlib.import_module("clocks")
    at = SimpleNamespace(now=100.0)

    def settle() -> None:
        at.now += 32.0

    timed = clocks.Clocks(settle, clock=lambda: at.now)
    at.now += 4.0
    with timed.span("sampling/bookkeeping"):
        at.now += 1.0
        with timed.span("sampling/engine"):
            at.now += 0.25
            with timed.span(None):
                at.now += 0.5
    with timed.span("forward", settled=True):
        at.now += 2.0
    own = {"sampling/bookkeeping": 1.0, "sampling/engine": 0.75, "forward": 34.0, "other": 4.0}
    assert timed.cut() == (39.75, own)
    with pytest.raises(ValueError, match="no"), timed.span("a"), timed.span("b"):
        raise ValueError("no")
    assert timed.failed_in == ["a", "b"] and timed.cut()[1].keys() == {"a", "b", "other"}


def test_cases_are_handed_out_one_at_a_time_on_each_gpu() -> None:
    busy: set[str] = set()

    def run(name: str, gpu: str) -> str:
        assert gpu not in busy
        busy.add(gpu)
        time.sleep(0.01)
        busy.remove(gpu)
        return name.upper()

    assert importlib.import_module("runner").hand_out("abcdef", ["0", "1"], run) == list("ABCDEF")


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("print('hello'); print('[{\"a\": 1}]')", {"a": 1}),
        ("raise ValueError('no')", {"error": "ValueError: no"}),
        ("import time; time.sleep(60)", {"error": "over 1 s"}),
        ("pass", {"error": "?"}),
    ],
)
def test_what_a_process_prints_last_or_how_it_failed_is_a_row(code: str, row: dict[str, Any], tmp_path: Path) -> None:
    limit = 1 if "sleep" in code else 60
    [found] = importlib.import_module("runner").rows_of([sys.executable, "-c", code], log=tmp_path / "log", limit=limit)
    assert {name: value for name, value in found.items() if name != "wall"} == row


def test_a_process_that_ignores_its_end_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not importlib.import_module("runner").ended_in_time(process, 0.01, grace=0.2)
    assert process.returncode == -signal.SIGKILL


def test_every_script_is_in_the_list_of_them_and_its_commands_can_be_run() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    runnable = [name for name in SCRIPTS if "__main__" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")]
    assert [name for name in runnable if name != "shapes" and f"`{name}.py`" not in text] == []
    found = 0
    for script in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for words in commands(script):
            if words[0] == "python":
                check(words)
                found += 1
    assert found > 10


def step(rollout: float, update: float, rest: float = 0.0, evaluation: float = 0.0) -> dict[str, Any]:
    seconds = {"rollout": rollout, "update": update, "total": rollout + update + rest + evaluation}
    return {"seconds": seconds | {"evaluation": evaluation}, "policy_age_mean": 0.0, "reward_mean": 1.0}


def test_asynchronous_steps_are_means_of_those_that_count() -> None:
    """Long and short rollouts alternate; the first two steps compile, the last one has the server to itself."""
    bench = importlib.import_module("bench_async")
    turns = [step(20, 30), step(10, 5), step(10, 5, 0.5), step(10, 5, 0.5, evaluation=7)]
    ahead = [step(20, 30), step(1, 5), step(5, 5, 0.5), step(1, 5, 0.5, evaluation=7), step(1, 5), step(0, 5)]
    steps = {"0": turns, "1": ahead, "turns": [step(9, 9)]}
    rows = [{"run": name} | bench.figures(of, name) for name, of in steps.items()]
    bench.add_speeds(rows)
    assert [rows[0][key] for key in ("steps", "step", "rollout", "update")] == [2, 15.5, 10, 5]
    assert [rows[1][key] for key in ("steps", "step", "rollout")] == [3, pytest.approx(23 / 3), pytest.approx(7 / 3)]
    assert rows[1]["x_0"] == pytest.approx(15.5 * 3 / 23) and rows[1]["expected"] == 1.5
    assert rows[2] == {"run": "turns", "steps": 0}


# -- the small model's evidence


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, best: float, test: float | None = None) -> None:
    """A seed with ten SFT steps, two of RL and two evaluations; with ``test``, a benchmark of both policies too."""
    losses = ({"step": n, "val_loss": 0.05 if n == 10 else None} for n in range(1, 11))
    lines(folder / "outputs/sft/metrics.jsonl", *losses)
    steps = ({"step": n, "accuracy": accuracy, "seconds": {"total": 30 * n}} for n, accuracy in ((1, 0.5), (2, 0.7)))
    lines(folder / "outputs/grpo_masked/metrics.jsonl", *steps)
    evaluations = ({"step": n, "accuracy": accuracy} for n, accuracy in ((0, 0.4), (2, best)))
    lines(folder / "outputs/grpo_masked/evaluations.jsonl", *evaluations)
    for name in ("sft", "grpo_masked"):
        adapter = folder / "outputs" / name / "best_model"
        adapter.mkdir()
        save_file({"a": torch.full((8, 8), best)}, adapter / "adapter_model.safetensors")
        for file in ("adapter_config.json", "tokenizer.json"):
            (adapter / file).write_text("{}")
    if test is not None:
        results = [{"accuracy": a, "accuracy_low": a - 0.04, "accuracy_high": a + 0.04} for a in (0.5, test)]
        lines(folder / "benchmark/results.json", {"results": results, "comparisons": [{"p_value": 0.001}]})


def test_the_best_in_validation_comes_first_and_its_adapter_is_collected(tmp_path: Path) -> None:
    evidence = importlib.import_module("small_evidence")
    work, out = tmp_path / "work", tmp_path / "out"
    make_run(work / "long/seed-1", best=0.6, test=0.8)
    make_run(work / "long/seed-2", best=0.5, test=0.9)
    make_run(work / "short/seed-1", best=0.7)
    make_run(work / "short/seed-2", best=0.4)
    evidence.collect(SimpleNamespace(work=work, out=out))
    rows = (out / "table.txt").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| short-1", "| long-1", "| long-2", "| short-2"]
    assert rows[1] == (
        "| long-1 | 10 steps, val 0.0500 | 2 steps, sampled 60.0% → 60.0% | 40.0% at 0, 60.0% at 2 "
        "| 50.0% (46.0%–54.0%) → 80.0% (76.0%–84.0%), p = 0.001 | – |"
    )
    with tarfile.open(out / "results.tar.xz") as tar:
        names = tar.getnames()
    adapters = [name for name in names if name.endswith(".safetensors")]
    assert "long/seed-1/benchmark/results.json" in names and not any("tokenizer" in name for name in names)
    assert len(adapters) == 2 * 3 and not any("short/seed-2" in name for name in adapters)
    curve = importlib.import_module("small_curves").read(work / "long/seed-2/outputs/grpo_masked")
    assert (curve.name, curve.minutes) == ("long-2", {0: 0.0, 1: 0.5, 2: 1.5})


def test_an_entry_of_the_plan_and_the_settings_it_changes() -> None:
    entry = importlib.import_module("small_evidence").Entry.read("1:short:3:sft_steps=150,learning_rate=3e-4")
    assert (entry.gpu, entry.name, entry.seeds) == ("1", "short", ["3"])
    text = importlib.import_module("small_model").settings_text(Path("/base"), Path("/data"), "3", entry.changes)
    assert [line for line in text.splitlines() if line.startswith(("sft_steps", "learning_rate", "seed"))] == [
        "seed = 3", "sft_steps = 150", "learning_rate = 3e-4",
    ]  # fmt: skip


READ = {"ever_found_right_email": True, "ever_read_right_email": True, "attempted_answer": True}
FOUND = {"attempted_answer": True, "ever_found_right_email": True}


def trajectory(stop: StopReason = StopReason.ANSWERED, *, answerable: bool = True, **rubric: Any) -> Trajectory:
    scenario = Scenario("s-1", "When?", "May", ["<1>"], "ann@example.com", "2001-01-01", kind="first_after")
    scenario.answerable = answerable
    usual = {"answer_correct": False, "sources_correct": False, "ever_found_right_email": False,
             "ever_read_right_email": False, "attempted_answer": False, "returned_i_dont_know": False}  # fmt: skip
    exception = "OSError: gone" if stop == StopReason.EXCEPTION else None
    turns = [Turn([], [], "stop", tool_name="search_emails", tool_args={"keywords": ["a|b"]})]
    return Trajectory("t", "g", scenario, turns=turns, rubric=usual | rubric, stop_reason=stop, exception=exception)


@pytest.mark.parametrize(
    ("expected", "made"),
    [
        (None, trajectory(**READ | {"answer_correct": True})),
        ("raised", trajectory(StopReason.EXCEPTION)),
        ("not judged", trajectory(**READ | {"answer_correct": None})),
        ("malformed call", trajectory(StopReason.BAD_TOOL_CALL_ARGS)),
        ("out of turns", trajectory(StopReason.RAN_OUT_OF_TURNS, ever_found_right_email=True)),
        ("out of tokens", trajectory(StopReason.TRUNCATED)),
        ("did not know", trajectory(**READ | {"returned_i_dont_know": True})),
        ("no answer", trajectory(StopReason.COMPLETED)),
        ("answered a question without an answer", trajectory(answerable=False, attempted_answer=True)),
        ("source never among the hits", trajectory(attempted_answer=True)),
        ("source among the hits, not read", trajectory(**FOUND)),
        ("source read, another email cited", trajectory(**READ)),
        ("source cited, wrong fact", trajectory(**READ | {"sources_correct": True})),
        ("source cited, wrong fact", trajectory(**FOUND | {"sources_correct": True})),  # a count, taken from the hits
    ],
)
def test_the_first_class_of_failures_that_applies(expected: str | None, made: Trajectory) -> None:
    assert importlib.import_module("small_failures").failure(made) == expected


def test_failures_are_counted_by_kind_and_two_measurements_compared() -> None:
    failures = importlib.import_module("small_failures")
    text = failures.report([trajectory(**READ, answer_correct=True), trajectory(**READ), trajectory(**READ)])
    assert "3 answers, 33.3% right" in text and "| first_after | 3 | 1 | 2 |" in text and "| all | 3 | 1 | 2 |" in text
    assert "**source read, another email cited**" in text and "a\\|b" in text

    def measured(right: str) -> list[Trajectory]:
        made = [trajectory(**READ | {"answer_correct": verdict == "1"}) for verdict in right]
        for number, each in enumerate(made):
            each.scenario.id, each.turns[0].completion_ids = str(number), [int(right[number])]
        return made

    first, second = measured("1111100000"), measured("0001110000")
    second[9].turns[0].completion_ids = [7]  # parts, with the same verdict
    text = failures.agreement(first, second[::-1])
    assert "10 questions: 5 conversations part, 4 verdicts change (40.0%, 16.8% to 68.7%), 3 to the worse" in text
    assert "accuracy -20.0%, p = 0.62 by question" in text  # 2 · (1 + 4)/16
    assert "deviation of 20.00% (at most 26.22%)" in text  # √4 / 10, √(0.687 / 10)
