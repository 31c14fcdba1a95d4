"""Lines of trajectory files with wrong values in them: each is read or refused, and what is read can be shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from two_turns import tokenizer_folder, trajectory

from emailrl.base.errors import EmailRLError
from emailrl.cli.console import PlainConsole
from emailrl.cli.trajectory import render_trajectory, trajectory_list
from emailrl.page import dump, gather, page, place_of
from emailrl.page.served import Served
from emailrl.page.tokens import TokenTexts
from emailrl.records import (
    TrajectoryIndex,
    read_trajectories,
    training_notes,
    trajectory_to_dict,
    write_trajectories,
)
from emailrl.records.trajectory import Trajectory

__all__ = ["tokenizer_folder", "trajectory"]

NUMBERS = st.sampled_from([0, -1, True, 2**31, 2**64, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf")])
TEXTS = st.sampled_from(["", "7", "NaN", "\ud800", "\x1b[31m\u202e", "__class__", "a" * 10_000])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def mutate(node: Any, draw: st.DrawFn) -> Any:
    """The node with one value in it, however deep, replaced, removed or doubled."""
    if not isinstance(node, (dict, list)) or not node or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = draw(st.sampled_from(keys))
    changed = node.copy()
    match draw(st.integers(0, 9)):
        case 0:
            del changed[key]
        case 1 if isinstance(node, list):
            changed.insert(key, changed[key])
        case 1:
            changed[draw(st.text(max_size=4))] = changed[key]
        case _:
            changed[key] = mutate(changed[key], draw)
    return changed


@st.composite
def mutations(draw: st.DrawFn, record: dict[str, Any]) -> str:
    for _ in range(draw(st.integers(1, 3))):
        record = mutate(record, draw)
        if not isinstance(record, dict):
            break
    return json.dumps(record)


NOTE = {
    "id": "t-7", "group_id": "g-2", "advantage": None, "dropped": None,
    "samples": [{name: [0.5] * 8 for name in ("old_logprobs", "ratio", "advantages")} | {"loss_mask": [0, 1] * 4}],
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "training").mkdir()
    return folder


def show_everything(run_dir: Path, tokens: TokenTexts) -> None:
    """All that reads a run: the page as a file and as served, the list, the terminal."""
    file = run_dir / "trajectories" / "step-000003.jsonl"
    console = PlainConsole()
    served = Served(run_dir, model_name="nano")
    dump(served.run())
    for row in json.loads(dump(served.rows(0, 99))):
        dump(served.trajectory(file.name, row["offset"]))
    console.print(trajectory_list(TrajectoryIndex(file), 0, 99, 80))
    page(gather(place_of(run_dir), model_name="nano"))
    for each in read_trajectories(file):
        console.print(render_trajectory(each, verbose=True, tokens=tokens, note=training_notes(file)[0].get(each.id)))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_line_is_shown_or_refused_and_the_others_stay(
    data: st.DataObject, run_dir: Path, trajectory: Trajectory, tokenizer_folder: Path
) -> None:
    file = run_dir / "trajectories" / "step-000003.jsonl"
    line = data.draw(mutations(json.loads(json.dumps(trajectory_to_dict(trajectory)))))
    note = data.draw(st.just(json.dumps(NOTE)) | mutations(NOTE))
    write_trajectories(file, [trajectory])
    file.write_text(f"{line}\n{file.read_text()}")
    (run_dir / "training" / file.name).write_text(f"{note}\n")
    try:
        show_everything(run_dir, TokenTexts.load(tokenizer_folder))
    except EmailRLError as error:
        assert error.message.startswith(f"{file}, line 1: ")
    rows = Served(run_dir, model_name="nano")
    assert rows.run()["total"] in (1, 2) and rows.rows(0, 2)[-1]["id"] == trajectory.id
