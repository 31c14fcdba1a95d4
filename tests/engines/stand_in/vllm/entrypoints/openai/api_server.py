"""A stand-in for vLLM's server: answers /health, and leaves a stubborn child behind when it dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def flag(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if dying := flag("--die-when"):
            threading.Thread(target=die_when, args=(Path(dying),), daemon=True).start()

    def log_message(self, format: str, *args: object) -> None:
        pass


def die_when(marker: Path) -> None:
    """End once the file is there, taking it away."""
    try:
        marker.unlink()
    except FileNotFoundError:
        return
    print("CUDA error: an illegal memory access was encountered", flush=True)
    os._exit(3)


child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session="--leaves-group" in sys.argv)
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")}
print("started", json.dumps({"pid": os.getpid(), "child": child.pid, "flags": sys.argv[1:]} | seen), flush=True)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--broken" in sys.argv:
    print("ValueError: there is no such model", flush=True)
    sys.exit(1)
HTTPServer.address_family = socket.AF_INET6 if ":" in flag("--host") else socket.AF_INET
HTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()
