"""Reads Outlook's files: data files (.pst, .ost) by the program ``readpst``, messages (.msg) as the bytes of an email.

A message is a small file system (MS-OXMSG): each text is a stream that is named after property and type, and every
recipient and attached file has a folder.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from base64 import encodebytes
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.install import need
from emailrl.mail.sources.reading import Skipped
from emailrl.mail.sources.text import decode

DATA_START, MESSAGE_START = b"!BDN", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_READPST = 'ulimit -v 4194304; exec readpst -D -e -te -b -8 -j 0 -q -o "$@"'
"""With deleted items, one file for each email, in UTF-8, in one process of at most 4 GiB."""
_NOT_FOUND = 127  # the shell's exit code
_SECONDS, _BYTES_A_SECOND = 600, 1_000_000  # that readpst may take, and for how much of the file it gets one more
_UNKNOWN_SENDER = re.compile(rb"^(From: .*) <MAILER-DAEMON>$", re.MULTILINE)  # readpst's word for no address

_MAIL = ("IPM.NOTE", "IPM.SCHEDULE", "IPM.POST", "REPORT")  # not contacts, tasks, notes and appointments
_EPOCH = datetime(1601, 1, 1, tzinfo=UTC)
_FIELD = re.compile(r"^(?!content-|mime-version)([!-9;-~]+)[ \t]*:.*(?:\n[ \t].*)*", re.IGNORECASE | re.MULTILINE)
_EXCHANGE_NAME = re.compile(r"/cn=([\w.-]+)\Z", re.IGNORECASE)
_TABLE = "__properties_version1.0"
_CLASS, _HEADERS, _BODY, _HTML = 0x001A, 0x007D, 0x1000, 0x1013
_LINES = {"Subject": 0x0037, "Message-ID": 0x1035, "In-Reply-To": 0x1042, "References": 0x1039}
_SENT, _DELIVERED, _CODEPAGES = 0x00390040, 0x0E060040, (0x3FDE0003, 0x3FFD0003)
_SENDERS = ((0x0C1A, 0x5D01, 0x0C1F), (0x0042, 0x5D02, 0x0065))  # name, address, address of its own kind
_RECIPIENT, _RECIPIENT_KIND, _RECIPIENT_KINDS = (0x3001, 0x39FE, 0x3003), 0x0C150003, {1: "To", 2: "Cc", 3: "Bcc"}
_FILE_NAMES, _FILE_TYPE, _FILE, _CONTENT_ID = (0x3707, 0x3704, 0x3001), 0x370E, 0x3701, 0x3712
_BOUNDARY = "=_emailrl"  # Base64 has no underscore


def emails_of(
    file: Path, inside: str, allow_truncated: bool, scratch: Path | None
) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the emails of a data file as (name after ``inside``, bytes). readpst writes them to the folder ``scratch``
    (None: one of the system's for temporary files), which is removed at the end. ``UsageError`` if readpst is not
    installed; ``EmailRLError`` if it fails, or with ``allow_truncated`` a last ``Skipped("truncated")``."""
    folder, problem = scratch or Path(tempfile.mkdtemp(prefix="emailrl-")), ""
    folder.mkdir(exist_ok=True)
    seconds = _SECONDS + file.stat().st_size // _BYTES_A_SECOND
    command = ["/bin/sh", "-c", _READPST, "readpst", str(folder), str(file.absolute())]
    try:
        try:
            subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, check=True)
        except subprocess.CalledProcessError as error:
            if error.returncode == _NOT_FOUND:
                what = f"{file} is an Outlook data file (.pst or .ost), which is read with readpst."
                hint = "Install Debian's package pst-utils, or libpst from Homebrew or Fedora."
                raise UsageError(what, hint) from None
            problem = error.stdout.decode("utf-8", "replace").strip() or f"exit code {error.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"more than {seconds} seconds passed"
        if problem and not allow_truncated:
            hint = "Nothing was written. Repair it with Outlook's scanpst, or keep what can be read: --allow-truncated."
            raise EmailRLError(f"readpst cannot read {file}: {problem.splitlines()[-1][:200]}.", hint)
        for path in sorted(folder.rglob("*.eml")):
            yield f"{inside}{path.relative_to(folder)}", _UNKNOWN_SENDER.sub(rb"\1", path.read_bytes(), count=1)
        if problem:
            yield Skipped("truncated", inside.rstrip("/") or file.name)
    finally:
        shutil.rmtree(folder)


def email_of(content: bytes) -> bytes:
    """Return an Outlook message as the bytes of an email; a contact, a task or another file of Microsoft Office
    unchanged. ``UsageError`` if olefile is not installed; any other exception means that the file is damaged."""
    if _TABLE.encode("utf-16-le") not in content:
        return content
    need("olefile", "Reading Outlook messages (.msg)")
    from olefile import OleFileIO

    with OleFileIO(BytesIO(content)) as ole:
        message = _Properties(ole, "", 32)
        if not message.text(_CLASS).upper().startswith(_MAIL):
            return content
        folders = sorted({folder for folder, *more in ole.listdir() if more})
        inside = [(each, _Properties(ole, f"{each}/", 8, message.charset)) for each in folders]
        people = [each for name, each in inside if name.startswith("__recip")]
        html, text = message.bytes(_HTML) or message.text(_HTML).encode(), message.text(_BODY)
        is_html = bool(html) and not text.strip()
        kind = f"html; charset={message.charset}" if is_html else "plain; charset=utf-8"
        parts = [_part(f"Content-Type: text/{kind}", html if is_html else text.encode())]
        parts += [_attached(each) for name, each in inside if name.startswith("__attach")]
        head = "\n".join([*_fields(message, people), f"Content-Type: multipart/mixed; boundary={_BOUNDARY}\n"])
    return b"".join([head.encode("utf-8", "replace"), *parts, f"\n--{_BOUNDARY}--\n".encode()])


class _Properties:
    """The properties of a message, a recipient or an attached file, whose folder in the file is ``where``."""

    def __init__(self, ole: Any, where: str, head: int, charset: str = "") -> None:
        self._ole, self._where = ole, where
        table = self._read(_TABLE)[head:]
        self.numbers = dict(struct.iter_unpack("<I4xQ", table[: len(table) // 16 * 16]))
        pages = [self.numbers[each] & 0xFFFF for each in _CODEPAGES if each in self.numbers]
        self.charset = charset or ("utf-8" if 65001 in pages else f"cp{(pages or [1252])[0]}")

    def _read(self, name: str) -> bytes:
        path = self._where + name
        return self._ole.openstream(path).read() if self._ole.exists(path) else b""

    def bytes(self, number: int, kind: str = "0102") -> bytes:
        return self._read(f"__substg1.0_{number:04X}{kind}")

    def text(self, number: int) -> str:
        wide = self.bytes(number, "001F")
        text = wide.decode("utf-16-le", "replace") if wide else decode(self.bytes(number, "001E"), self.charset, [])
        return text.replace("\0", "").replace("\r\n", "\n")

    def line(self, *numbers: int) -> str:
        """Return the first text that is not blank, on one line and without quotes."""
        lines = (" ".join(re.sub(r'["\\]', "", self.text(number)).split()) for number in numbers)
        return next(filter(None, lines), "")

    def person(self, name: int, address: int, own_address: int) -> str:
        """Return a person as in a header; the address of one known to Exchange alone is its last name there."""
        own = self.line(address, own_address)
        known = own if "@" in own else "".join(_EXCHANGE_NAME.findall(own))
        return f'"{self.line(name)}" <{known}>' if known else ""


def _fields(message: _Properties, people: list[_Properties]) -> Iterator[str]:
    """The headers as they were sent, and those that can be made from properties."""
    head = message.text(_HEADERS).strip().partition("\n\n")[0]
    sent = {match[1].lower(): match[0] for match in reversed([*_FIELD.finditer(head)])}
    made = {name: " ".join(message.text(number).split()) for name, number in _LINES.items()}
    made["From"] = next(filter(None, (message.person(*each) for each in _SENDERS)), "")
    for kind, name in _RECIPIENT_KINDS.items():
        found = (each.person(*_RECIPIENT) for each in people if each.numbers.get(_RECIPIENT_KIND, 1) == kind)
        made[name] = ", ".join(filter(None, found))
    if ticks := message.numbers.get(_SENT) or message.numbers.get(_DELIVERED):
        made["Date"] = format_datetime(_EPOCH + timedelta(microseconds=ticks // 10))
    yield from sent.values()
    yield from (f"{name}: {value}" for name, value in made.items() if value and name.lower() not in sent)


def _attached(file: _Properties) -> bytes:
    head = f"Content-Type: {file.line(_FILE_TYPE) or 'application/octet-stream'}"
    if shown := file.line(_CONTENT_ID):
        head += f"\nContent-ID: <{shown}>"
    how = "inline" if shown else "attachment"
    return _part(f'{head}\nContent-Disposition: {how}; filename="{file.line(*_FILE_NAMES)}"', file.bytes(_FILE))


def _part(head: str, content: bytes) -> bytes:
    lines = f"\n--{_BOUNDARY}\n{head}\nContent-Transfer-Encoding: base64\n\n"
    return lines.encode("utf-8", "replace") + encodebytes(content)
