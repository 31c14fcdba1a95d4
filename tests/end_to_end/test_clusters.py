"""The documented script on a Slurm cluster of two nodes on this machine: one dies, the run resumes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from end_to_end.conftest import Options, settle
from ranks.processes import free_port

from emailrl.records import read_records

pytestmark = pytest.mark.clusters

SCRIPTS = Path(__file__).parents[2] / "docs" / "clusters"
SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=n1,n2 Default=YES
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))) or os.geteuid():
        pytest.skip("needs Slurm and munge (apt-get install slurm-wlm munge), and root")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    conf = SLURM.format(host=socket.gethostname(), folder=folder, ports=[free_port() for _ in range(3)])
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid", "log-file=munge.log", "seed-file=seed")
    munge = ["munged", "--force", "--foreground", *(f"--{each.replace('=', f'={folder}/')}" for each in files)]
    commands = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    daemons = [subprocess.Popen(each, stderr=subprocess.DEVNULL) for each in commands]
    yield ["sbatch", "--wait", "--nodes=2", "--gpus-per-node=0", str(SCRIPTS / "ranks.sbatch")]
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(30)


def test_a_run_one_of_whose_nodes_dies_resumes(
    slurm: list[str], options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    settle(tmp_path, options(tmp_path, max_steps=30, per_device_train_batch_size=1, save_steps=1))
    metrics = tmp_path / "grpo_masked" / "metrics.jsonl"
    with subprocess.Popen(slurm, cwd=tmp_path) as running:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        ranks = [each for each in psutil.process_iter(["environ"]) if second_of(each, tmp_path)]
        assert len(ranks) == 1
        for process in (psutil.Process(ranks[0].ppid()), ranks[0]):
            process.kill()
        assert running.wait(300) == 0
    assert [line["step"] for line in read_records(metrics)] == list(range(1, 31))
    assert "Resuming at step" in (metrics.parent / "training.log").read_text()


def second_of(process: psutil.Process, folder: Path) -> bool:
    """Whether it is the second rank of the run in ``folder``."""
    return (process.info["environ"] or {}).get("RANK") == "1" and process.cwd() == str(folder)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
