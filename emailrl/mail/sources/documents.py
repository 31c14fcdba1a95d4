"""Reads the text of PDF and Word files in a process of its own, with bounds on time, memory and size.

Both are hostile input to libraries that were not written for it: an endless page tree, an archive that unpacks to
gigabytes. What exceeds a bound ends the process at most, and the next file gets a new one.
"""

from __future__ import annotations

import io
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from xml.etree import ElementTree

from emailrl.mail.sources.text import MAX_CHARS

PDF_START, ZIP_START = b"%PDF-", b"PK\3\4"
WORD_MEMBER = "word/document.xml"
MAX_BYTES = 50 * 1024 * 1024  # of one file
CPU_SECONDS = 20  # spent at most on all files of an email
_LEAST_SECONDS, _BYTES_A_SECOND = 2, 32 * 1024  # small files that take long are made to
_MAX_MEMORY = 1024 * 1024 * 1024  # of the process
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_ENDS = {f"{_W}p": "\n", f"{_W}br": "\n", f"{_W}tab": "\t", f"{_W}tc": "\v", f"{_W}tr": "\f"}
"""What the end of an element adds to the text; that of a cell takes back the end of its last paragraph."""


class Documents:
    """The process that reads documents; it begins with the first, and ends with this one at the latest."""

    def __init__(self) -> None:
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._seconds = 0.0  # left to the files of an email

    def grant(self, size: int) -> None:
        """Give the files of the next email, of so many bytes, the processor time that they may take together."""
        self._seconds = min(CPU_SECONDS, _LEAST_SECONDS + size / _BYTES_A_SECOND)

    def text(self, content: bytes) -> str:
        """Return the text of a PDF or Word file, one character more than ``MAX_CHARS`` if it is longer; an empty string
        if it has none, is broken or exceeds a bound."""
        if len(content) > MAX_BYTES or self._seconds <= 0:
            return ""
        if self._child is None:
            ours, theirs = Pipe()
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            out, fds = subprocess.DEVNULL, [theirs.fileno()]
            process = subprocess.Popen(command, stdout=out, stderr=out, pass_fds=fds, start_new_session=True)
            self._child = process, ours
            theirs.close()
        try:
            self._child[1].send_bytes(f"{self._seconds}".encode())
            self._child[1].send_bytes(content)
            text = self._child[1].recv_bytes(8 * MAX_CHARS).decode()
            self._seconds = float(self._child[1].recv_bytes(32))
            return text
        except (EOFError, OSError):  # the process has ended
            self.close()
            self._seconds = 0
            return ""

    def close(self) -> None:
        """End the process."""
        if self._child:
            process, connection = self._child
            connection.close()
            process.kill()
            process.wait()
            self._child = None


def _pages(content: bytes) -> Iterator[str]:
    from pypdf import PdfReader

    for page in PdfReader(io.BytesIO(content)).pages:
        yield f"{page.extract_text().strip()}\n\n"


def _runs(content: bytes) -> Iterator[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(WORD_MEMBER) as member:
        for _, element in ElementTree.iterparse(member):
            yield element.text or "" if element.tag == f"{_W}t" else _ENDS.get(element.tag, "")
            if element.tag == f"{_W}p":
                element.clear()


def _text(content: bytes) -> str:
    pieces, size = [], 0
    for piece in _pages(content) if PDF_START in content[:1024] else _runs(content):
        pieces.append(piece)
        size += len(piece)
        if size > 2 * MAX_CHARS:  # of which cells leave half at least
            break
    return "".join(pieces).replace("\n\v\f", "\n").replace("\n\v", "\t").strip()[: MAX_CHARS + 1]


def _serve(connection: Connection) -> None:
    """Answer the seconds left and a file with its text, empty if there is none to be had, and the seconds still left,
    until the other end closes."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    with suppress(EOFError):
        while True:
            seconds, content = float(connection.recv_bytes()), connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            try:
                text = _text(content).encode("utf-8", "replace")
            except Exception:  # the libraries raise many kinds on hostile input; the file is counted as unread
                text = b""
            seconds, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(text)
            connection.send_bytes(f"{seconds}".encode())


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
