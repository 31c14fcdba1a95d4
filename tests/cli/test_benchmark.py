"""``emailrl benchmark``, real parts end to end: questions, database, random policy, checkpoint."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from tiny import make_checkpoint, make_questions

from emailrl.agent.mail_env import Rubric
from emailrl.agent.play import Collector
from emailrl.questions import load
from emailrl.questions.load import write_scenarios
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


@pytest.mark.parametrize("command", ["benchmark", "rollout"])
def test_the_model_s_own_token_limit_holds_where_none_is_given(emailrl, here: Path, command: str) -> None:
    generation = json.loads((here / "model" / "generation_config.json").read_text())
    (here / "model" / "generation_config.json").write_text(json.dumps(generation | {"max_new_tokens": 3}))
    toml = here / "emailrl.toml"
    for limit in (6, 3):
        code, _, error = emailrl(command, "--model", "model")
        assert code == 0, error
        [newest] = sorted((here / "outputs").glob("*/**/*.jsonl"), key=lambda file: file.stat().st_mtime)[-1:]
        turns = [turn for trajectory in read_trajectories(newest) for turn in trajectory.turns]
        assert max(len(turn.completion_ids) for turn in turns) == limit
        toml.write_text(toml.read_text().replace("max_tokens = 6\n", ""))


def test_models_side_by_side(emailrl, here: Path) -> None:
    code, out, _ = emailrl("benchmark", "--checkpoint", "best", "--model", "model", "--out", "bench")
    assert code == 0 and "Test split, greedy, at most 2 turns" in out
    assert "best_model against model: the first is better on 0, the second on 0 of 4 questions; p = 1" in out
    for row in ("accuracy", "95% interval", "sources_correct", "num_turns", "latency_seconds", "tokens"):
        assert row in out
    assert "cost" not in out  # an engine in this process has no price
    rows = [line.split()[0] for line in out.splitlines() if line.split()]
    assert rows[rows.index("tokens") :][:3] == ["tokens", "prompt_tokens", "completion_tokens"]
    assert "tokens counts a conversation once, prompt_tokens counts its prefix again at every turn" in out
    made = {"accuracy.png", "accuracy.svg", "conditions.json", "questions.csv", "results.csv", "results.json"}
    assert {file.name for file in (here / "bench").iterdir()} == made | {"trajectories"}
    assert json.loads((here / "bench" / "conditions.json").read_text())["dtype"] in ("fp32", "bf16")  # not auto
    code, _, error = emailrl("benchmark", "--model", "model", "--out", "bench")
    assert code == 2 and "bench already holds a benchmark. Use another --out, or --overwrite." in error
    assert emailrl("benchmark", "--model", "model", "--out", "bench", "--overwrite")[0] == 0
    assert not list((here / "bench").glob("accuracy.*"))  # one model is no comparison
    assert [file.name for file in (here / "bench" / "trajectories").glob("*.jsonl")] == ["00-model.jsonl"]
    both = json.loads(emailrl("benchmark", "--checkpoint", "best", "--model", "model", "--json")[1].splitlines()[-1])
    assert [record["num_questions"] for record in both] == [4, 4]


def test_a_table_names_adapters_from_here_and_json_from_the_root(emailrl, here: Path) -> None:
    make_checkpoint(here / "outputs" / "grpo_masked-2" / "best_model", here / "model")
    second = here / "outputs" / "grpo_masked-2" / "best_model"
    first = here / "outputs" / "grpo_masked" / "best_model"
    arguments = ("benchmark", "--limit", 1, "--checkpoint", first, "--checkpoint", second)
    code, out, _ = emailrl(*arguments)
    assert code == 0 and str(here) not in out.partition("results:")[0]
    assert out.startswith("=== Benchmark Results ===\noutputs/grpo_masked/best_model: accuracy 0.0% (95% interval ")
    _, table = out.split("Test split", 1)
    assert table.splitlines()[2].split() == ["outputs/grpo_masked/", "outputs/grpo_masked-2/"]
    assert table.splitlines()[3].split() == ["best_model", "best_model"]
    assert "outputs/grpo_masked/best_model against outputs/grpo_masked-2/best_model: the first" in out
    records = json.loads(emailrl(*arguments, "--json")[1])
    assert [record["model"] for record in records] == [str(first), str(second)]


def test_an_untrained_best_model_is_told_where_another_run_has_a_better_one(emailrl, here: Path) -> None:
    make_checkpoint(here / "outputs" / "grpo_masked-2" / "best_model", here / "model", metrics={"accuracy": 0.96})
    third = here / "outputs" / "grpo_masked-3" / "best_model"
    make_checkpoint(third, here / "model", metrics={"accuracy": 0.5}, step=0)
    line = (
        f"outputs/grpo_masked-3/best_model has the weights of {here / 'model'}, unchanged (step 0); "
        "grpo_masked-2 reached 96.0%: --checkpoint outputs/grpo_masked-2/best_model"
    )
    for command in (("rollout", "--limit", 1), ("ask", "When?")):
        assert emailrl(*command)[2].splitlines().count(line) == 1
    for command in (("benchmark", "--limit", 1), ("export",)):
        code, _, error = emailrl(*command)
        assert code == 0 and error.splitlines().count(line) == 1
        code, _, error = emailrl(*command, "--checkpoint", "outputs/grpo_masked-2/best_model", "--out", command[0])
        assert code == 0 and "unchanged" not in error
    make_checkpoint(here / "outputs" / "grpo_masked-2" / "final", here / "model", step=9)  # now the newest run
    assert "unchanged" not in emailrl("export", "--out", "newest")[2]
    _, _, error = emailrl("export", "--out", "named", "--checkpoint", "outputs/grpo_masked-3/best_model")
    assert error.splitlines()[0] == line


def test_a_checkpoint_trained_otherwise_is_named_and_runs_no_code_of_its_own(emailrl, here: Path) -> None:
    """The file named in the metadata does not exist, so loading it would end each command with an error."""
    given = {"environment": "theirs.py:Oracle", "reward": "theirs.py:short"}
    run = here / "outputs" / "grpo_masked-2"
    for name in ("best_model", "final"):
        make_checkpoint(run / name, here / "model", **given)
    start = "Note: outputs/grpo_masked-2/best_model was trained with --environment theirs.py:Oracle"
    used = "this command uses --environment mail --reward art_e."
    for command in (("benchmark", "--limit", 1), ("rollout", "--limit", 1)):
        code, _, error = emailrl(*command)
        assert code == 0 and error.splitlines().count(f"{start} --reward theirs.py:short; {used}") == 1
    both = ("--checkpoint", "outputs/grpo_masked-2/best_model", "--checkpoint", "outputs/grpo_masked-2/final")
    code, _, error = emailrl("benchmark", "--limit", 1, *both)
    assert code == 0 and error.count("Note: ") == 1
    assert "Note: outputs/grpo_masked-2/best_model and outputs/grpo_masked-2/final were trained with " in error
    code, _, error = emailrl("ask", "When?")
    assert code == 0 and f"{start}; this command uses the mail environment.\n" in error
    for command in (("benchmark", "--limit", 1), ("rollout", "--limit", 1), ("ask", "When?")):
        code, _, error = emailrl(*command, "--checkpoint", "outputs/grpo_masked/best_model")
        assert code == 0 and "was trained with" not in error


def test_without_a_run_the_model_itself_is_measured(emailrl, here: Path, monkeypatch) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(here / "elsewhere" / "grpo"))
    record = json.loads(emailrl("benchmark", "--limit", 1, "--json")[1].splitlines()[-1])
    assert record["model"] == "model" and record["checkpoint"] is None
    make_checkpoint(here / "elsewhere" / "grpo_masked" / "checkpoint-0", here / "model", step=0)
    for command in (("benchmark", "--limit", 1), ("rollout", "--limit", 1)):
        code, _, error = emailrl(*command)
        assert code == 0 and f"best_model are skipped: {here / 'elsewhere' / 'grpo_masked'}\n" in error


def test_an_interrupt_exits_130_with_what_is_finished(emailrl, here: Path, monkeypatch) -> None:
    real, played = Collector.collect, []

    def collect(*arguments, **options):
        if len(played) == 2:
            raise KeyboardInterrupt
        played.append(real(*arguments, **options))
        return played[-1]

    code, _, error = emailrl("benchmark", "--resume")
    assert code == 2 and "outputs/benchmarks has no unfinished benchmark." in error and error.count("\n") == 1
    monkeypatch.setattr(Collector, "collect", collect)
    code, out, said = emailrl("benchmark", "--sequential", "--out", "bench")
    assert code == 130 and "outputs/grpo_masked/best_model: interrupted after 2 of 4 questions, the first ones" in out
    assert "2 questions saved in bench; to finish, rerun the same command with --resume --out bench" in said
    written = json.loads((here / "bench" / "results.json").read_text())
    assert written["interrupted"] and written["results"][0]["num_questions"] == 2
    code, out, error = emailrl("benchmark", "--out", "other")  # before anything has ended
    assert (code, out) == (130, "") and error.splitlines()[-1] == "interrupted"
    played.pop()
    assert emailrl("benchmark", "--sequential")[0] == 130
    monkeypatch.setattr(Collector, "collect", real)
    code, out, _ = emailrl("benchmark", "--sequential", "--resume", "--json")
    record = json.loads(out)
    assert code == 0 and record["num_questions"] == 4 and record["complete"] and record["unjudged"] == 0
    assert len(list((here / "outputs" / "benchmarks").iterdir())) == 1


def test_two_begun_in_the_same_second_have_a_folder_each(emailrl, here: Path, monkeypatch) -> None:
    real, others = load.read_questions, []

    def overtaken(*arguments, **options):
        chosen = real(*arguments, **options)
        if not others:
            others.append("begins")
            others[0] = json.loads(emailrl("benchmark", "--limit", 1, "--json")[1])["trajectories"]
        return chosen

    monkeypatch.setattr(load, "read_questions", overtaken)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    record = json.loads(emailrl("benchmark", "--limit", 2, "--json")[1])
    root = here / "outputs" / "benchmarks"
    assert Path(others[0]).parents[1] == root / "20260101-000000"
    assert Path(record["trajectories"]).parents[1] == root / "20260101-000000-2"
    assert [len(list(read_trajectories(Path(each)))) for each in (others[0], record["trajectories"])] == [1, 2]


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
    code, out, _ = emailrl("benchmark", "--model", "model", "--limit", 2, "--resume", "--json")
    assert code == 0 and Path(json.loads(out)["trajectories"]).parents[1] == begun
    code, _, error = emailrl("benchmark", "--model", "model", "--limit", 2, "--resume")
    assert code == 2 and "choose another --out" in error and "[" not in error
    assert "newer/conditions.json was started under other conditions: models was nanno, now model;" in error


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
    assert again.endswith(" --index 0 # a wrong answer\n")


def test_what_every_table_must_say_is_said(emailrl, here: Path) -> None:
    shared = make_questions(2)
    shared[1].split = "train"
    write_scenarios(here / "questions.jsonl", shared)
    code, _, error = emailrl("benchmark")
    assert code == 2 and "allow-shared-inbox" in error and error.count("\n") == 1
    code, out, _ = emailrl("benchmark", "--allow-shared-inbox")
    assert code == 0 and "note:" in out and "share" in out


def test_a_reward_of_ones_own_is_measured_and_named(emailrl, here: Path) -> None:
    (here / "mine.py").write_text("def fixed(trajectory):\n    return 7.5\n")
    arguments = ("benchmark", "--model", "model", "--limit", 2)
    code, out, _ = emailrl(*arguments, "--reward", "mine.py:fixed", "--out", "bench")
    assert code == 0 and "at most 2 turns, reward mine.py:fixed" in out
    [record] = json.loads((here / "bench" / "results.json").read_text())["results"]
    assert (record["reward"], record["reward_name"]) == (7.5, "mine.py:fixed")
    assert "reward" not in emailrl(*arguments)[1].splitlines()[0]
    code, _, error = emailrl(*arguments, "--reward", "http://:8000/x")
    assert code == 2 and "has no host" in error.splitlines()[-1] and "Traceback" not in error
    code, _, error = emailrl(*arguments, "--reward", "mine.py:absent")
    assert code == 2 and "absent" in error


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
