"""The page as a file: what it is about, what it holds, what it may load."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from page.conftest import write_weights

from emailrl.base.errors import UsageError
from emailrl.page.build import SCRIPTS, PageData, document, gather, page
from emailrl.page.place import place_of
from emailrl.page.redact import redacted
from emailrl.page.server import Served
from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.training.report import DROPPED


def block(text: str, name: str) -> Any:
    """What a data block of the page holds."""
    packed = re.search(rf'id="{name}">"([^"]*)"</script>', text)
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def data_of(subject: Path) -> PageData:
    return gather(place_of(subject), model_name="nano")


@pytest.fixture
def run_dir(tmp_path: Path, trajectory: Trajectory) -> Path:
    folder = tmp_path / "outputs" / "grpo_masked"
    for name, count in (("step-000001", 3), ("eval-000000", 2), ("step-000010", 1), ("eval-000010", 2)):
        made = [replace(trajectory, id=f"{name}-{number}", step=int(name[5:])) for number in range(count)]
        write_trajectories(folder / "trajectories" / f"{name}.jsonl", made)
    write_records(folder / "training" / "step-000001.jsonl", [{"id": "step-000001-1", "advantage": -0.75}])
    write_records(folder / "metrics.jsonl", [{"step": 1, "loss": 0.5}, {"step": 10, "loss": 0.25}])
    return folder


def test_a_run_holds_its_files_in_the_order_of_the_steps(run_dir: Path) -> None:
    data = data_of(run_dir)
    names = [file["name"][:-6] for file in data.run["files"]]
    assert names == ["eval-000000", "step-000001", "step-000010", "eval-000010"]
    assert [step["loss"] for step in data.run["steps"]] == [0.5, 0.25]
    assert [row["advantage"] for row in data.rows] == [None, None, None, -0.75, None, None, None, None]
    assert [each["id"] for each in data.details()] == [row["id"] for row in data.rows]
    assert place_of(run_dir.parent).root == place_of(run_dir / "trajectories").root == run_dir
    newer = run_dir.parent / "benchmarks" / "after" / "trajectories" / "00-nano.jsonl"
    newer.parent.mkdir(parents=True)
    newer.write_bytes(place_of(run_dir).files[0].read_bytes())
    assert place_of(run_dir.parent).root == run_dir  # while its test is being played too
    labels = [file["label"] for file in data.run["files"]]
    assert labels[1] == "training step 1" and labels[3] == "evaluation at step 10"


def test_what_is_left_out_of_a_file_is_said(run_dir: Path) -> None:
    file = run_dir / "trajectories" / "step-000001.jsonl"
    data = gather(place_of(file, -2), model_name="nano")
    assert [row["id"] for row in data.rows] == ["step-000001-1"]
    assert "2 of the 3 trajectories in step-000001.jsonl" in data.run["left_out"]
    with pytest.raises(UsageError, match="holds 3 trajectories; there is no --index 3"):
        gather(place_of(file, 3), model_name="nano")
    cut = gather(place_of(file), model_name="nano", max_trajectories=2)
    assert len(cut.rows) == 2 and "1 of the 3 trajectories in step-000001.jsonl" in cut.run["left_out"]
    with file.open("a") as stream:
        stream.write('{"id": "torn')
    data = data_of(file)
    assert len(data.rows) == 3
    assert data.run["left_out"] == ["step-000001.jsonl, line 4: incomplete (still being written, or cut off)"]


def test_over_the_budget_the_evaluations_stay_and_the_page_says_what_is_missing(run_dir: Path) -> None:
    data = gather(place_of(run_dir), model_name="nano", max_trajectories=5)
    assert [row["file"][:-6] for row in data.rows] == ["eval-000000"] * 2 + ["step-000010"] + ["eval-000010"] * 2
    assert data.run["left_out"] == ["step-000001.jsonl (1 of 4 files)"]


def test_the_file_holds_everything_names_no_host_and_runs_its_own_script_alone(run_dir: Path) -> None:
    text = page(data_of(run_dir))
    assert [row["id"] for row in block(text, "rows")][:3] == ["eval-000000-0", "eval-000000-1", "step-000001-0"]
    assert block(text, "chunk-0")[2]["question"] == "Who paid?"
    assert not re.search(r"""\b(?:src|href)\s*=\s*["']?(?:[a-z]+:)?//""", text)
    assert "@import" not in text and "url(" not in text
    assert {*re.findall(r"https?://[^\s\"']+", text)} == {"http://www.w3.org/2000/svg"}  # a namespace, never loaded
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)

    def allowed(source: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'", "script-src": allowed(script), "style-src": allowed(style), "connect-src": "'none'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert len((script + style).encode()) < 135_000
    assert text.index("<script>") < text.index('id="chunk-0"')  # curves before a large file is read
    shown, policy = document("<b>", {"served": True}, connect="'self'")
    assert "connect-src 'self'" in policy and policy in shown and "&lt;b&gt;" in shown


def texts_in(script: str) -> list[str]:
    """The texts of a script's strings and templates, without what is computed inside templates."""
    text, code = r"\\.|\$\{|`|[^\\`$]+|\$", r'"(?:\\.|[^"\\\n])*"|`|[{}]|[^"`{}]+'
    found, nested, at = [], [code], 0
    while match := re.compile(nested[-1], re.DOTALL).match(script, at):
        at, piece = match.end(), match[0]
        if (piece == "`" and nested[-1] == text) or piece == "}":
            nested.pop()
        elif piece in ("`", "{", "${"):
            nested.append(text if piece == "`" else code)
        elif nested[-1] == text or piece[0] == '"':
            found.append(piece)
    assert nested == [code] and at == len(script)
    return found


def test_the_scripts_are_served_with_all_their_texts_and_fewer_spaces() -> None:
    written = "\n".join((files("emailrl.page") / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    written = "\n".join(line.strip() for line in written.splitlines() if line.strip()[:2] != "//")
    markup, _ = document("t", {}, connect="'none'")
    [served] = re.findall(r'<script>\(\(\) => \{\n"use strict";\n(.*)\n\}\)\(\);</script>', markup, re.DOTALL)
    assert texts_in(served) == texts_in(written)
    assert re.sub(r"\s", "", served) == re.sub(r"\s", "", written)
    assert len(served) < 0.97 * len(written)
    assert texts_in('a = "b = \\"" + `c = ${d ? `e = ${{f: 1}.f}` : "g"} \\` h`;') == [
        '"b = \\""',
        "c = ",
        "e = ",
        '"g"',
        " ",
        "\\`",
        " h",
    ]


def test_a_run_without_trajectories_has_a_page_of_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "sft"
    write_records(folder / "metrics.jsonl", [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
    (folder / "trajectories").mkdir()
    data = data_of(folder)
    assert (data.run["title"], data.run["kind"], data.run["total"], data.rows) == ("sft", "run", 0, [])
    assert [step["loss"] for step in data.run["steps"]] == [0.5, 0.25]
    served = Served(folder, model_name="nano")
    assert served.run()["steps"] == data.run["steps"] and served.listed("rows", 0, 9) == []
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="No trajectory in"):
        place_of(folder)
    (folder / "status.json").write_text('{"state": "running", "step": 0, "steps": 9, "at": 1.0}')
    assert Served(folder, model_name="nano").run()["status"]["steps"] == 9  # from its first second


def test_what_is_no_file_is_said_to_be_left_out(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "trajectories" / "step-000002.jsonl").mkdir()
    (run_dir / "trajectories" / "step-000003.jsonl").symlink_to("nowhere.jsonl")
    linked = (run_dir / "trajectories" / "step-000010.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (run_dir / "trajectories" / "step-000010.jsonl").symlink_to(linked)
    (run_dir / "training" / "step-000010.jsonl").mkdir()
    for name in ("evaluations.jsonl", "confirmed.json", "results.json"):
        os.mkfifo(run_dir / name)
    data = data_of(run_dir)
    trajectories = ["step-000002.jsonl is a folder", "step-000003.jsonl is a broken link"]
    others = ["evaluations.jsonl is a device or pipe", "training/step-000010.jsonl is a folder"]
    assert data.run["left_out"] == trajectories + others
    assert data.run["total"] == 8  # a link to a file is read
    assert Served(run_dir, model_name="nano").run()["left_out"] == data.run["left_out"][:3]
    shutil.rmtree(run_dir / "trajectories")
    (run_dir / "trajectories" / "step-000001.jsonl").mkdir(parents=True)
    assert "step-000001.jsonl is a folder" in data_of(run_dir).run["left_out"]


def test_a_benchmark_shows_its_results_and_what_it_was_run_with(tmp_path: Path, trajectory: Trajectory) -> None:
    file = tmp_path / "bench" / "trajectories" / "00-nano.jsonl"
    write_trajectories(file, [trajectory])
    results = [{"model": "nano", "accuracy": 1.0, "trajectories": str(file)}]
    (tmp_path / "bench" / "results.json").write_text(json.dumps({"results": results}))
    (tmp_path / "bench" / "conditions.json").write_text('{"temperature": 0.5}')
    run = data_of(tmp_path / "bench").run
    assert run["results"][0]["accuracy"] == 1.0 and run["settings"] == {"conditions": {"temperature": 0.5}}
    assert [(each["source"], each["label"]) for each in run["files"]] == [("benchmark", "benchmark of nano")]
    (tmp_path / "bench" / "conditions.json").write_text("half a li")
    assert data_of(tmp_path / "bench").run["settings"] == {}


def test_a_page_has_the_notes_of_its_results_and_of_a_shared_inbox(tmp_path: Path, trajectory: Trajectory) -> None:
    note = "splits share an inbox (a@x): not a test on unseen mailboxes"
    bench, run_dir = tmp_path / "benchmarks" / "b", tmp_path / "run"
    for folder in (bench, run_dir):
        write_trajectories(folder / "trajectories" / "00-nano.jsonl", [trajectory])
    result = {
        "model": "nano",
        "accuracy": 1.0,
        "base_model": "nano",
        "trajectories": "00-nano.jsonl",
        "complete": True,
        "notes": [note],
    }
    (bench / "results.json").write_text(json.dumps({"results": [result], "notes": [note, 3]}))
    weights = write_weights(run_dir / "final", b"trained", kind="final")
    (bench / "conditions.json").write_text(json.dumps({"adapters": [weights]}))
    (run_dir / "training.log").write_text(f"2026-01-01 10:00:00 Note: x\nNote: {note}\nNote: {note}\n")
    assert data_of(bench).run["notes"][0] == note
    data = data_of(run_dir)
    assert data.run["notes"][:2] == [note, f"Test: {note}"]
    assert all("a@x" not in each for each in redacted(data).run["notes"])


def test_the_pages_reasons_for_drops_are_those_of_the_step_line() -> None:
    script = files("emailrl.page").joinpath("overview.js").read_text(encoding="utf-8")
    for name, (_, many, why) in DROPPED.items():
        assert f'{name}: "{many} {why}"' in script or name.replace("_", " ") == f"{many} {why}"
