"""What must hold however often it is tried: kills of gen-db at random moments, an archive that unpacks to gigabytes."""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from mail.mails import stored_emails

from emailrl.mail import database_fingerprint

GEN_DB = (sys.executable, "-m", "emailrl", "gen-db", "--source", "demo", "--db", "mail.db")
PEAK = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "emailrl", "gen-db", *sys.argv[1:]], capture_output=True, text=True)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_twenty_sigkills_of_gen_db_leave_the_old_database_or_the_new(tmp_path: Path) -> None:
    subprocess.run([*GEN_DB, "--limit", "50"], cwd=tmp_path, check=True, capture_output=True)
    db, rng = tmp_path / "mail.db", random.Random(20)
    sizes = {len(list(stored_emails(db)))}
    began = time.monotonic()
    subprocess.run([*GEN_DB, "--overwrite", "--limit", "400"], cwd=tmp_path, check=True, capture_output=True)
    so_long = time.monotonic() - began
    sizes.add(len(list(stored_emails(db))))
    for _ in range(20):
        limit = rng.choice(["50", "400"])
        with subprocess.Popen(
            [*GEN_DB, "--overwrite", "--limit", limit], cwd=tmp_path, stderr=subprocess.PIPE
        ) as child:
            time.sleep(rng.uniform(0, so_long))
            child.send_signal(signal.SIGKILL)
        assert database_fingerprint(db) and len(list(stored_emails(db))) in sizes
    subprocess.run([*GEN_DB, "--overwrite", "--limit", "50"], cwd=tmp_path, check=True, capture_output=True)
    assert not [path.name for path in tmp_path.iterdir() if ".building" in path.name or ".staging" in path.name]


@pytest.mark.slow
def test_an_archive_that_unpacks_to_three_gigabytes_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    class Zeros(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(size)

    peaks = {}
    for name, size in (("small", 1000), ("bomb", 3 << 30)):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz", compresslevel=1) as archive:
            mail = b"Message-ID: <1@x>\nDate: 1 May 2001 10:00:00 -0700\nFrom: a@x\nTo: b@x\nSubject: gas\n\nbody\n"
            first = tarfile.TarInfo("maildir/ann-a/inbox/1.")
            first.size = len(mail)
            archive.addfile(first, io.BytesIO(mail))
            large = tarfile.TarInfo("maildir/ann-a/inbox/2.")
            large.size = size
            archive.addfile(large, Zeros())
        arguments = ["--source", tmp_path / f"{name}.tar.gz", "--db", tmp_path / f"{name}.db"]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, check=True
        )
        code, peaks[name] = map(int, done.stdout.split())
        assert code == 0 and [mail.message_id for mail in stored_emails(tmp_path / f"{name}.db")][:1] == ["<1@x>"]
    assert peaks["bomb"] < peaks["small"] + 64 * 1024, f"KiB: {peaks}"
