"""Mails, archives and what is read of them, for the tests of sources."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from emailrl.mail.sources import RawEmail, open_source


def text(number: int, size: int = 10) -> bytes:
    return f"Message-ID: <{number}@x>\nFrom: ann@x.org\nTo: bob@x.org\nSubject: s{number}\n\n{'b' * size}".encode()


def names(source: Path, **options: Any) -> list[str]:
    """The ids of the mails, ``reason:name`` for what is skipped, in order."""
    return [
        email.message_id if isinstance(email, RawEmail) else f"{email.reason}:{email.file_name}"
        for email in open_source(source, **options)
    ]


def make_tar(members: dict[str, bytes], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
