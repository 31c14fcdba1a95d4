"""What must hold however often it is tried: kills of gen-db at random moments, an archive that unpacks to gigabytes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from mail.mails import stored_emails


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
        source, db = tmp_path / f"{name}.tar.gz", tmp_path / f"{name}.db"
        process = subprocess.Popen([sys.executable, "-m", "emailrl", "gen-db", "--source", source, "--db", db])
        _, code, usage = os.wait4(process.pid, 0)
        peaks[name] = usage.ru_maxrss
        assert code == 0 and [mail.message_id for mail in stored_emails(db)][:1] == ["<1@x>"]
    assert peaks["bomb"] < peaks["small"] + 64 * 1024, f"KiB: {peaks}"
