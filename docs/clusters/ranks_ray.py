"""Ranks on the hosts of a Ray cluster, which sample and train in turn: python ranks_ray.py --hosts 2 --gpus 8 ...
Other options go to ``emailrl train``. If a process or a host dies, the ranks end, and the next attempt resumes."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=0, max_retries=0)
def endpoint() -> str:
    """This host's address and a port that is free there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"


@ray.remote(num_cpus=0, max_retries=0)
def train(folder: str, options: list[str]) -> None:
    """Run one host's ranks; with setpriv they end even if this worker is killed."""
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "emailrl", "train", *options]
    subprocess.run(command, cwd=folder, check=True)


def attempt(hosts: int, gpus: int, options: list[str]) -> bool:
    """Train until the ranks of every host have ended; returns whether all succeeded."""
    group = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * hosts, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    on = [PlacementGroupSchedulingStrategy(group, index) for index in range(hosts)]
    meeting = ray.get(endpoint.options(scheduling_strategy=on[0]).remote())
    common = [*options, "--resume=auto", f"--nproc={gpus or 1}", f"--nnodes={hosts}", f"--rdzv-endpoint={meeting}"]
    tasks = [
        train.options(scheduling_strategy=place, num_gpus=gpus).remote(os.getcwd(), [*common, f"--node-rank={index}"])
        for index, place in enumerate(on)
    ]
    ray.wait(tasks, num_returns=hosts)
    remove_placement_group(group)
    try:
        ray.get(tasks)
    except RayError as error:
        print(error, file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="per host, each for one rank; 0: one rank on its CPUs")
    own, others = parser.parse_known_args()
    ray.init(address="auto")
    sys.exit(not any(attempt(own.hosts, own.gpus, others) for _ in range(4)))
