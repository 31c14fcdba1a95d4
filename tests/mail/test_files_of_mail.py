"""Several files of mail in a folder, and the hub's dataset: each is read or counted."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from mail.mails import ENVELOPE, EXPECTED, lines, mail, make_tar, mbox, names, row, write_parquet

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail, Skipped, open_source


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A folder of everything, no name telling what it is."""
    root = tmp_path / "several"
    (root / "inner").mkdir(parents=True)
    (root / "a").write_bytes(mbox(mail(1), mail(2)))
    (root / "b").write_bytes(
        gzip.compress(make_tar({"one": mail(3), "two": mbox(mail(4), mail(5)), "three": b"no mail"}))
    )
    (root / "c").write_bytes(lines(row(6), row(7, to="wrong")))
    write_parquet(root / "d", row(8))
    (root / "e").write_bytes(b'file,message\nx/9.,"' + mail(9) + b'"\n')
    (root / "f").write_bytes(mail(10))
    (root / "g").write_text('{"a": 1}\n')
    (root / "inner" / "h").write_bytes(lzma.compress(mbox(mail(11))))
    return root


def test_a_folder_of_several(several: Path) -> None:
    assert names(several) == [
        "<1@x>", "<2@x>", "<3@x>", "<4@x>", "<5@x>", "not_mail:b/three", "<6@x>", "bad_row:a/7.", "<8@x>", "<9@x>",
        "<10@x>",
        "not_mail:g", "<11@x>",
    ]  # fmt: skip
    named = [email.file_name for email in open_source(several)]
    assert named[:5] == ["a#1", "a#2", "b/one", "b/two#1", "b/two#2"]
    assert named[9:11] == ["e/x/9.", "f"] and named[-1] == "inner/h#1"


@pytest.mark.parametrize("workers", [0, 2])
def test_everything_of_a_folder_is_stored_or_counted(several: Path, tmp_path: Path, workers: int) -> None:
    report = build_database(open_source(several), tmp_path / "mail.db", workers=workers)
    assert report.emails == 10
    assert report.skipped == {"not_mail": 2, "bad_row": 1}
    assert report.emails + sum(report.skipped.values()) == len(names(several))


def test_a_broken_file_among_several(several: Path, tmp_path: Path) -> None:
    (several / "b").write_bytes((several / "b").read_bytes()[:-15])
    (several / "d").write_bytes((several / "d").read_bytes()[:-15])
    with pytest.raises(EmailRLError, match=r"several/b is truncated"):
        build_database(open_source(several), tmp_path / "mail.db")
    assert not (tmp_path / "mail.db").exists()
    found = names(several, allow_truncated=True)
    assert [one for one in found if one.startswith("truncated")] == ["truncated:b", "truncated:d#1"]
    assert found[-1] == "<11@x>"


def test_a_mail_under_an_envelope_in_a_folder_is_one_mail(tmp_path: Path) -> None:
    (tmp_path / "1.").write_bytes(ENVELOPE + mail(1))
    (tmp_path / "2.").write_bytes(mail(2, "x" * 5000))
    assert names(tmp_path) == ["<1@x>", "<2@x>"]
    assert names(tmp_path, max_message_bytes=4000) == ["<1@x>", "too_large:2."]


def test_the_hub_s_dataset_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    write_parquet(tmp_path / "train-00000-of-00001.parquet", row(1), row(2, bcc=["c@x.org"]))
    hub = {"corbt/enron-emails": str(tmp_path)}
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: load(hub[name], **options))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first, second = open_source("hf")
    assert first == EXPECTED
    assert isinstance(second, RawEmail) and second.bcc == ["c@x.org"]


def test_a_folder_does_not_stand_for_the_hub_s_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corbt" / "enron-emails").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="A local folder corbt/enron-emails would be read instead of the hub's"):
        list(open_source("hf"))


def test_listing_names_every_message_skipped_or_repaired(several: Path, tmp_path: Path) -> None:
    (several / "f").write_bytes(b"Subject: alone\n\nx\n")
    (several / "i").write_bytes(mail(1))
    heard: list[tuple[str, str, str]] = []
    report = build_database(open_source(several), tmp_path / "mail.db", listing=lambda *line: heard.append(line))
    assert ("skipped", "duplicate_id", "i") in heard and ("repaired", "no_sender", "f") in heard
    for what, counts in (("skipped", report.skipped), ("repaired", report.defects)):
        assert {kind: sum(line[:2] == (what, kind) for line in heard) for kind in counts} == counts
        assert sum(line[0] == what for line in heard) == sum(counts.values())


def test_the_sizes_agree() -> None:
    from emailrl.mail.sources.reading import MAX_MESSAGE_BYTES
    from emailrl.settings import StoreSettings

    assert StoreSettings().max_message_bytes == MAX_MESSAGE_BYTES == 104_857_600


def test_skipped_has_a_name_that_can_be_stored(path: Path) -> None:
    path.write_bytes(lines(row(1, file_name="a\0b\ud800", to=3), row(2)))
    skipped, _ = open_source(path)
    assert skipped == Skipped("bad_row", "ab?")
