"""Train on the hosts of a Ray cluster, one launcher each: ``python ray_train.py --num-hosts 2 --nproc 8``.
Other options go to ``emailrl train``. If a host or a process dies, all ends, and the next attempt resumes."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ATTEMPTS = 4


@ray.remote(max_retries=0)
def address() -> str:
    """This host's address, and a port that is free there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"


@ray.remote(max_retries=0)
def launch(options: list[str]) -> int:
    """Train as one of the hosts; the launcher ends with the Ray worker that started it."""
    return subprocess.call(["setpriv", "--pdeathsig", "TERM", "emailrl", "train", *options])


def attempt(hosts: int, nproc: int, options: list[str], bundle: dict[str, float]) -> bool:
    """Train on ``hosts`` hosts that have the resources ``bundle``; whether that succeeded."""
    group = placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())

        def on(index: int) -> dict[str, Any]:
            return {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}

        meeting = ["--rdzv-endpoint", ray.get(address.options(**on(0)).remote())] if hosts > 1 else []
        given = [*options, "--nproc", str(nproc), "--nnodes", str(hosts), "--resume", "auto", *meeting]
        left = [launch.options(**on(index)).remote(given) for index in range(hosts)]
        while left:
            (ended, *_), left = ray.wait(left)
            if code := ray.get(ended):
                raise RuntimeError(f"emailrl train ended with code {code}")
        return True
    except (RayError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return False
    finally:
        remove_placement_group(group)  # ends what still runs there


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--nproc", type=int, default=1, help="ranks per host, one per GPU")
    parser.add_argument("--cpu", action="store_true", help="hosts without GPUs")
    own, others = parser.parse_known_args()
    ray.init(address="auto")
    bundle = {"CPU": 1.0} | ({} if own.cpu else {"GPU": float(own.nproc)})
    sys.exit(not any(attempt(own.num_hosts, own.nproc, others, bundle) for _ in range(ATTEMPTS)))
