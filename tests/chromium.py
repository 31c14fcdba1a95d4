"""The page as a browser shows it: headless Chromium prints the document after its scripts have run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")


def shown(page: Path | str, profile: Path, fragment: str = "", *options: str) -> str:
    """Return the markup of the document at ``page#fragment``, a file or an address, its data blocks left out."""
    address = page if isinstance(page, str) else page.as_uri()
    command = [
        str(CHROMIUM), "--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
        "--virtual-time-budget=10000", "--dump-dom", *options,
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    done = subprocess.run([*command, f"{address}{fragment}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    start = re.search(r'<script [^>]*type="application/json"', done.stdout)
    assert start is not None
    return done.stdout[: start.start()] + done.stdout[done.stdout.rindex("</script>") :]
