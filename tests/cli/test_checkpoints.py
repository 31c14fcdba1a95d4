"""``emailrl checkpoints``: list, show, prune."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import Terminal
from rich.console import Console
from tiny import make_metadata

from emailrl.checkpoints import list_checkpoints, read_checkpoint, write_checkpoint
from emailrl.cli.checkpoints import checkpoints_table
from emailrl.settings import load_settings

KINDS = {"checkpoint-10": 10, "best_model": 10, "checkpoint-20": 20, "checkpoint-30": 30, "final": 30}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "grpo_masked"
    for name, step in KINDS.items():
        kind, metrics = name.partition("_")[0].partition("-")[0], {"accuracy": step / 100, "reward": 0.5}
        metadata = make_metadata(run_id="grpo_masked", kind=kind, step=step, metrics=metrics)
        write_checkpoint(folder / name, metadata, lambda into: (into / "adapter").write_text("weights"))  # type: ignore[arg-type, return-value]
    return folder


def names(run_dir: Path) -> list[str]:
    return sorted(entry.name for entry in run_dir.iterdir())


def test_list(emailrl, run_dir: Path) -> None:
    code, out, error = emailrl("checkpoints", "list")
    assert code == 0 and not error and emailrl("checkpoints") == emailrl("checkpoints", "--help")
    assert out.splitlines()[0] == "outputs/grpo_masked"
    lines = [line.split() for line in out.splitlines() if "masked" in line][1:]
    shown = {line[0]: (line[1], line[2], line[4]) for line in lines}
    assert list(shown) == sorted(KINDS) and shown["best_model"] == ("best", "10", "10.0%")
    assert shown["checkpoint-20"] == ("checkpoint", "20", "20.0%") and shown["final"] == ("final", "30", "30.0%")
    records = json.loads(emailrl("checkpoints", "list", run_dir, "--json")[1])
    assert records[0]["path"] == str(run_dir / "best_model") and records[0]["metrics"]["accuracy"] == 0.1
    console = Console(width=80)
    with console.capture() as captured:
        console.print(checkpoints_table(list_checkpoints(run_dir)))
    dated = re.compile(r"masked .* \d{4}-\d\d-\d\d \d\d:\d\d$")
    assert sum(bool(dated.search(line.rstrip())) for line in captured.get().splitlines()) == 5  # one line each


def test_a_checkpoint_between_evaluations_shows_no_accuracy_of_other_weights(emailrl, run_dir: Path) -> None:
    between = replace(read_checkpoint(run_dir / "checkpoint-20").metadata, step=25)
    for name, evaluated in (("checkpoint-25", 20), ("checkpoint-26", 25)):
        metrics = {"accuracy": 0.2, "reward": 0.5, "evaluated_step": evaluated}
        write_checkpoint(run_dir / name, replace(between, metrics=metrics), lambda into: (into / "a").touch())
    lines = [line.split() for line in emailrl("checkpoints", "list")[1].splitlines()]
    assert [line[4:6] for line in lines if line and line[0] == "checkpoint-25"] == [["–", "–"]]
    assert [line[4:6] for line in lines if line and line[0] == "checkpoint-26"] == [["20.0%", "+0.500"]]


def test_list_names_what_is_not_whole_and_still_lists_the_others(emailrl, run_dir: Path) -> None:
    metadata = run_dir / "checkpoint-20" / "metadata.json"
    record = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(record | {"step": "2"}))
    code, out, error = emailrl("checkpoints", "list")
    assert code == 0 and out.count("checkpoint-") == 2
    assert error.startswith("incomplete: outputs/grpo_masked/checkpoint-20: ") and error.count("\n") == 1
    metadata.unlink()
    code, out, error = emailrl("checkpoints", "list", "--json")
    assert code == 0 and "checkpoint-20" in error and len(json.loads(out)) == 4
    for name in set(KINDS) - {"checkpoint-20"}:
        (run_dir / name / "metadata.json").unlink()
    assert "grpo_masked/final" in emailrl("checkpoints", "list")[2]  # a run with nothing whole in it


@pytest.mark.parametrize("name", [".replaced", ".replacing"])
def test_list_names_what_an_overwriting_set_aside(emailrl, run_dir: Path, name: str) -> None:
    assert "set aside" not in emailrl("checkpoints", "list")[2]
    (run_dir / name).mkdir()
    for arguments in ((), (run_dir,)):
        assert f"grpo_masked/{name}: set aside by --overwrite" in emailrl("checkpoints", "list", *arguments)[2]


def test_a_named_folder_of_runs_is_listed_and_pruned(emailrl, run_dir: Path, tmp_path: Path) -> None:
    run_dir.rename(tmp_path / "outputs" / "made_with_out")
    (tmp_path / "outputs" / "benchmarks").mkdir()
    code, out, error = emailrl("checkpoints", "list", "outputs", "--json")
    places = {Path(each["path"]) for each in json.loads(out)}
    assert (code, error) == (0, "") and places == {tmp_path / "outputs" / "made_with_out" / name for name in KINDS}
    assert json.loads(emailrl("checkpoints", "list", "outputs/made_with_out", "--json")[1]) == json.loads(out)
    assert json.loads(emailrl("checkpoints", "list", "--json")[1]) == []
    assert "outputs/grpo" in emailrl("checkpoints", "list")[2]  # where it looked
    assert "outputs/benchmarks" in emailrl("checkpoints", "list", "outputs/benchmarks")[2]
    emailrl("checkpoints", "prune", "outputs", "--keep", "2", "--yes")
    assert names(tmp_path / "outputs" / "made_with_out") == sorted(set(KINDS) - {"checkpoint-10"})


def test_show_checks_the_hashes(emailrl, run_dir: Path) -> None:
    code, out, _ = emailrl("checkpoints", "show")
    assert code == 0 and "best_model: all 1 files match their recorded hashes" in out and '"step": 10' in out
    assert json.loads(emailrl("checkpoints", "show", "latest", "--json")[1])["metadata"]["kind"] == "final"
    (run_dir / "best_model" / "adapter").write_text("other")
    code, _, error = emailrl("checkpoints", "show", "best")
    assert code == 1 and "is damaged" in error and error.count("\n") == 1


def test_show_prints_the_settings_that_differ_and_verbose_all(emailrl, run_dir: Path) -> None:
    settings = load_settings({"learning_rate": 2e-5, "max_turns": 6}, environ={}).public()
    settings["training"]["from_another_version"] = 1
    metadata = replace(read_checkpoint(run_dir / "final").metadata, settings=settings, step=40)
    folder = write_checkpoint(run_dir / "checkpoint-40", metadata, lambda into: (into / "a").touch()).path
    code, out, _ = emailrl("checkpoints", "show", folder)
    assert code == 0
    shown = json.loads(out.partition("\n")[2])
    assert "settings" not in shown and shown["non_default_settings"] == {
        "agent": {"max_turns": 6},
        "training": {"learning_rate": 2e-5, "from_another_version": 1},
    }
    verbose = json.loads(emailrl("checkpoints", "show", folder, "--verbose")[1].partition("\n")[2])
    record = json.loads(emailrl("checkpoints", "show", folder, "--json")[1])
    assert verbose["settings"] == record["metadata"]["settings"] == settings


def test_prune_keeps_best_and_final(emailrl, run_dir: Path, monkeypatch) -> None:
    assert json.loads(emailrl("checkpoints", "prune", "--yes", "--json")[1]) == {"removed": [], "keep": 3}
    monkeypatch.setenv("SAVE_TOTAL_LIMIT", "1")
    code, out, error = emailrl("checkpoints", "prune", "--yes", "--json")
    assert code == 0 and error.count("to remove:") == 2
    removed = [str(run_dir / "checkpoint-10"), str(run_dir / "checkpoint-20")]
    assert json.loads(out) == {"removed": removed, "keep": 1}
    assert names(run_dir) == ["best_model", "checkpoint-30", "final"]
    _, out, _ = emailrl("checkpoints", "prune", "--keep", 0, "--yes")
    assert out == "1 checkpoint removed, the last 0 of each run kept\n"


def test_prune_asks_first(emailrl, run_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, error = emailrl("checkpoints", "prune", "--keep", 0)
    assert code == 2 and error.endswith("error: Removing 3 checkpoints needs confirmation. Add --yes.\n")
    for answer, code, left in (("n\n", 130, 5), ("y\n", 0, 2)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert emailrl("checkpoints", "prune", "--keep", 0)[0] == code and len(names(run_dir)) == left


def test_no_run_yet(emailrl) -> None:
    code, out, error = emailrl("checkpoints", "list")
    assert (code, out) == (0, "") and "No checkpoints yet" in error
    assert json.loads(emailrl("checkpoints", "list", "--json")[1]) == []
    assert emailrl("checkpoints", "show")[0] == emailrl("checkpoints", "list", "nowhere")[0] == 2
