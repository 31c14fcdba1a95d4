"""Finds the content of opaquely signed mail (S/MIME, RFC 8551), which is inside a signature in DER or BER."""

from __future__ import annotations

_SIGNED_DATA = bytes.fromhex("06092a864886f70d010701")
"""Object identifier of plain content; in signed data the content follows, in encrypted data a cipher."""
_CONTENT, _OCTETS, _PIECES = 0xA0, 0x04, 0x24


def signed_content(cms: bytes) -> bytes | None:
    """Return the content of signed data in DER or BER; None if it is encrypted, detached or truncated."""
    at = cms.find(_SIGNED_DATA)
    try:
        tag, begin, _ = _tagged(cms, at + len(_SIGNED_DATA))
        if at < 0 or tag != _CONTENT:
            return None
        tag, begin, end = _tagged(cms, begin)
        if tag == _OCTETS:
            return cms[begin:end]
        pieces = []
        while tag == _PIECES and begin != end and cms[begin : begin + 2] != b"\0\0":
            kind, inside, begin = _tagged(cms, begin)
            if kind != _OCTETS:
                return None
            pieces.append(cms[inside:begin])
        return b"".join(pieces) or None
    except (IndexError, ValueError):
        return None


def _tagged(data: bytes, at: int) -> tuple[int, int, int]:
    """The tag at ``at``, and the start and end of its content (-1: ends at a marker)."""
    tag, length, begin = data[at], data[at + 1], at + 2
    if length == 0x80:
        if tag == _OCTETS:
            raise ValueError("pieces alone end at a mark")
        return tag, begin, -1
    if length > 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[at + 2 : begin], "big")
    if begin + length > len(data):
        raise ValueError("cut off")
    return tag, begin, begin + length
