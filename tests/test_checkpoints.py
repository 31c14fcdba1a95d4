"""The registry: whole or not there, whatever moment the process dies; found by name; damaged ones refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tiny import make_metadata

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import (
    created_after,
    find_checkpoint,
    find_runs,
    incomplete_checkpoints,
    list_checkpoints,
    prunable,
    read_checkpoint,
    recover,
    remove_checkpoints,
    runs_without_best,
    verify,
    write_checkpoint,
)

HELLO_SHA256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def write(path: Path, text: str = "hello", **fields: Any) -> None:
    def fill(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_text(text)
        (directory / "adapter_config.json").write_text("{}")

    write_checkpoint(path, make_metadata(**fields), fill)


def text_of(path: Path) -> str:
    return (path / "adapter_model.safetensors").read_text()


def test_metadata_has_exactly_the_fields_of_the_contract_and_the_files_hashes(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5")
    record = json.loads((tmp_path / "checkpoint-5" / "metadata.json").read_text())
    assert set(record) == {
        "schema_version", "run_id", "kind", "step", "mode", "algorithm", "base_model", "lora", "metrics", "settings",
        "parent", "seed", "versions", "database_fingerprint", "questions_fingerprint", "files", "created_at",
        "resumed_from", "git_commit",
    }  # fmt: skip
    assert record["files"]["adapter_model.safetensors"] == HELLO_SHA256
    assert set(record["files"]) == {"adapter_model.safetensors", "adapter_config.json"}
    same = make_metadata(files=record["files"], created_at=record["created_at"])
    assert read_checkpoint(tmp_path / "checkpoint-5").metadata == same


def test_the_list_is_in_order_of_steps_and_leaves_out_what_is_not_whole(tmp_path: Path) -> None:
    write(tmp_path / "final", kind="final", step=10)
    write(tmp_path / "best_model", kind="best", step=9)
    for step in (10, 9, 12):
        write(tmp_path / f"checkpoint-{step}", step=step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12" / "adapter_config.json").unlink()
    (tmp_path / "trajectories").mkdir()
    names = [checkpoint.path.name for checkpoint in list_checkpoints(tmp_path)]
    assert names == ["best_model", "checkpoint-9", "checkpoint-10", "final"]
    broken = incomplete_checkpoints(tmp_path).items()
    assert {path.name: reason.partition("/checkpoint")[2] for path, reason in broken} == {
        "checkpoint-11": "-11 has no metadata.json.",
        "checkpoint-12": "-12 is missing adapter_config.json.",
    }


def test_the_last_numbered_ones_and_best_and_final_are_never_pruned(tmp_path: Path) -> None:
    for step in (2, 4, 10, 6):
        write(tmp_path / f"checkpoint-{step}", step=step)
    write(tmp_path / "best_model", kind="best", step=2)
    write(tmp_path / "final", kind="final", step=10)
    assert [path.name for path in prunable(tmp_path, keep=2)] == ["checkpoint-2", "checkpoint-4"]
    remove_checkpoints(prunable(tmp_path, keep=2))
    kept = ["best_model", "checkpoint-10", "checkpoint-6", "final"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == kept and prunable(tmp_path, keep=2) == []


def at(microsecond: int, year: int = 2026) -> str:
    return f"{year}-01-01T00:00:00.{microsecond:06}+00:00"


def test_best_and_latest_are_those_of_the_run_last_written_to(tmp_path: Path) -> None:
    output = tmp_path / "grpo"
    write(tmp_path / "grpo_masked" / "best_model", kind="best", step=4, created_at=at(1))
    write(tmp_path / "grpo_masked-2" / "best_model", kind="best", step=1, created_at=at(2))
    write(tmp_path / "grpo_masked-2" / "checkpoint-3", step=3, created_at=at(3))
    write(tmp_path / "grpo_rollout" / "final", kind="final", step=9, created_at=at(9))
    write(tmp_path / "grpo_masked_old" / "final", kind="final", step=9, created_at=at(9, 2027))
    (tmp_path / "grpo_masked-3").mkdir()
    assert [run.name for run in find_runs(output, "masked")] == ["grpo_masked", "grpo_masked-2"]
    assert find_checkpoint("best", output, "masked").path == tmp_path / "grpo_masked-2" / "best_model"
    assert find_checkpoint("latest", output, "masked").path == tmp_path / "grpo_masked-2" / "checkpoint-3"
    assert find_checkpoint("latest", output).path == tmp_path / "grpo_rollout" / "final"
    with pytest.raises(EmailRLError, match=r"No simple run has a checkpoint \(output folder: .*grpo\)"):
        find_checkpoint("latest", output, "simple")
    path = tmp_path / "grpo_masked" / "best_model"
    assert find_checkpoint(str(path), output).metadata.step == 4


def test_best_passes_over_newer_runs_without_one(tmp_path: Path) -> None:
    output = tmp_path / "grpo"
    for number, name in enumerate(("grpo_masked", "grpo_masked-2", "grpo_rollout")):
        write(tmp_path / name / "checkpoint-1", step=1, created_at=at(number))
    with pytest.raises(UsageError, match=r"No run has a best_model \(output folder: .*grpo\)\. Use latest"):
        find_checkpoint("best", output)
    assert len(runs_without_best(output)) == 3 and find_runs(output, which="best") == []
    write(tmp_path / "grpo_masked" / "best_model", kind="best", created_at=at(0))
    assert find_checkpoint("best", output).path == tmp_path / "grpo_masked" / "best_model"
    assert [run.name for run in runs_without_best(output)] == ["grpo_masked-2", "grpo_rollout"]
    assert [run.name for run in runs_without_best(output, "masked")] == ["grpo_masked-2"]
    assert find_checkpoint("latest", output).path == tmp_path / "grpo_rollout" / "checkpoint-1"


def test_the_order_of_runs_written_at_one_time_or_under_a_clock_set_back(tmp_path: Path) -> None:
    for number in ("", "-2", "-10", "-9"):
        write(tmp_path / f"grpo_masked{number}" / "checkpoint-1", created_at=at(1))
    names = [run.name for run in find_runs(tmp_path / "grpo", "masked")]
    assert names == ["grpo_masked", "grpo_masked-2", "grpo_masked-9", "grpo_masked-10"]
    assert abs(datetime.fromisoformat(created_after([])) - datetime.now(UTC)) < timedelta(minutes=1)
    write(tmp_path / "grpo_masked-3" / "checkpoint-1", created_at="2300-01-01T01:00:00.999999+01:00")
    then = created_after(find_runs(tmp_path / "grpo"))
    assert then == "2300-01-01T00:00:01.000000+00:00"
    write(tmp_path / "grpo_masked-2" / "checkpoint-1", created_at=then)
    assert [run.name for run in find_runs(tmp_path / "grpo", "masked")][-2:] == ["grpo_masked-3", "grpo_masked-2"]


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "run" / "checkpoint-5")
    with pytest.raises(UsageError, match=r"No checkpoint at .*nowhere"):
        find_checkpoint(tmp_path / "nowhere", tmp_path)
    with pytest.raises(UsageError, match=r"has no metadata\.json.* name one of its checkpoints: checkpoint-5"):
        find_checkpoint(tmp_path / "run", tmp_path)
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.raises(UsageError, match=r"has no metadata\.json\. The checkpoint is incomplete\. Use another"):
        find_checkpoint(tmp_path / "checkpoint-9", tmp_path)
    path = tmp_path / "run" / "checkpoint-5"
    record = json.loads((path / "metadata.json").read_text())
    texts = [(text, "") for text in (json.dumps(record)[:-9], "[]", "[" * 100_000, '{"seed": 1}')]
    texts.append((json.dumps({name: value for name, value in record.items() if name != "files"}), "files is missing"))
    for changes, complaint in (
        ({"step": "12"}, "step: Input should be a valid integer"),
        ({"run_id": "../x"}, "run_id: String should match"),
        ({"run_id": "\ud800"}, ""),
        ({"metrics": {"accuracy": "high"}}, "metrics.accuracy is not a number"),
        ({"settings": {"model": 3}}, "settings.model: Input should be an object"),
        ({"created_at": "soon"}, "soon"),
        ({"created_at": at(1, 9999)}, "created_at is 9999"),
        ({"created_at": "2026-01-01"}, "created_at is 2026-01-01"),
        ({"files": {"../../other/weights": "0"}}, "weights is outside the checkpoint"),
        ({"files": {"/etc/hostname": "0"}}, "/etc/hostname is outside the checkpoint"),
        ({"run_id": "x" * (16 << 20)}, "it is too large"),
    ):
        texts.append((json.dumps(record | changes), complaint))
    for text, complaint in texts:
        (path / "metadata.json").write_text(text)
        with pytest.raises(EmailRLError, match=f"cannot be read .*{complaint}.*Use another checkpoint") as caught:
            find_checkpoint(path, tmp_path)
        assert "\n" not in str(caught.value)
    (path / "metadata.json").write_text(json.dumps(record | {"schema_version": 99}))
    with pytest.raises(EmailRLError, match="schema version 99; this emailrl reads 1"):
        find_checkpoint(path, tmp_path)


def test_a_wrong_hash_is_refused_and_names_the_file(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-5")
    checkpoint = read_checkpoint(tmp_path / "checkpoint-5")
    assert verify(checkpoint) is checkpoint
    (checkpoint.path / "adapter_model.safetensors").write_text("hellp")
    with pytest.raises(EmailRLError, match=r"adapter_model\.safetensors is damaged .*2cf24dba5fb0") as caught:
        find_checkpoint(checkpoint.path, tmp_path)
    assert caught.value.exit_code == 1


class Crash(BaseException):
    """The process dies here."""


_countdown: list[int] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _countdown and event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}:
        _countdown[0] -= 1
        if _countdown[0] < 0:
            raise Crash(event)


sys.addaudithook(_audit)


@contextmanager
def dying_at(operation: int) -> Iterator[None]:
    """Every file operation from the given one on fails, as if the process were gone."""
    _countdown[:] = [operation]
    try:
        yield
    finally:
        _countdown.clear()


def test_replacing_a_checkpoint_is_safe_at_every_file_operation(tmp_path: Path) -> None:
    seen = []
    for operation in range(200):
        best = tmp_path / str(operation) / "best_model"
        write(best, "old", kind="best", step=1)
        try:
            with dying_at(operation):
                write(best, "new", kind="best", step=2)
        except Crash:
            pass
        else:
            break
        (standing,) = list_checkpoints(best.parent)
        with suppress(Crash), dying_at(operation % 12):
            recover(best.parent)  # which may itself be cut short
        assert text_of(verify(list_checkpoints(best.parent)[0]).path) == {1: "old", 2: "new"}[standing.metadata.step]
        recover(best.parent)
        assert [entry.name for entry in best.parent.iterdir()] == ["best_model"]
        assert verify(read_checkpoint(best)).metadata.step == standing.metadata.step
        seen.append(standing.metadata.step)
        write(best, "newer", kind="best", step=3)
        assert text_of(best) == "newer"
    else:
        pytest.fail("the write never ended")
    assert seen == sorted(seen) and set(seen) == {1, 2}  # first always the old one, from one moment on the new one


@pytest.mark.parametrize("steps", [(), (1, 2)], ids=["first", "pruning"])
def test_what_is_cut_short_leaves_nothing_that_looks_whole(steps: tuple[int, ...], tmp_path: Path) -> None:
    for operation in range(40):
        run = tmp_path / str(operation)
        run.mkdir()
        for step in steps:
            write(run / f"checkpoint-{step}", step=step)
        with suppress(Crash), dying_at(operation):
            if steps:
                remove_checkpoints(prunable(run, keep=1))
            else:
                write(run / "checkpoint-5")
        for checkpoint in list_checkpoints(run):
            verify(checkpoint)
        assert not steps or incomplete_checkpoints(run) == {}
        recover(run)
        left = {entry.name for entry in run.iterdir()}
        assert incomplete_checkpoints(run) == {} and left - {"checkpoint-1"} in (
            [{"checkpoint-2"}] if steps else [{"checkpoint-5"}, set()]
        )
