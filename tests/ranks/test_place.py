"""A process's rank, from the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from emailrl.base.errors import UsageError
from emailrl.ranks import Place


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place()),
        ({"LOCAL_RANK": "3"}, Place(local_rank=3)),
        ({"RANK": "0"}, Place()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Place(5, 8, 1, 4)),
    ],
)
def test_a_place_is_read(environ: dict[str, str], place: Place) -> None:
    assert Place.here(environ) == place


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"RANK": "abc"}, "RANK=abc, which is not a number"),
        ({"RANK": "-1"}, "RANK=-1, which is not a number"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x, which is not a number"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK=, which is not a number"),
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE=1 (not set)"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, but WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but no RANK"),
    ],
)
def test_what_torchrun_does_not_set_is_refused(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match="unset them") as refused:
        Place.here(environ)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "arguments", "reason"),
    [
        ({"RANK": "abc"}, [], "RANK=abc"),
        ({"RANK_TIMEOUT": "1e300"}, [], "RANK_TIMEOUT='1e300'"),
        ({"RANK_START_TIMEOUT": "1e300"}, [], "RANK_START_TIMEOUT='1e300'"),
        ({"LOCAL_RANK": "3", "RANK_TIMEOUT": "nan"}, ["--nproc", "2"], "RANK_TIMEOUT='nan'"),
        ({}, ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:99999"], "is not HOST:PORT"),
    ],
)
def test_the_command_reports_it_on_one_line(
    environ: dict[str, str], arguments: list[str], reason: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "emailrl", "train", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and reason in line
