"""The documented files: the scripts on clusters of two nodes on this machine, one of which dies; the others as their
own tools read them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
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
READ_JOB_GROUP = """
import sys
from sky.utils.dag_utils import load_dag_from_yaml
print(*((task.name, task.num_nodes) for task in load_dag_from_yaml(sys.argv[1]).tasks))
"""
Cluster = tuple[list[str], Callable[[], None]]
"""What starts the script there, and what makes one of its two nodes fail."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
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

    def lose() -> None:
        ranks = [each for each in psutil.process_iter(["environ"]) if second_of(each, tmp_path)]
        assert len(ranks) == 1
        for process in (psutil.Process(ranks[0].ppid()), ranks[0]):
            process.kill()

    yield ["sbatch", "--wait", "--nodes=2", "--gpus-per-node=0", str(SCRIPTS / "ranks.sbatch")], lose
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(30)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    module = pytest.importorskip("ray.cluster_utils", reason="needs Ray (pip install ray)")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    nodes = module.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = nodes.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)

    def lose() -> None:
        daemon = psutil.Process(second.all_processes["raylet"][0].process.pid)
        ranks = daemon.children(recursive=True)
        assert any("RANK" in each.environ() for each in ranks)
        for process in (daemon, *ranks):
            process.kill()
        nodes.add_node(num_cpus=1)

    yield [sys.executable, str(SCRIPTS / "ranks_ray.py"), "--hosts=2"], lose
    nodes.shutdown()


@pytest.mark.parametrize("name", ["slurm", "ray"])
def test_a_run_one_of_whose_nodes_dies_resumes(
    name: str, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settle(tmp_path, options(tmp_path, max_steps=30, per_device_train_batch_size=1, save_steps=1))
    metrics = tmp_path / "grpo_masked" / "metrics.jsonl"
    command, lose = request.getfixturevalue(name)
    with subprocess.Popen(command, cwd=tmp_path) as running:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        lose()
        assert running.wait(600) == 0
    assert [line["step"] for line in read_records(metrics)] == list(range(1, 31))
    assert "Resuming at step" in (metrics.parent / "training.log").read_text()


def test_skypilot_reads_the_job_group(tmp_path: Path) -> None:
    """With the Python of SKY_PYTHON, as SkyPilot needs other versions than we do."""
    python = os.environ.get("SKY_PYTHON") or pytest.skip(
        "needs SKY_PYTHON, a Python with SkyPilot (pip install skypilot)"
    )
    alone = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [python, "-c", READ_JOB_GROUP, str(SCRIPTS / "ranks.sky.yaml")]
    read = subprocess.run(command, env=alone, stdout=subprocess.PIPE, text=True, check=True)
    assert read.stdout.splitlines()[-1] == "('server', 1) ('trainer', 2)"


def test_the_job_set_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (pip install jsonschema)")
    path = os.environ.get("JOBSET_CRD") or pytest.skip(
        "needs JOBSET_CRD, the path of JobSet's jobset.x-k8s.io_jobsets.yaml"
    )
    given = yaml.safe_load((SCRIPTS / "ranks.jobset.yaml").read_text())
    crd = yaml.safe_load(Path(path).read_text())
    (version,) = [each for each in crd["spec"]["versions"] if given["apiVersion"] == f"jobset.x-k8s.io/{each['name']}"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(given, schema)
    given["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(jsonschema.ValidationError, match="restartPolicies"):
        jsonschema.validate(given, schema)


def closed(schema: Any) -> Any:
    """The schema without what it does not name, which Kubernetes would drop in silence."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return ({"additionalProperties": False} if "properties" in schema else {}) | {
        k: closed(v) for k, v in schema.items()
    }


def second_of(process: psutil.Process, folder: Path) -> bool:
    """Whether it is the second rank of the run in ``folder``."""
    return (process.info["environ"] or {}).get("RANK") == "1" and process.cwd() == str(folder)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
