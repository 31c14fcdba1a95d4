"""JSONL, Parquet, datasets and Kaggle's table: every row is a mail, or counted."""

from __future__ import annotations

import csv
import gzip
import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mail.mails import EXPECTED, emails, lines, names, row, text, write_parquet

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.sources import RawEmail, Skipped, open_source
from emailrl.mail.sources.rows import row_to_email


def test_jsonl(path: Path) -> None:
    bare = {key: value for key, value in row(2).items() if key not in ("cc", "bcc", "file_name")}
    content = b"\xef\xbb\xbf" + lines(row(1)) + b"\r\n" + lines(bare, row(3, date=989883540000))
    for compress in (bytes, gzip.compress):
        path.write_bytes(compress(content))
        first, second, third = emails(path)
        assert first == EXPECTED and third.date == EXPECTED.date
        assert (second.cc, second.file_name) == ([], "mail.bin#3")


def test_an_export_of_msgvault(path: Path) -> None:
    """Records in the order and with the keys of its schema, version 1."""
    source = {"source_type": "gmail", "source_identifier": "me@x.org"}

    def message(number: int, address: str, kind: str = "email") -> dict[str, object]:
        return {
            "record_type": "message", **source, "id": f"m{number}", "conversation_id": "t1", "message_type": kind,
            "subject": "Rent", "text": "900 euros", "author": {"display_name": "Ann Lee", "address": address},
            "occurred_at": "2026-07-24T18:20:31Z", "deleted_from_source": False,
        }  # fmt: skip

    head = [{"record_type": "manifest", "schema": "msgvault-message-export/1"}, {"record_type": "source", **source}]
    rows = [*head, message(1, "ann@x.org"), message(2, "Me@x.org"), message(3, "", "discord")]
    content = b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in rows)
    path.write_bytes(content + b'{"record_type":"complete","counts":{"messages":3}}\n')
    received, sent, chat = open_source(path)
    assert isinstance(received, RawEmail) and isinstance(sent, RawEmail)
    assert (received.from_address, received.to, sent.to) == ("ann@x.org", ["me@x.org"], [])
    assert received.names == {"ann@x.org": "Ann Lee"} and received.date == datetime(2026, 7, 24, 18, 20, 31, tzinfo=UTC)
    assert received.references == sent.references == ["<t1@me@x.org.msgvault>"] and not received.is_research
    assert isinstance(chat, Skipped) and chat.reason == "not_mail"
    path.write_bytes(content)
    with pytest.raises(EmailRLError, match="lacks its last record"):
        list(open_source(path))


def test_hostile_lines_are_counted(path: Path) -> None:
    odd = [
        b"[" * 100_000, b'{"message_id": 1}', b"[]", b'"text"', b"{broken", b"9" * 5000,
        *(lines(row(1, **wrong)).strip() for wrong in ({"date": True}, {"to": "a@b"}, {"body": {}}, {"file_name": 3})),
    ]  # fmt: skip
    path.write_bytes(lines(row(1)) + b"\n".join(odd) + b"\n" + lines(row(2, file_name="a\0b\ud800", to=3), row(3)))
    found = names(path)
    assert (found[0], found[1], found[-2:]) == ("<1@x>", "bad_row:mail.bin#2", ["bad_row:ab?", "<3@x>"])
    assert [skipped.partition(":")[0] for skipped in found[1:-2]] == ["bad_row"] * len(odd)


def test_what_jsonl_mends(path: Path) -> None:
    nul, surrogate = row(1, body="a\0b"), row(2, body="\ud800c")
    latin = json.dumps(row(3, body="café"), ensure_ascii=False).encode("latin-1")
    missing = row(4, message_id="", date=None, **{"from": None})
    path.write_bytes(lines(nul, surrogate) + latin + b"\n" + lines(missing))
    one, two, three, four = emails(path)
    assert (one.body, one.defects) == ("ab", ("nul_bytes",))
    assert two.body == "?c"
    assert (three.body, three.defects) == ("café", ("bad_charset",))
    assert four.defects == ("no_date", "no_message_id", "no_sender")
    assert four.message_id.endswith("@made-up.emailrl>")
    assert four.message_id == emails(path)[3].message_id


def test_large_and_torn_lines(path: Path) -> None:
    path.write_bytes(lines(row(1, body="b" * 2_000_000), row(2)))  # a first line longer than any block
    assert names(path) == names(path, max_message_bytes=8_400_000) == ["<1@x>", "<2@x>"]
    path.write_bytes(lines(row(1), row(2, body="b" * 3_000_000), row(3)))
    assert names(path, max_message_bytes=4000) == ["<1@x>", "too_large:mail.bin#2", "<3@x>"]
    whole = lines(row(1), row(2))
    path.write_bytes(whole[:-1])
    assert names(path) == ["<1@x>", "<2@x>"], "the last line end is no part of a row"
    noise = "".join(random.Random(0).choices("abcdefghijklmnop", k=20_000))
    torn = {1: whole[:-10], 2: gzip.compress(lines(row(1), row(2), row(3, body=noise)))[:-2000]}
    for complete, content in torn.items():
        path.write_bytes(content)
        with pytest.raises(EmailRLError, match=f"after {complete} complete rows"):
            names(path)
        expected = [*(f"<{n}@x>" for n in range(1, complete + 1)), f"truncated:mail.bin#{complete + 1}"]
        assert names(path, allow_truncated=True) == expected


def test_a_row_has_a_quarter_of_the_bytes_that_a_message_may_have(path: Path) -> None:
    most = 50 * 1024 * 1024 // 4
    left = most - len(lines(row(1, body="")))
    path.write_bytes(lines(row(1, body="a" * left), row(2, body="a" * (left + 1))))
    assert names(path) == ["<1@x>", "too_large:mail.bin#2"]
    write_csv(path, [["a/1.", text(1).decode()], ["a/2.", text(2).decode() + "b" * most]])
    assert names(path) == ["<1@x>", "too_large:row 2"]
    path.write_bytes(text(1) + b"b" * most)
    assert names(path) == ["<1@x>"]


def test_parquet(path: Path) -> None:
    moment = datetime(2001, 5, 14, 23, 39)
    rows = [row(number, date=moment, bcc=["Cy@x.org"]) for number in range(1, 1202)]
    write_parquet(path, *rows, row(1202, date=None, bcc=[]), row_group_size=700)
    found = emails(path)
    assert found[0].bcc == ["cy@x.org"]
    assert (found[0].date, found[0].body, found[0].file_name) == (EXPECTED.date, "b1", "a/1.")
    assert [email.message_id for email in found] == [f"<{number}@x>" for number in range(1, 1203)]
    assert found[-1].defects == ("no_date",)


def test_parquet_torn_large_and_foreign(path: Path) -> None:
    write_parquet(path, row(1), row(2, body="b" * 5000, file_name=None))
    assert names(path, max_message_bytes=4000) == ["<1@x>", "too_large:mail.bin#2"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EmailRLError, match="is truncated or damaged after 0 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["truncated:mail.bin#1"]
    write_parquet(path, {"message_id": "1", "body": "b"})
    with pytest.raises(UsageError, match="not a mail archive"):
        open_source(path)


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
    email = row_to_email(row(1, date=value))
    assert isinstance(email, RawEmail) and (str(email.date), email.defects) == (expected, defects)
    for wrong in ({"to": "a@b"}, {"date": {}}, {"body": 3}, {"cc": [1]}):
        assert row_to_email(row(1) | wrong) == Skipped("bad_row", "a/1.")


# -- datasets ---------------------------------------------------------------------------------------------------------


def test_a_dataset_in_a_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    nothing = dict.fromkeys(("subject", "from", "cc", "date", "body"))
    rows = [row(1, date=datetime(2001, 5, 14, 23, 39), bcc=[]), row(2, to=[], bcc=[]) | nothing]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "files" / "data" / "train-00000-of-00001.parquet"))
    for folder in ("saved", "files"):
        first, second = emails(tmp_path / folder)
        assert first == EXPECTED
        assert (second.body, second.cc, second.defects) == ("", [], ("no_date", "no_sender"))
    datasets.Dataset.from_dict({"message_id": ["1"]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(UsageError, match="no column 'subject'"):
        names(tmp_path / "other")


def test_the_hub_s_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    said = r"corbt/enron-emails could not be loaded: the hub cannot be reached\. .*--source demo.*--source PATH"
    with pytest.raises(EmailRLError, match=said):
        list(open_source("hf"))
    write_parquet(tmp_path / "train-00000-of-00001.parquet", row(1), row(2, bcc=["c@x.org"]))
    hub, load = {"corbt/enron-emails": str(tmp_path)}, datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: load(hub[name], **options))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first, second = open_source("hf")
    assert first == EXPECTED
    assert isinstance(second, RawEmail) and second.bcc == ["c@x.org"]
    (tmp_path / "corbt" / "enron-emails").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="A local folder corbt/enron-emails would be read instead of the hub's"):
        list(open_source("hf"))


# -- Kaggle's table ---------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[list[str]], header: tuple[str, ...] = ("file", "message")) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def test_kaggle_csv(path: Path) -> None:
    write_csv(path, [["a/1.", text(1).decode() + '\n"quoted", and\nlines é'], ["a/2.", "no mail"], ["one column"]])
    first, *rest = open_source(path)
    assert isinstance(first, RawEmail)
    assert (first.message_id, first.file_name) == ("<1@x>", "a/1.")
    assert first.body.endswith('"quoted", and\nlines é')
    assert rest == [Skipped("not_mail", "a/2."), Skipped("bad_row", "row 3")]


def test_a_row_that_is_too_large_is_counted_and_read_over(path: Path) -> None:
    large = '"\n' * 3_000_000 + text(2).decode()
    write_csv(path, [["a/1.", text(1).decode()], ["a/2.", large], ["a/3.", text(3).decode()]])
    assert names(path, max_message_bytes=8_000_000) == ["<1@x>", "too_large:row 2", "<3@x>"]
    path.write_bytes(path.read_bytes()[:-1_000])
    with pytest.raises(EmailRLError, match="truncated or damaged"):
        names(path, max_message_bytes=8_000_000)


def test_csv_with_other_column_order_mark_and_gzip_and_one_that_breaks_off(path: Path) -> None:
    write_csv(path, [["x", text(1).decode(), "a/1."], ["x", text(2).decode(), "a/2."]], ("extra", "message", "file"))
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + whole))
    assert names(path) == ["<1@x>", "<2@x>"]
    path.write_bytes(whole[:-12])
    with pytest.raises(EmailRLError, match="after 1 complete rows"):
        names(path)
    assert names(path, allow_truncated=True) == ["<1@x>", "truncated:"]


def test_parquet_made_to_fill_the_memory_is_refused_and_a_large_row_counted(path: Path) -> None:
    write_parquet(
        path, *(row(number, body="b" * 40_000_000) for number in range(1, 4)), compression="zstd", use_dictionary=False
    )
    with pytest.raises(EmailRLError, match="unpack"):
        list(open_source(path))
    write_parquet(path, row(1), row(2, body="b" * 20_000_000))
    assert [type(each) for each in open_source(path)] == [RawEmail, Skipped]
