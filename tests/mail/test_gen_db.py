"""The command itself: one line for every mistake, one JSON object for machines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mail.mails import found, make_tar, text

from emailrl.cli.app import main
from emailrl.mail import build
from emailrl.questions.load import read_jsonl
from emailrl.settings import load_settings


class Done(NamedTuple):
    """What the command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def value(self) -> dict[str, Any]:
        assert self.code == 0, self.stderr
        (line,) = self.stdout.splitlines()
        return json.loads(line)

    @property
    def last(self) -> str:
        return self.stderr.splitlines()[-1]


GenDb = Callable[..., Done]


@pytest.fixture
def gen_db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> GenDb:
    """The command, called in this process and in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["emailrl", "gen-db", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def maildir(tmp_path: Path) -> Path:
    root = tmp_path / "maildir"
    for number in range(1, 4):
        path = root / f"user-{number % 2}" / f"{number}."
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Message-ID: <{number}@x>\nDate: {number} May 2001 10:00:00 -0700\nFrom: a@x\nTo: b@x, c@x\n"
                        f"Subject: gas {number}\n\nbody {number}\n")  # fmt: skip
    (root / "README").write_text("Not a mail.")
    return root


def test_json_is_one_object_and_stdout_else_sums_up(maildir: Path, tmp_path: Path, gen_db: GenDb) -> None:
    value = gen_db("--source", maildir, "--db", "out/mail.db", "--json").value
    assert value == {
        "emails": 3, "recipients": 6, "attachments": 0, "added": 3, "removed": 0, "seconds": value["seconds"],
        "skipped": {"not_mail": 1}, "repaired": {},
        "db": str((tmp_path / "out" / "mail.db").resolve()),
    }  # fmt: skip
    assert 0 < value["seconds"] < 60
    assert found(Path(value["db"]), "c@x", "gas") == ["<3@x>", "<2@x>", "<1@x>"]

    done = gen_db("--source", maildir, "--db", "mail.db")
    assert done.code == 0 and "emails stored" not in done.stderr
    assert "3 emails stored" in done.stdout and "messages/s" in done.stdout
    assert "mail.db, 0 skipped; 1 other file without mail; " in done.stdout  # README is no message
    assert done.stdout.splitlines()[1].split() == ["no", "mail", "1", "not_mail"]


def test_limit_append_overwrite_and_the_filters_as_settings(maildir: Path, tmp_path: Path, gen_db: GenDb) -> None:
    source = ("--source", maildir, "--db", "mail.db", "--json")
    assert gen_db(*source, "--limit", 1).value["emails"] == 1
    refused = gen_db(*source)
    assert refused.code == 2 and "--append" in refused.stderr
    more = gen_db(*source, "--append", "--workers", 0)
    assert "gen-questions" in more.stderr and "has changed" in more.stderr
    assert (more.value["emails"], more.value["skipped"]) == (2, {"duplicate": 1, "not_mail": 1})
    settings = tmp_path / "emailrl.toml"
    settings.write_text("[store]\nmax_recipients = 1\n")
    none = gen_db(*source, "--overwrite")
    assert none.code == 2 and "3 many_recipients" in none.stderr
    assert len(found(tmp_path / "mail.db", "b@x", "gas")) == 3, "the old database is still there"
    (maildir / "large").write_text("From: a@x\nTo: b@x\n\n" + "x" * 2000)
    settings.write_text("[store]\nmax_message_bytes = 2000\n")
    value = gen_db(*source, "--overwrite").value
    assert (value["emails"], value["skipped"]) == (3, {"not_mail": 1, "too_large": 1})


def test_every_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, gen_db: GenDb) -> None:
    archive = make_tar({f"m/{number}.": text(number) for number in range(9)})
    (tmp_path / "mail.tar").write_bytes(archive)
    (tmp_path / "broken.tar").write_bytes(archive[:4000])
    (tmp_path / "text").write_text("no mail")
    before, source = sorted(tmp_path.rglob("*")), ["--source", "mail.tar"]
    for arguments, code, message in (
        (["--source", "missing"], 2, "No such file or folder"),
        (["--source", "broken.tar"], 1, "complete messages"),
        ([*source, "--db", "text/mail.db"], 2, "cannot be written"),
        ([*source, "--db", "/proc/none/mail.db"], 2, "cannot be written"),
        ([*source, "--limit", "0"], 2, "limit"),
        (["--source", " ", "--db", "mail.db"], 2, "empty"),  # and not the current folder
        ([*source, "--db", ""], 2, "empty"),
        ([], 1, "--source demo"),
        (["--source", "demo", "--sync"], 2, "--sync"),
    ):
        done = gen_db(*arguments)
        assert (done.code, done.stdout) == (code, ""), (arguments, done.stderr)
        assert done.stderr.startswith("error: ") and message in done.stderr, (arguments, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
        assert sorted(tmp_path.rglob("*")) == before, arguments


def test_an_interrupted_overwriting_says_that_the_database_is_as_before(
    maildir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gen_db: GenDb
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    assert gen_db("--source", maildir / "user-0", "--db", "mail.db").stdout.startswith("1 email stored in")
    before = (tmp_path / "mail.db").read_bytes()
    monkeypatch.setattr(build._Loader, "write", interrupted)
    done = gen_db("--source", maildir, "--db", "mail.db", "--overwrite")
    assert done.stderr.endswith("interrupted\n")
    assert (tmp_path / "mail.db").read_bytes() == before


def test_verbose_lists_messages_without_their_control_characters(maildir: Path, gen_db: GenDb) -> None:
    (maildir / "od\x1b[31md").write_text("no mail either")
    (maildir / "mended").write_text("Subject: [bold]alone\n\ntext")
    done = gen_db("--source", maildir, "--db", "mail.db", "--verbose", "--json")
    assert done.value["skipped"] == {"not_mail": 2}
    assert {"no mail: README", "no mail: od [31md", "repaired no_date: mended"} <= set(done.stderr.splitlines())
    assert "\x1b" not in done.stderr


# -- own mail ---------------------------------------------------------------------------------------------------------


def own_mbox(path: Path, domain: str = "x") -> Path:
    """Forty mails to me with a long newsletter among them, six of mine, and fifty on a list."""
    me = f"me@{domain}"
    mails = [("news@y", me, "n" * 6000)] * 10 + [("ann@y", me, "Hello.")] * 30 + [(me, "ann@y", "Please.")] * 6
    mails += [(f"friend{n % 7}@z", "crew@z", "Ahoy.") for n in range(50)]
    path.write_text("".join(
        f"From {sender} Tue May  1 10:00:00 2001\nMessage-ID: <{n}@m>\nDate: 1 May 2001 10:00:{n % 60:02} +0000\n"
        f"From: {sender}\nTo: {to}\nSubject: Matter {n}\n\n{body} {n}\n\n"
        for n, (sender, to, body) in enumerate(mails)
    ))  # fmt: skip
    return path


def test_it_ends_with_the_inboxes_and_the_next_command(tmp_path: Path, gen_db: GenDb) -> None:
    own_mbox(tmp_path / "my mail.mbox")
    done = gen_db("--source", "my mail.mbox", "--db", "my data/mine.db", "--json")
    assert done.value["emails"] + sum(done.value["skipped"].values()) == 96, "every message read is one or the other"
    own_mbox(tmp_path / "enron.mbox", "enron.com")  # it too is asked questions of its own first
    last = gen_db("--source", "enron.mbox", "--db", "m.db").last
    assert last.endswith("emailrl gen-questions --db m.db --inbox me@enron.com --allow-shared-inbox")
    *_, inboxes, asking, following = done.stderr.splitlines()
    assert inboxes == "Inboxes: me@x (46 emails)"
    assert asking.startswith("Next: ") and asking.endswith("emailrl ask --db 'my data/mine.db' --inbox me@x")
    assert following.endswith("emailrl gen-questions --db 'my data/mine.db' --inbox me@x --allow-shared-inbox")
    again = gen_db("--db", "my data/mine.db")
    assert again.stdout.splitlines()[1:] == [inboxes] and again.stderr.splitlines() == [asking, following]
    typed = following.removeprefix("Next: ")
    made = subprocess.run(typed, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    last = made.stderr.splitlines()[-1]
    options = "--db 'my data/mine.db'"
    assert last.endswith(f"emailrl benchmark --model smol --limit 40 {options}")  # nano knows the demo only
    assert gen_db("--db", "my data/mine.db").last == last
    (tmp_path / "emailrl.toml").write_text('model_name = "my-model"\n')
    assert gen_db("--db", "my data/mine.db").last.endswith(f"emailrl benchmark {options}")


def test_own_mail_is_named_after_its_file_and_found_without_a_flag(
    tmp_path: Path, maildir: Path, gen_db: GenDb
) -> None:
    source, own = ("--source", own_mbox(tmp_path / "my mail.mbox")), tmp_path / "data" / "my mail.db"
    done = gen_db(*source, "--json")
    assert done.value["db"] == str(own)
    assert "gen-questions --db 'data/my mail.db' " in done.stderr
    assert load_settings(cwd=tmp_path, environ={}).store.db == Path("data/my mail.db")
    (tmp_path / "new.eml").write_text("From: z@y\nTo: me@x\nMessage-ID: <new@m>\n\nnew\n")
    added = gen_db("--source", "new.eml", "--append", "--json").value  # to the only database
    assert (added["emails"], added["db"]) == (1, str(own))
    before = own.read_bytes()
    assert gen_db(*source).code == 2  # it exists
    assert gen_db("--source", "demo", "--limit", 40, "--overwrite").code == 0
    assert own.read_bytes() == before
    assert load_settings(cwd=tmp_path, environ={}).store.db == Path("data/enron_emails.db")
    assert gen_db(*source, "--append", "--json").value["db"] == str(own)
    enron = gen_db("--source", maildir, "--overwrite", "--json").value["db"]
    assert enron == str(tmp_path / "data" / "enron_emails.db"), "a tree named as Enron's"


def test_what_is_skipped_is_said_with_the_setting_that_keeps_it(tmp_path: Path, gen_db: GenDb) -> None:
    source = ("--source", own_mbox(tmp_path / "mail.mbox"), "--db", "m.db")
    (tmp_path / ".env").write_text("MAX_BODY_CHARS=5000\n")
    assert "10  long_body (MAX_BODY_CHARS=0 keeps them)" in gen_db(*source).stdout
    (tmp_path / ".env").unlink()
    assert "long_body" not in gen_db(*source, "--overwrite").stdout
    assert "96  duplicate_id" in gen_db(*source, "--append").stdout
    (tmp_path / ".env").write_text("EMAILRL_DEDUPE=true\n")
    assert "96  duplicate (EMAILRL_DEDUPE=false keeps them)" in gen_db(*source, "--append").stdout


def test_a_file_of_other_mail_does_not_pass_for_the_enron_emails(tmp_path: Path, gen_db: GenDb) -> None:
    assert gen_db("--source", "demo", "--limit", 40).code == 0  # in the default file
    done = gen_db()
    assert (done.code, done.stdout) == (2, "")
    assert "data/enron_emails.db exists and holds other email than the Enron emails of the Hub" in done.stderr
    assert gen_db("--db", "data/enron_emails.db").code == 0  # asked for by name: what it holds
    (tmp_path / "emailrl.toml").write_text('source = "demo"\n')
    assert "already holds" in gen_db().stdout
    gen_db("--source", own_mbox(tmp_path / "mail.mbox"), "--db", "data/enron_emails.db", "--overwrite")
    assert "holds other email than the demo mailbox (source = demo)" in gen_db().stderr


def test_the_demo_has_questions_which_another_source_s_mail_does_not_keep(tmp_path: Path, gen_db: GenDb) -> None:
    part = gen_db("--source", "demo", "--db", "demo.db", "--limit", 300)
    assert part.last.startswith("Next: ") and part.last.endswith("emailrl benchmark --model nano --db demo.db")
    assert {scenario.split for scenario in read_jsonl(tmp_path / "demo_questions.jsonl")} == {"train", "val", "test"}
    rebuilt = gen_db("--source", own_mbox(tmp_path / "mail.mbox"), "--db", "demo.db", "--overwrite")
    assert f"Note: {tmp_path / 'demo_questions.jsonl'} belongs to the replaced database." in rebuilt.stderr
