"""Serve the page of a run to browsers on this machine, while the run writes or afterwards.

New steps and trajectories appear within seconds. The page is the one that report writes into a file, without its limit
on size; of a folder with several runs or benchmarks, it compares them. A run needs no step for it, only its folder.
Only this machine can open it, at the address printed here; from another machine, forward the port (ssh -L
8765:127.0.0.1:8765 HOST, with --port 8765). Ctrl-C ends it.

Examples:

\b
  emailrl view
  emailrl view outputs/grpo_masked --port 8765
  emailrl view outputs
  emailrl view outputs/rollouts/rollout-001.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from emailrl.cli.inputs import check_searchable
from emailrl.cli.output import say


def view(
    run: Annotated[
        Path | None,
        Argument(help="Folder of a run, benchmark or several runs, or trajectory file. Default: newest run."),
    ] = None,
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 0,
) -> None:
    from emailrl.page.place import newest_made
    from emailrl.page.server import PageServer, Served
    from emailrl.settings import load_settings

    settings = load_settings(looks_only=True)
    check_searchable(run)
    try:
        served = Served(run or newest_made(settings.output.output_dir), model_name=settings.model.name)
        with PageServer(served, port) as server:
            say(f"Serving {served.place.root} on this machine only; Ctrl-C ends it.")
            print(server.address, flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped.")
