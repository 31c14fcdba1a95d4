"""``emailrl inspect-trajectory``: which trajectory is shown, and one line for everything that is wrong."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_checkpoint, make_model
from tokenizers import Tokenizer

from emailrl.page.place import follow
from emailrl.records import TrajectoryWriter, trajectory_to_dict, write_records, write_trajectories
from emailrl.records.trajectory import Message, Scenario, TokenSample, Trajectory, Turn


def make(name: str, *, ids: tuple[int, ...] = (0,), text: str = "") -> Trajectory:
    sample = TokenSample()
    sample.append_sampled(list(ids), [-0.5] * len(ids))
    asked = Scenario("q", f"question of {name}", "gold", ["<m@x>"], "ann@example.com", "2001-01-01")
    turns, messages = [Turn(list(ids), [-0.5] * len(ids), "stop")], [Message("assistant", text)]
    return Trajectory(name, "g", asked, step=4, messages=messages, turns=turns, samples=[sample])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "grpo_masked"
    write_trajectories(folder / "trajectories" / "step-000004.jsonl", [make("t0"), make("t1"), make("t2")])
    return folder


DECODED = "7⟨61%⟩ ⟨61%⟩4⟨61%⟩<|im_end|>⟨61%⟩"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def ids(model: Path) -> tuple[int, ...]:
    """The four tokens of DECODED."""
    return tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode("7 4<|im_end|>").ids)


def test_without_a_path_the_newest_trajectory_is_shown(emailrl, run_dir: Path, tmp_path: Path) -> None:
    code, out, _ = emailrl("inspect-trajectory")
    assert code == 0 and "question of t2" in out and "3 of 3 (--index 2)" in out
    write_records(run_dir / "metrics.jsonl", [{"step": 9, "loss": 0.0}])  # newer, but no trajectory
    assert "question of t2" in emailrl("inspect-trajectory")[1]
    write_trajectories(run_dir / "trajectories" / "confirm-000000.jsonl", [make("of an earlier policy")])
    assert "question of t2" in emailrl("inspect-trajectory")[1]
    write_trajectories(tmp_path / "outputs" / "rollouts" / "rollout-1.jsonl", [make("rolled")])
    assert "question of rolled" in emailrl("inspect-trajectory")[1]


def test_verbose_decodes_with_the_tokenizer_of_the_run_else_of_the_settings(
    emailrl, run_dir: Path, model: Path, ids: tuple[int, ...], monkeypatch
) -> None:
    write_records(run_dir / "training" / "step-000004.jsonl", [{"id": "t2", "advantage": -1.25}])
    assert "-1.2500" in emailrl("inspect-trajectory", run_dir)[1]
    file = run_dir / "trajectories" / "step-000005.jsonl"
    write_trajectories(file, [make("decoded", ids=ids, text="7 4")])
    _, out, _ = emailrl("inspect-trajectory", file, "--verbose")
    assert "ids only" in out and f"{ids[0]} ⟨61%⟩" in out
    monkeypatch.setenv("MODEL_NAME", str(model))
    assert DECODED in emailrl("inspect-trajectory", file, "--verbose")[1]
    monkeypatch.delenv("MODEL_NAME")
    make_checkpoint(run_dir / "best_model", model)
    assert DECODED in emailrl("inspect-trajectory", file, "--verbose")[1]


def test_verbose_finds_the_tokenizer_of_the_benchmark_or_rollout_that_wrote_the_file(
    emailrl, tmp_path: Path, model: Path, ids: tuple[int, ...]
) -> None:
    measured = tmp_path / "bench" / "trajectories" / "00-mine.jsonl"
    write_trajectories(measured, [make("measured", ids=ids, text="7 4")])
    results = [{"model": "mine", "trajectories": "elsewhere/00-mine.jsonl", "base_model": str(model)}]
    (tmp_path / "bench" / "results.json").write_text(json.dumps({"results": results}))
    out = emailrl("inspect-trajectory", measured, "--verbose")[1]
    assert DECODED in out and "benchmark of mine" in out and "step 4" not in out
    rolled = tmp_path / "rolled.jsonl"
    write_trajectories(rolled, [make("rolled", ids=ids, text="7 4")])
    assert "no matching tokenizer" in emailrl("inspect-trajectory", rolled, "--verbose")[1]
    assert DECODED in emailrl("inspect-trajectory", rolled, "--verbose", "--model", model)[1]
    (tmp_path / "rolled.conditions.json").write_text(json.dumps({"model": str(model)}))
    assert DECODED in emailrl("inspect-trajectory", rolled, "--verbose")[1]


def test_programs_get_the_trajectory_or_the_list(emailrl, run_dir: Path) -> None:
    file = run_dir / "trajectories" / "step-000004.jsonl"
    write_trajectories(file, [make("t0"), make("t1"), make("t2")])
    one = json.loads(emailrl("inspect-trajectory", file, "--index", 1, "--json")[1])
    assert (one["index"], one["file"]) == (1, str(file)) and one == one | trajectory_to_dict(make("t1"))
    some = json.loads(emailrl("inspect-trajectory", file, "--list", "--limit", 2, "--json")[1])
    assert [(each["index"], each["id"]) for each in some] == [(1, "t1"), (2, "t2")]
    assert emailrl("inspect-trajectory", file, "--follow", "--json")[0] == 2


def test_list_shows_a_line_per_trajectory(emailrl, run_dir: Path, monkeypatch) -> None:
    file = run_dir / "trajectories" / "step-000004.jsonl"
    right = replace(make("t3"), reward=1.25, rubric={"answer_correct": True})
    hostile = replace(make("t4"), scenario=replace(make("t4").scenario, question="\x1b[31m" + "long " * 40))
    write_trajectories(file, [make("t0"), make("t1"), right, hostile])
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = emailrl("inspect-trajectory", file, "--list", "--limit", 2)
    rows = [line.split() for line in out.splitlines() if re.match(" *\\d+ ", line)]
    title = "step-000004.jsonlindex 2 to 3 of 4 trajectories; choose others with --index and --limit"
    assert code == 0 and title in out.replace("\n", "")
    assert "--limit" not in emailrl("inspect-trajectory", file, "--list")[1]
    assert rows[0] == ["2", "4", "1.250", "correct", "1", "1", "question", "of", "t3"]
    assert rows[1][:5] == ["3", "4", "0.000", "not", "judged"]
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    assert "question of t0" in emailrl("inspect-trajectory", file, "--list", "--index", 0)[1]
    monkeypatch.setenv("COLUMNS", "60")
    narrow = emailrl("inspect-trajectory", file, "--list")[1].splitlines()
    assert ["index", "reward", "verdict", "turns", "question"] in [line.split() for line in narrow]
    assert any(line.endswith("question of t0") for line in map(str.rstrip, narrow)) and max(map(len, narrow)) <= 60


def test_the_head_says_what_made_a_trajectory(emailrl, run_dir: Path, tmp_path: Path) -> None:
    assert "step 4  mode masked" in emailrl("inspect-trajectory")[1]
    write_trajectories(run_dir / "trajectories" / "eval-000004.jsonl", [make("e")])
    assert "evaluation at step 4" in emailrl("inspect-trajectory", run_dir / "trajectories" / "eval-000004.jsonl")[1]
    write_trajectories(tmp_path / "rolled.jsonl", [make("r")])
    assert "group g  rollout  policy" in emailrl("inspect-trajectory", "rolled.jsonl")[1]


BAD = ("[1]", '{"id": "x"}', "{", json.dumps(trajectory_to_dict(make("b")) | {"reward": "high"}))


@pytest.fixture
def damaged(run_dir: Path) -> Path:
    """A file of seven lines, of which only the fifth and the last hold a trajectory; the first is bad."""
    file = run_dir / "trajectories" / "step-000004.jsonl"
    good, _, last = file.read_text().splitlines()
    file.write_text("\n".join([*BAD, good, "null", last]) + "\n")
    return file


def test_bad_lines_are_passed_over_and_named_whichever_is_shown(emailrl, damaged: Path) -> None:
    code, out, error = emailrl("inspect-trajectory", damaged, "--list")
    assert code == 0 and re.findall(r"(\d+) .*question of (t\d)", out) == [("4", "t0"), ("6", "t2")]
    assert error.startswith("step-000004.jsonl: 5 of 7 lines could not be read: line 1: expected a JSON object, found ")
    assert "; line 2: not a trajectory (group_id is missing); line 3: not JSON (" in error
    code, out, error = emailrl("inspect-trajectory", damaged)
    assert code == 0 and "question of t2" in out
    assert "5 of 7 lines could not be read: line 1: " in error and "; also lines 4, 6\nNext: " in error
    code, _, error = emailrl("inspect-trajectory", damaged, "--index", "0")
    assert code == 1 and "also lines 4, 6\n" in error and error.splitlines()[1].startswith("error: ")
    code, out, error = emailrl("inspect-trajectory", damaged.parent.parent, "--html", "run.html")
    assert code == 0 and "2 trajectories" in out
    assert "Left out: step-000004.jsonl: 5 of 7 lines could not be read: line 1: expected" in error
    with damaged.open("a") as stream:
        stream.write('{"id": "torn", "scena')
    code, out, error = emailrl("inspect-trajectory", damaged)
    assert code == 0 and "question of t2" in out and "line 8: incomplete" in error


def test_an_index_and_a_folder_and_nothing_to_show(emailrl, run_dir: Path, tmp_path: Path) -> None:
    assert "question of t0" in emailrl("inspect-trajectory", run_dir, "--index", 0)[1]
    assert "question of t1" in emailrl("inspect-trajectory", run_dir / "trajectories", "--index", -2)[1]
    code, out, error = emailrl("inspect-trajectory", run_dir, "--index", 3)
    assert (code, out) == (2, "") and "holds 3 trajectories; there is no --index 3" in error
    shutil.rmtree(run_dir)
    code, out, error = emailrl("inspect-trajectory")
    assert (code, out) == (2, "") and "error: No run, benchmark or rollout with trajectories under outputs." in error
    assert "or name one." in error
    (tmp_path / "quickstart" / "outputs").mkdir(parents=True)
    assert "or name one, like quickstart/outputs." in emailrl("view")[2]
    (tmp_path / "none.jsonl").write_text('{"group_id": "g", "scenario": {')
    code, out, error = emailrl("inspect-trajectory", "none.jsonl")
    assert (code, out) == (2, "") and "holds no complete trajectory yet" in error
    code, _, error = emailrl("inspect-trajectory", "no\x1b[31mwhere")
    assert code == 2 and "\x1b" not in error and error.count("\n") == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    for none in ("empty", "empty.jsonl"):
        assert f"No trajectory in {none} yet." in emailrl("inspect-trajectory", none)[2]


def test_follow_takes_up_new_lines_and_newer_files(run_dir: Path) -> None:
    file = run_dir / "trajectories" / "step-000004.jsonl"
    seen = follow([run_dir], poll_seconds=0.01)
    index, position = next(seen)
    assert index.trajectory(position).id == "t2"

    def write() -> None:
        time.sleep(0.05)
        line = json.dumps(json.loads(file.read_text().splitlines()[0]) | {"id": "t3"}) + "\n"
        with file.open("a") as stream:  # in two halves, as a crash or a slow disk would leave it
            stream.write(line[:20])
            stream.flush()
            time.sleep(0.05)
            stream.write(line[20:])
        time.sleep(0.1)
        with closing(TrajectoryWriter(run_dir / "trajectories" / "step-000005.jsonl")) as writer:
            writer.append(replace(make("t4"), step=5))

    thread = threading.Thread(target=write)
    thread.start()
    appended = [next(seen), next(seen)]
    assert [(at, index.trajectory(at).id) for index, at in appended] == [(3, "t3"), (0, "t4")]
    thread.join()
