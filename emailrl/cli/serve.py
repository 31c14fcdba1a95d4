"""Serve a model for training: start vLLM servers, one per replica, and keep them running until Ctrl-C.

Each replica gets its own GPUs (or shares the CPU), port and log, and accepts adapters at run time, as many as
MAX_STALENESS needs. It then prints the command that trains with them. A server that dies is restarted,
at most --max-restarts times. No server outlives this command, even if it is killed. Flags after -- go to vLLM.

Examples:

\b
  emailrl serve --model Qwen/Qwen3-14B
  emailrl serve --replicas 2 --tensor-parallel 2 --gpus 4,5,6,7
  emailrl serve --model nano --port 9000 -- --max-num-batched-tokens 4096
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from emailrl.base.disk import check_own
from emailrl.base.plain import counted
from emailrl.cli.options import Host, Json, Overrides, Trust, path_option, setting_options
from emailrl.cli.output import print_json, say
from emailrl.settings import load_settings

EVERYWHERE = ("0.0.0.0", "::")  # all of the machine's addresses; other machines reach it by host name


@setting_options(
    "model_name dtype max_model_len lora_rank max_staleness vllm_tensor_parallel_size vllm_gpu_memory_utilization",
    "vllm_enforce_eager",
)
def serve(
    *,
    overrides: Overrides,
    replicas: Annotated[int, Option(min=1, help="Number of servers.")] = 1,
    gpus: Annotated[
        str | None, Option(metavar="<ids>", help="Comma-separated GPUs. Default: CUDA_VISIBLE_DEVICES, else all.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port of the first server; the others follow.")] = 8000,
    log_dir: Annotated[
        Path | None, path_option("--log-dir", help="Folder for the logs. Default: servers/ next to OUTPUT_DIR.")
    ] = None,
    start_timeout: Annotated[float, Option(min=1, help="Seconds until a server must be ready.")] = 900,
    max_restarts: Annotated[int, Option(min=0, help="Restarts per server.")] = 3,
    vllm_flags: Annotated[list[str] | None, Argument(metavar="-- <vllm flags>", help="Flags for vLLM.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.base.http import is_this_machine
    from emailrl.engines.vllm import serve as vllm

    settings = load_settings(overrides, trust=trust)
    folder = log_dir or settings.output.output_dir.parent / "servers"
    address = f"[{host}]" if ":" in host else host
    name, servers = socket.gethostname() if host in EVERYWHERE else address, []
    shares = vllm.deal_gpus(vllm.find_gpus(gpus), replicas, settings.vllm.vllm_tensor_parallel_size)
    for number, share in enumerate(shares, start=port):
        check_own(log := folder / f"vllm-{number}.log", "--log-dir")
        vllm.check_port(host, number)
        command = vllm.server_command(settings, host=host, port=number, on_gpu=bool(share), extra=vllm_flags or ())
        environment = vllm.server_environment(settings.vllm, share)
        servers.append(vllm.Server(f"http://{name}:{number}", command, environment, log))
    folder.mkdir(parents=True, exist_ok=True)
    if not is_this_machine(host) and settings.vllm.vllm_api_key is None:
        say(f"Note: anyone who can reach {host} can load adapters into these servers; set VLLM_API_KEY.")
    say(f"Starting {counted(replicas, 'vLLM server')} of {settings.model.name}; logs in {folder} ...")

    def ready(seconds: float) -> None:
        urls = ",".join(server.url for server in servers)
        if json:
            print_json({"vllm_urls": urls, "logs": [server.log for server in servers], "seconds": seconds})
        else:
            say("All servers are ready; Ctrl-C ends them. Train with:")
            print(f"VLLM_URLS={urls} emailrl train --engine vllm --model {settings.model.name}", flush=True)

    vllm.supervise(servers, restarts=max_restarts, timeout=start_timeout, say=say, ready=ready)
