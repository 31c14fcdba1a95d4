"""``emailrl benchmark``, real parts end to end: questions, database, random policy, checkpoint."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest
from tiny import make_checkpoint

from emailrl.agent.task import Rubric
from emailrl.records import read_trajectories


@pytest.fixture
def here(here: Path) -> Path:
    """A directory as a run leaves it: with a best checkpoint too."""
    make_checkpoint(here / "outputs" / "grpo_masked" / "best_model", here / "model")
    return here


def test_bare_it_measures_the_best_checkpoint(emailrl, here: Path) -> None:
    code, out, _ = emailrl("benchmark", "--sequential", "--limit", 2, "--json")
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert record["model"].endswith("outputs/grpo_masked/best_model")
    assert record["num_questions"] == 2 and record["accuracy"] == 0.0 and record["exceptions"] == 0
    assert record["accuracy_low"] == 0.0 and record["accuracy_high"] == pytest.approx(0.657620, abs=1e-5)
    contract = {"latency_seconds", "tokens", "cost", "reward", "trajectories", *Rubric.__dataclass_fields__}
    assert contract <= record.keys()
    assert Path(record["trajectories"]).is_absolute() and Path(record["trajectories"]).is_file()
    assert Path(record["trajectories"]).name == "00-grpo_masked-best_model.jsonl"  # the rest of the path tells nothing
    assert list((here / "outputs" / "benchmarks").iterdir())
    code, out, _ = emailrl("inspect-trajectory", "--verbose")
    assert code == 0 and "benchmarks" in out and "Gold answer" in out and "ids only" not in out


def test_models_side_by_side(emailrl, here: Path) -> None:
    code, out, _ = emailrl("benchmark", "--checkpoint", "best", "--model", "model", "--out", "bench", "--all")
    assert code == 0 and "Test split, greedy, at most 2 turns" in out
    assert "model → outputs/grpo_masked/best_model: +0.0 points of accuracy" in " ".join(out.split())
    assert "p = 1 in an exact paired test over 4 questions" in " ".join(out.split())
    for row in ("accuracy", "95% interval", "sources correct", "turns", "latency", "tokens"):
        assert row in out
    assert "cost" not in out  # an engine in this process has no price
    rows = [re.split(" {2,}", line.strip())[0] for line in out.splitlines()]
    assert rows[rows.index("tokens") :][:3] == ["tokens", "prompt tokens", "completion tokens"]
    assert "tokens counts a conversation once, prompt tokens counts its prefix again at every turn" in out
    made = {"conditions.json", "questions.csv", "results.csv", "results.json"}
    assert {file.name for file in (here / "bench").iterdir()} == made | {"trajectories"}
    assert json.loads((here / "bench" / "conditions.json").read_text())["dtype"] in ("fp32", "bf16")  # not auto
    code, _, error = emailrl("benchmark", "--model", "model", "--out", "bench")
    assert code == 2 and "bench already holds a benchmark. Use another --out, or --overwrite." in error
    code, out, _ = emailrl("benchmark", "--model", "model", "--out", "bench", "--overwrite")
    table = out[out.index("Test split") : out.index("--all shows every row")]
    assert [line.split()[0] for line in table.splitlines()[1:] if re.match(r" *\w", line)] == [
        "model", "accuracy", "95%", "questions", "reward", "sources", "turns", "tokens", "latency",
    ]  # fmt: skip
    assert not list((here / "bench").glob("accuracy.*"))  # one model is no comparison
    assert [file.name for file in (here / "bench" / "trajectories").glob("*.jsonl")] == ["00-model.jsonl"]
    both = json.loads(emailrl("benchmark", "--checkpoint", "best", "--model", "model", "--json")[1].splitlines()[-1])
    assert [record["num_questions"] for record in both] == [4, 4]


def test_a_table_names_adapters_from_here_and_json_from_the_root(emailrl, here: Path) -> None:
    runs = [here / "outputs" / name / "best_model" for name in ("grpo_masked", "grpo_masked-2")]
    make_checkpoint(runs[1], here / "model")
    arguments = ("benchmark", "--limit", 1, "--checkpoint", runs[0], "--checkpoint", runs[1])
    code, out, _ = emailrl(*arguments)
    assert code == 0 and str(here) not in out.partition("results:")[0]
    assert out.startswith("=== Benchmark Results ===\nTest split")
    verdict, table = re.split(r"paired\s+test", out.split("turns\n", 1)[1], maxsplit=1)
    assert verdict.startswith("outputs/grpo_masked/best_model → outputs/grpo_masked-2/best_model: +0.0 points")
    assert re.search(r"outputs/grpo_masked/ +outputs/grpo_masked-2/ *\n +best_model +best_model *\n", table)
    records = json.loads(emailrl(*arguments, "--json")[1])
    assert [record["model"] for record in records] == list(map(str, runs))


def test_an_untrained_best_model_is_told_where_another_run_has_a_better_one(emailrl, here: Path) -> None:
    better, third = (here / "outputs" / f"grpo_masked-{number}" / "best_model" for number in (2, 3))
    make_checkpoint(better, here / "model", metrics={"accuracy": 0.96})
    make_checkpoint(third, here / "model", metrics={"accuracy": 0.5}, step=0)
    line = (
        f"outputs/grpo_masked-3/best_model has the weights of {here / 'model'}, unchanged (step 0); "
        "grpo_masked-2 reached 96.0%: --checkpoint outputs/grpo_masked-2/best_model"
    )
    for command in (("rollout", "--limit", 1), ("ask", "When?"), ("benchmark", "--limit", 1), ("export",)):
        assert emailrl(*command)[2].splitlines().count(line) == 1
    for command in (("benchmark", "--limit", 1), ("export",)):
        code, _, error = emailrl(*command, "--checkpoint", better, "--out", command[0])
        assert code == 0 and "unchanged" not in error


def test_a_checkpoint_trained_otherwise_is_named_and_runs_no_code_of_its_own(emailrl, here: Path) -> None:
    """The file named in the metadata does not exist, so loading it would end each command with an error."""
    names = [f"outputs/grpo_masked-2/{name}" for name in ("best_model", "final")]
    for name in names:
        make_checkpoint(here / name, here / "model", environment="theirs.py:Oracle", reward="theirs.py:short")
    one = "--limit", 1
    used = "--reward theirs.py:short; this command uses --environment mail --reward art_e."
    for command, ending in (
        (("benchmark", *one), f" {used}"), (("rollout", *one), f" {used}"),
        (("ask", "When?"), "; this command uses the mail environment."),
    ):  # fmt: skip
        code, _, error = emailrl(*command)
        told = f"Note: {names[0]} was trained with --environment theirs.py:Oracle{ending}"
        assert code == (command[0] == "ask"), "untrained weights give no answer"
        assert error.splitlines().count(told) == 1
        error = emailrl(*command, "--checkpoint", "outputs/grpo_masked/best_model")[2]
        assert "was trained with" not in error
    error = emailrl("benchmark", *one, "--checkpoint", names[0], "--checkpoint", names[1])[2]
    assert all(error.count(f"Note: {name} was trained with ") == 1 for name in names)


def test_a_run_without_a_best_model_is_passed_over(emailrl, here: Path, monkeypatch) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(here / "elsewhere" / "grpo"))
    make_checkpoint(here / "elsewhere" / "grpo_masked" / "checkpoint-0", here / "model", step=0)
    for command in (("benchmark", "--limit", 1), ("rollout", "--limit", 1)):
        code, _, error = emailrl(*command)
        assert code == 0 and f"best_model are skipped: {here / 'elsewhere' / 'grpo_masked'}\n" in error


def test_two_begun_in_the_same_second_have_a_folder_each(emailrl, here: Path, monkeypatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    for name in ("20260101-000000", "20260101-000000-2"):
        played = json.loads(emailrl("benchmark", "--limit", 1, "--json")[1])["trajectories"]
        assert Path(played).parents[1] == here / "outputs" / "benchmarks" / name


def test_what_was_not_played_is_not_resumed(emailrl, here: Path) -> None:
    root = here / "outputs" / "benchmarks"
    assert emailrl("benchmark", "--model", "nanno")[0] == 2
    assert not list(root.iterdir())
    assert emailrl("benchmark", "--model", "model", "--limit", 2)[0] == 0
    [begun] = root.iterdir()
    (begun / "results.json").unlink()
    newer = root / "newer"
    newer.mkdir()
    (newer / "conditions.json").write_text('{"models": "nanno"}')
    os.utime(newer, (2**31, 2**31))
    arguments = ("benchmark", "--model", "model", "--limit", 2, "--resume")
    code, _, error = emailrl(*arguments)  # the newest is meant
    assert code == 2 and "choose another --out" in error and "[" not in error
    assert "newer/conditions.json was started under other conditions: models was nanno, now model;" in error
    code, out, _ = emailrl(*arguments, "--out", begun, "--json")
    assert code == 0 and Path(json.loads(out)["trajectories"]).parents[1] == begun


def test_the_next_step_is_named_with_its_reason(emailrl, here: Path, monkeypatch) -> None:
    _, out, said = emailrl("benchmark", "--model", "model", "--out", "bench")
    assert out.splitlines()[-1] == "results: bench"
    last = said.splitlines()[-1]  # its completions are cut off at the token limit
    assert last.startswith("Next: ")
    suggested = "inspect-trajectory bench/trajectories/00-model.jsonl --index 0 # no answer"
    assert last.endswith(f"emailrl {suggested}")
    assert emailrl(*shlex.split(suggested, comments=True))[0] == 0
    monkeypatch.setattr("emailrl.cli.benchmark.verdict", lambda _: "wrong")
    again = emailrl("benchmark", "--model", "model", "--out", "bench", "--overwrite")[2]
    assert again.endswith(" --index 0 # wrong\n")


def test_a_reward_of_ones_own_is_measured_and_named(emailrl, here: Path) -> None:
    (here / "mine.py").write_text("def fixed(trajectory):\n    return 7.5\n")
    arguments = ("benchmark", "--model", "model", "--limit", 2)
    code, out, _ = emailrl(*arguments, "--reward", "mine.py:fixed", "--out", "bench")
    assert code == 0 and "at most 2 turns, reward mine.py:fixed" in out
    [record] = json.loads((here / "bench" / "results.json").read_text())["results"]
    assert (record["reward"], record["reward_name"]) == (7.5, "mine.py:fixed")
    assert "reward" not in emailrl(*arguments)[1].splitlines()[0]


def test_several_samples_a_question(emailrl, here: Path) -> None:
    code, _, err = emailrl("benchmark", "--model", "model", "--samples", 3, "--out", "bench")
    assert code == 2 and err.startswith("error: 3 greedy samples of a question would be identical")  # nothing is loaded
    sampled = "benchmark --model model --samples 3 --temperature 1 --limit 2 --out bench"
    code, out, _ = emailrl(*sampled.split(), "--json")
    record = json.loads(out.splitlines()[-1])
    assert code == 0 and (record["num_questions"], record["num_samples"], record["samples"]) == (2, 3, 3)
    assert {"pass_at_k", "majority_low"} <= record.keys()
    ids = [trajectory.id for trajectory in read_trajectories(Path(record["trajectories"]))]
    assert len(ids) == 6 and [name[-2:] for name in ids] == ["-0", "-1", "-2"] * 2
    code, out, _ = emailrl(*sampled.split(), "--resume")
    assert code == 0 and "3 samples per question" in out and "pass@3" in out


@pytest.mark.parametrize("command", ["benchmark", "rollout"])
def test_a_missing_key_is_reported_before_anything_begins(emailrl, here: Path, monkeypatch, command: str) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    code, out, error = emailrl(command, "--engine", "openai", "--model", "openai/gpt-4.1")
    assert code == 2 and out == ""
    assert error.startswith("error: The openai engine needs an OpenRouter key. Set ") and error.count("\n") == 1
    assert not (here / "outputs" / f"{command}s").exists()
