"""Sources of mail as other programs leave them: exports, rows with odd dates, folders half read."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest
from mail.mails import make_tar, names, text

from emailrl.base.errors import UsageError
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, archive, open_source
from emailrl.mail.sources.rows import row_to_email


def test_a_large_mbox_in_an_archive_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_START_BYTES", 4096)
    envelope = b"From ann@x.org Mon May 14 10:00:00 2001\n"
    mbox = b"".join(envelope + text(number, 600) + b"\n\n" for number in range(20))
    members = {
        "1.": text(99),
        "Takeout/All mail.mbox": mbox,
        "2.": text(50, 6000),
        "3.": text(51, 9000),
        "4.": text(52),
    }
    path = tmp_path / "takeout.tgz"
    whole = make_tar(members)
    path.write_bytes(gzip.compress(whole))
    expected = ["<99@x>", *(f"<{n}@x>" for n in range(20)), "<50@x>", "too_large:3.", "<52@x>"]
    assert names(path, max_message_bytes=8000) == expected
    path.write_bytes(whole[: 1024 + 512 + 9000])
    kept = names(path, max_message_bytes=8000, allow_truncated=True)
    assert kept[:-1] == expected[: len(kept) - 1] and len(kept) > 12 and kept[-1] == "truncated:"


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_a_single_email_is_read(tmp_path: Path, ending: bytes) -> None:
    mail = tmp_path / "Your flat.eml"
    mail.write_bytes(text(7).replace(b"\n", ending))
    assert names(mail) == ["<7@x>"]
    mail.write_bytes(b"%d\n" % len(text(8)) + text(8) + b"<plist></plist>\n")  # .emlx
    assert names(mail) == ["<8@x>"]


@pytest.mark.parametrize("start", [b"A letter\nSubject: none\n", b"Note: not mail\n\nSubject: none\n"])
def test_a_text_with_a_header_further_down_is_no_email(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "letter.txt").write_bytes(start)
    with pytest.raises(UsageError, match=r"letter\.txt is not a mail archive\. Supported: an email \(\.eml\)"):
        open_source(tmp_path / "letter.txt")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"!BDN\x12\x34", r"an Outlook data file \(\.pst or \.ost\)\. Convert it \(readpst -o mail FILE"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"an Outlook message \(\.msg\) .* Convert messages \(msgconvert \*\.msg"),
    ],
)
def test_a_file_of_outlook_names_its_converter(tmp_path: Path, start: bytes, said: str) -> None:
    (tmp_path / "mail").mkdir()
    path = tmp_path / "mail" / "own"
    path.write_bytes(start + bytes(600))
    with pytest.raises(UsageError, match=f"own is {said}"):
        open_source(path)
    with pytest.raises(
        UsageError, match=r"1 not_mail.*docs/guides/data\.md lists the formats, and converters for Outlook's"
    ):
        build_database(open_source(tmp_path / "mail"), tmp_path / "mail.db")


def test_a_zip_archive_says_what_to_do(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "takeout.zip", "w") as archive_file:
        archive_file.writestr("mail.mbox", "From a b\n")
    with pytest.raises(UsageError, match=r"takeout\.zip is a zip archive\. Unpack it"):
        open_source(tmp_path / "takeout.zip")


@pytest.mark.parametrize(
    ("value", "expected", "defects"),
    [
        ("2001-05-14T16:39:00-07:00", "2001-05-14 23:39:00+00:00", ()),
        ("Mon, 14 May 2001 16:39:00 -0700 (PDT)", "2001-05-14 23:39:00+00:00", ()),
        (989883540000, "2001-05-14 23:39:00+00:00", ()), (989883540000.0, "2001-05-14 23:39:00+00:00", ()),
        (None, "None", ("no_date",)), ("", "None", ("no_date",)), (float("nan"), "None", ("no_date",)),
        ("soon", "None", ("bad_date",)), (1e300, "None", ("bad_date",)), (10**30, "None", ("bad_date",)),
        (float("inf"), "None", ("bad_date",)), ("0001-01-01T00:00:00+14:00", "None", ("bad_date",)),
    ],
)  # fmt: skip
def test_dates_of_rows(value: object, expected: str, defects: tuple[str, ...]) -> None:
    row = {"message_id": "<1>", "subject": "s", "from": "a@b", "to": [], "body": "b", "date": value}
    email = row_to_email(row)
    assert isinstance(email, RawEmail)
    assert (str(email.date), email.defects) == (expected, defects)


def test_the_share_of_a_folder_that_has_been_read(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"box-{number % 2}").mkdir(exist_ok=True)
        (tmp_path / f"box-{number % 2}" / f"{number}.").write_bytes(text(number))
    source = open_source(tmp_path)
    shares = [source.fraction()]
    for _ in source.items:
        shares.append(source.fraction())
    assert shares == [number / 8 for number in range(9)]
