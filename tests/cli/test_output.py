"""Results are on stdout and nothing else is; with ``--json`` stdout is one line of JSON, whatever it is made of."""

from __future__ import annotations

import io
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from end_to_end.commands import begin, exit_code
from rich.console import Console

from emailrl.cli.output import near, print_json, program, say


@dataclass
class Report:
    db: Path
    mean: float
    skipped: dict[str, int]


def test_one_line_with_absolute_paths_and_no_nan(capsys, tmp_path: Path) -> None:
    report = Report(Path("a/b.db"), float("nan"), {"too long": 2})
    print_json({"reports": (report,), "text": "line\nbreak \u2028 é", "flag": True, "inf": float("-inf")})
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == "" and out.isascii()
    reports = [{"db": str(Path.cwd() / "a/b.db"), "mean": None, "skipped": {"too long": 2}}]
    assert json.loads(out) == {"reports": reports, "text": "line\nbreak \u2028 é", "flag": True, "inf": None}


def test_a_path_has_no_way_up_in_it_and_need_not_be_text(capsys, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    print_json([tmp_path / "link" / ".." / "mail.db", tmp_path / "link"])
    shown = json.loads(capsys.readouterr().out)
    assert shown == [str(tmp_path / "elsewhere" / "mail.db"), str(tmp_path / "link")]
    print_json({"out": Path("/a/b\udcff.db")})
    out = capsys.readouterr().out
    assert out == '{"out": "/a/b\\udcff.db"}\n' and json.loads(out) == {"out": "/a/b\udcff.db"}
    with pytest.raises(TypeError):
        print_json({"object": object()})


def test_a_terminal_breaks_a_line_between_words_and_a_file_gets_it_whole() -> None:
    words = [f"word{number}" for number in range(30)]
    line = " ".join(words)
    for terminal, lines in ((True, 3), (False, 1)):
        out = io.StringIO()
        say(f"{line}\x07", Console(file=out, force_terminal=terminal, color_system=None, width=80))
        printed = out.getvalue().splitlines()
        assert len(printed) == lines and max(map(len, printed)) <= (80 if terminal else len(line))
        assert " ".join(printed).split() == words


def test_the_command_is_named_as_the_shell_in_a_folder_finds_it(tmp_path: Path, monkeypatch) -> None:
    scripts, folder = tmp_path / ".venv" / "bin", tmp_path / "quickstart"
    scripts.mkdir(parents=True)
    folder.mkdir()
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert program(folder) == f"{scripts}/python -m emailrl"  # not installed, run as a module
    (scripts / "emailrl").write_text("#!/bin/sh\necho ran")
    (scripts / "emailrl").chmod(0o755)
    assert program(folder) == "../.venv/bin/emailrl"
    ran = subprocess.run(program(folder), shell=True, cwd=folder, capture_output=True, text=True)
    assert ran.stdout == "ran\n"
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin:/bin")
    assert program(folder) == "emailrl"


# -- results of commands

LEAST = "--model nano --eval-size 2 --max-turns 1 --max-tokens 8 --wandb disabled"
QUICK = f"{LEAST} --preset quick --max-steps 1 --batch-size 1"
RESULTS = {
    "gen-db --source demo --db new.db --overwrite": "1,589 emails stored",
    "gen-db --db demo.db": "already holds 1,589 emails",
    "gen-questions --db demo.db --limit 5 --out new.jsonl --overwrite": "5 questions in",
    "rollout --model nano --limit 1 --db demo.db": "mean reward",
    "benchmark --model nano --limit 1 --db demo.db": "=== Benchmark Results ===",
    f"train {QUICK} --db demo.db": "Done after step 1: all steps done.",
    "sft --model nano --max-steps 1 --batch-size 1 --eval-size 1 --out sft --wandb disabled": "Done after step 1",
    "ask budget? --inbox queha.timi@fibralt.example --model nano --db demo.db": "",
    "export --overwrite": "best_model →",
    "report --overwrite": "with email text",
    "checkpoints list": "best_model",
    "checkpoints show": "match their recorded hashes",
    "checkpoints prune --keep 9": "0 checkpoints removed",
    "plan --model nano --gpu CPU": "Memory",
    "doctor": "python",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for command in ("gen-db --source demo --db demo.db", f"train {QUICK} --db demo.db"):
        assert exit_code(begin(folder, *command.split())) == 0, (folder / "output.txt").read_text()
    return folder


@pytest.mark.parametrize("command", RESULTS)
def test_results_go_to_stdout(emailrl, home: Path, monkeypatch, command: str) -> None:
    monkeypatch.chdir(home)
    code, out, said = emailrl(*command.split())
    assert code == 0, said
    assert RESULTS[command] in out and "Next: " not in out
    assert not RESULTS[command] or RESULTS[command] not in said
    code, out, said = emailrl(*command.replace("--out sft", "--out sft-json").split(), "--json")
    assert code == 0 and out.count("\n") == 1, (out, said)
    json.loads(out)


SMALL = f"{LEAST} --db demo.db --out recipe"


def interrupt(*given: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_a_run_says_which_recipe_it_follows(emailrl, home: Path, monkeypatch) -> None:
    monkeypatch.chdir(home)
    bare, note = f"train {SMALL} --batch-size 1 --num-generations 2 --max-steps 1", "Note: these are the defaults"
    with monkeypatch.context() as patch:
        patch.setattr("emailrl.training.loop.train", interrupt)  # what is said before a run begins
        code, _, said = emailrl(*bare.split())
        assert code == 130 and f"{note}; --preset recommended sets TEMPERATURE=1.0, LEARNING_RATE=auto," in said
        assert note not in emailrl(*bare.split(), "--learning-rate", "1e-4")[2]
    monkeypatch.setenv("MAX_REFILL_ROUNDS", "1")
    for words, changes in (bare, []), (f"{bare} --max-steps 2 --resume latest", ["max_steps 1 -> 2"]):
        code, _, said = emailrl(*words.split(), "--preset", "recommended")
        assert code == 0 and note not in said
        assert re.findall("changed since the checkpoint: (.*)", said) == changes
    log = (home / "recipe_masked/training.log").read_text(encoding="utf-8")
    assert log.count("LEARNING_RATE=auto is 0.002: measured with nano") == 1
    for kind in ("final", "best_model"):
        metadata = json.loads((home / f"recipe_masked/{kind}/metadata.json").read_text(encoding="utf-8"))
        assert metadata["settings"]["training"]["learning_rate"] == 0.002


def test_only_what_lies_in_the_working_folder_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert near(f"results: {tmp_path}/runs, '{tmp_path}/a b'") == "results: runs, 'a b'"
    assert near(elsewhere := f"/backup{tmp_path}/runs {tmp_path}-old/runs") == elsewhere
