"""The command itself: one line for every mistake, one JSON object for machines."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emailrl.cli.app import main
from emailrl.mail import open_mailbox
from emailrl.questions import read_jsonl
from emailrl.settings import load_settings


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "emailrl", "gen-db", *map(str, arguments)]


def gen_db(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, called in this process: what it prints and its exit code."""
    printed, told = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["emailrl", "gen-db", *map(str, arguments)])
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
            main()
    assert isinstance(ended.value.code, int)
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in (printed, told))
    return subprocess.CompletedProcess(sys.argv, ended.value.code, stdout, stderr)


def object_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


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


def test_json_is_one_object_and_nothing_is_lost(maildir: Path, tmp_path: Path) -> None:
    value = object_of(gen_db("--source", maildir, "--db", "out/mail.db", "--json", cwd=tmp_path))
    assert value == {
        "emails": 3, "recipients": 6, "skipped": {"not_mail": 1}, "seconds": value["seconds"],
        "db": str((tmp_path / "out" / "mail.db").resolve()),
    }  # fmt: skip
    assert 0 < value["seconds"] < 60
    hits = open_mailbox(value["db"], "c@x").search(["gas"])
    assert [hit.message_id for hit in hits] == ["<3@x>", "<2@x>", "<1@x>"]


def test_without_json_stdout_sums_up(maildir: Path, tmp_path: Path) -> None:
    done = gen_db("--source", maildir, "--db", "mail.db", cwd=tmp_path)
    assert done.returncode == 0 and "emails stored" not in done.stderr
    assert "3 emails stored" in done.stdout and "messages/s" in done.stdout
    assert "mail.db, 0 skipped; 1 other file without mail; " in done.stdout  # README is no message
    assert done.stdout.splitlines()[1].split() == ["no", "mail", "1", "not_mail"]


def test_limit_append_overwrite_and_the_filters_as_settings(maildir: Path, tmp_path: Path) -> None:
    source = ("--source", maildir, "--db", "mail.db", "--json")
    assert object_of(gen_db(*source, "--limit", 1, cwd=tmp_path))["emails"] == 1
    refused = gen_db(*source, cwd=tmp_path)
    assert refused.returncode == 2 and "--append" in refused.stderr
    more = gen_db(*source, "--append", "--workers", 0, cwd=tmp_path)
    assert "gen-questions" in more.stderr and "has changed" in more.stderr
    added = object_of(more)
    assert (added["emails"], added["skipped"]) == (2, {"duplicate": 1, "not_mail": 1})
    (tmp_path / "emailrl.toml").write_text("[store]\nmax_recipients = 1\n")
    none = gen_db(*source, "--overwrite", cwd=tmp_path)
    assert none.returncode == 2 and "3 many_recipients" in none.stderr
    assert len(open_mailbox(tmp_path / "mail.db", "b@x").search(["gas"])) == 3, "the old database is still there"


def test_a_table_of_many_rows(tmp_path: Path) -> None:
    with (tmp_path / "emails.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "message"])
        rows.writerows([f"{n}.", f"Message-ID: <{n}@x>\nFrom: a@x\nTo: b@x\n\n{n}"] for n in range(2600))
    assert object_of(gen_db("--source", "emails.csv", "--db", "mail.db", "--json", cwd=tmp_path))["emails"] == 2600


def mistakes(folder: Path) -> list[tuple[list[object], int, str]]:
    (folder / "text").write_text("no mail")
    content = (folder / "maildir.tar.gz").read_bytes()
    (folder / "broken.tar.gz").write_bytes(content[: len(content) // 2])
    source = ["--source", folder / "maildir.tar.gz"]
    return [
        (["--source", "missing"], 2, "No such file or folder"),
        (["--source", "broken.tar.gz"], 1, "complete messages"),
        ([*source, "--db", "text/mail.db"], 2, "cannot be written"),
        ([*source, "--db", "/proc/none/mail.db"], 2, "cannot be written"),
        ([*source, "--limit", "0"], 2, "limit"),
        ([], 1, "--source demo"),
    ]


def test_every_mistake_is_one_line_and_leaves_nothing(
    maildir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "maildir.tar.gz", "w:gz") as archive:
        archive.add(maildir, "maildir")
    cases = mistakes(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    for arguments, code, message in cases:
        monkeypatch.setattr(sys, "argv", ["emailrl", "gen-db", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        stdout, stderr = capsys.readouterr()
        assert (exit_.value.code, stdout) == (code, ""), (arguments, stderr)
        assert stderr.startswith("error: ") and message in stderr, (arguments, stderr)
        assert len(stderr.splitlines()) == 1, (arguments, stderr)
        assert sorted(tmp_path.rglob("*")) == before, arguments


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def end_process(process: subprocess.Popen[str]) -> None:
    process.terminate()


def end_all_processes(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # as systemd does


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the workers too


@pytest.mark.parametrize("end", [press_ctrl_c, end_process, end_all_processes])
def test_an_ended_build_exits_with_130_and_leaves_no_file_and_no_process(
    tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    with tarfile.open(tmp_path / "mail.tar", "w") as archive:
        for number in range(20_000):
            mail = f"From: a@x\nTo: b@x\nMessage-ID: <{number}@x>\n\nword {number}".encode()
            member = tarfile.TarInfo(f"m/{number}.")
            member.size = len(mail)
            archive.addfile(member, io.BytesIO(mail))
    process = subprocess.Popen(
        command("--source", tmp_path / "mail.tar", "--db", "mail.db", "--workers", 2), cwd=tmp_path,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (tmp_path / "mail.db.building").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    end(process)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert "Traceback" not in stderr
    assert stderr.endswith("interrupted\n") and only(tmp_path) == ["mail.tar"]


def test_an_interrupted_overwriting_says_that_the_database_is_as_before(
    maildir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from emailrl.mail import build

    def interrupted(*args: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    assert gen_db("--source", maildir / "user-0", "--db", "mail.db", cwd=tmp_path).stdout.startswith(
        "1 email stored in"
    )
    before = (tmp_path / "mail.db").read_bytes()
    monkeypatch.setattr(build._Loader, "write", interrupted)
    monkeypatch.setattr(sys, "argv", ["emailrl", "gen-db", "--source", str(maildir), "--db", "mail.db", "--overwrite"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("mail.db is unchanged.\ninterrupted\n")
    assert (tmp_path / "mail.db").read_bytes() == before


def test_verbose_lists_messages_without_their_control_characters(maildir: Path, tmp_path: Path) -> None:
    (maildir / "od\x1b[31md").write_text("no mail either")
    (maildir / "mended").write_text("Subject: [bold]alone\n\ntext")
    done = gen_db("--source", maildir, "--db", "mail.db", "--verbose", "--json", cwd=tmp_path)
    assert object_of(done)["skipped"] == {"not_mail": 2}
    lines = done.stderr.splitlines()
    for line in ("no mail: README", "no mail: od [31md", "repaired no_date: mended"):
        assert line in lines, done.stderr
    assert "\x1b" not in done.stderr


def test_max_message_bytes_is_a_setting(maildir: Path, tmp_path: Path) -> None:
    (maildir / "large").write_text("From: a@x\nTo: b@x\n\n" + "x" * 2000)
    (tmp_path / "emailrl.toml").write_text("[store]\nmax_message_bytes = 2000\n")
    value = object_of(gen_db("--source", maildir, "--db", "mail.db", "--json", cwd=tmp_path))
    assert (value["emails"], value["skipped"]) == (3, {"not_mail": 1, "too_large": 1})


def own_mbox(path: Path) -> Path:
    """Forty mails to me with a long newsletter among them, six of mine, and fifty on a list."""
    mails = [("news@y", "me@x", f"Issue {n}", "n" * 6000) for n in range(10)]
    mails += [("ann@y", "me@x", f"Matter {n}", "Hello.") for n in range(30)]
    mails += [("me@x", "ann@y", f"Wish {n}", "Please.") for n in range(6)]
    mails += [(f"friend{n % 7}@z", "crew@z", f"Post {n}", "Ahoy.") for n in range(50)]
    path.write_text("".join(
        f"From {sender} Tue May  1 10:00:00 2001\nMessage-ID: <{n}@m>\nDate: 1 May 2001 10:00:{n % 60:02} +0000\n"
        f"From: {sender}\nTo: {to}\nSubject: {subject}\n\n{body} {n}\n\n"
        for n, (sender, to, subject, body) in enumerate(mails)
    ))  # fmt: skip
    return path


def test_it_ends_with_the_inboxes_and_the_next_command(tmp_path: Path) -> None:
    own_mbox(tmp_path / "my mail.mbox")
    done = gen_db("--source", "my mail.mbox", "--db", "my data/mine.db", "--json", cwd=tmp_path)
    assert object_of(done).keys() == {"emails", "recipients", "skipped", "seconds", "db"}
    *_, inboxes, following = done.stderr.splitlines()
    assert inboxes == "Inboxes: me@x (46 emails)"
    assert following.startswith("Next: ")
    assert following.endswith("emailrl gen-questions --db 'my data/mine.db' --inbox me@x --allow-shared-inbox")
    again = gen_db("--db", "my data/mine.db", cwd=tmp_path)
    assert again.stdout.splitlines()[1:] == [inboxes] and again.stderr.splitlines() == [following]
    typed = following.removeprefix("Next: ")
    made = subprocess.run(typed, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    last = made.stderr.splitlines()[-1]
    options = "--db 'my data/mine.db'"
    assert last.endswith(f"emailrl benchmark --model smol --limit 40 {options}")  # nano knows the demo only
    assert gen_db("--db", "my data/mine.db", cwd=tmp_path).stderr.splitlines()[-1] == last
    (tmp_path / "emailrl.toml").write_text('model_name = "my-model"\n')
    last = gen_db("--db", "my data/mine.db", cwd=tmp_path).stderr.splitlines()[-1]
    assert last.endswith(f"emailrl benchmark {options}")


def test_enron_mail_is_asked_questions_of_its_own_first(tmp_path: Path) -> None:
    path = own_mbox(tmp_path / "mail.mbox")
    path.write_text(path.read_text().replace("@x", "@enron.com"))
    last = gen_db("--source", path, "--db", "m.db", cwd=tmp_path).stderr.splitlines()[-1]
    assert last.endswith("emailrl gen-questions --db m.db --inbox me@enron.com --allow-shared-inbox")


def test_own_mail_is_named_after_its_file_and_found_without_a_flag(tmp_path: Path) -> None:
    source = ("--source", own_mbox(tmp_path / "my mail.mbox"))
    done = gen_db(*source, "--json", cwd=tmp_path)
    assert object_of(done)["db"] == str(tmp_path / "data" / "my mail.db")
    assert "gen-questions --db 'data/my mail.db' " in done.stderr
    assert load_settings(cwd=tmp_path, environ={}).store.db == Path("data/my mail.db")
    own = (tmp_path / "data" / "my mail.db").read_bytes()
    assert gen_db(*source, cwd=tmp_path).returncode == 2  # it exists
    assert gen_db("--source", "demo", "--limit", 40, "--overwrite", cwd=tmp_path).returncode == 0
    assert (tmp_path / "data" / "my mail.db").read_bytes() == own
    assert load_settings(cwd=tmp_path, environ={}).store.db == Path("data/enron_emails.db")
    assert object_of(gen_db(*source, "--append", "--json", cwd=tmp_path))["db"] == str(tmp_path / "data" / "my mail.db")


def test_more_mail_is_appended_to_the_only_database(tmp_path: Path) -> None:
    gen_db("--source", own_mbox(tmp_path / "mail.mbox"), cwd=tmp_path)
    (tmp_path / "new.eml").write_text("From: z@y\nTo: me@x\nMessage-ID: <new@m>\n\nnew\n")
    added = object_of(gen_db("--source", "new.eml", "--append", "--json", cwd=tmp_path))
    assert (added["emails"], added["db"]) == (1, str(tmp_path / "data" / "mail.db"))


def test_enron_s_mail_tree_keeps_the_default_name(maildir: Path, tmp_path: Path) -> None:
    done = object_of(gen_db("--source", maildir, "--json", cwd=tmp_path))
    assert (done["emails"], done["db"]) == (3, str(tmp_path / "data" / "enron_emails.db"))


def test_what_is_skipped_is_said_with_the_setting_that_keeps_it(tmp_path: Path) -> None:
    source = ("--source", own_mbox(tmp_path / "mail.mbox"), "--db", "m.db")
    (tmp_path / ".env").write_text("MAX_BODY_CHARS=5000\n")
    done = gen_db(*source, cwd=tmp_path)
    assert "10  long_body (MAX_BODY_CHARS=0 keeps them)" in done.stdout
    (tmp_path / ".env").unlink()
    assert "long_body" not in gen_db(*source, "--overwrite", cwd=tmp_path).stdout
    again = gen_db(*source, "--append", cwd=tmp_path)
    assert "96  duplicate_id" in again.stdout
    (tmp_path / ".env").write_text("EMAILRL_DEDUPE=true\n")
    again = gen_db(*source, "--append", cwd=tmp_path)
    assert "96  duplicate (EMAILRL_DEDUPE=false keeps them)" in again.stdout


def test_the_demo_ends_with_a_benchmark_of_its_questions(tmp_path: Path) -> None:
    last = gen_db("--source", "demo", "--db", "demo.db", cwd=tmp_path).stderr.splitlines()[-1]
    assert last.startswith("Next: ")
    assert last.endswith("emailrl benchmark --model nano --db demo.db")


def test_a_file_of_other_mail_does_not_pass_for_the_enron_emails(tmp_path: Path) -> None:
    demo = ("--source", "demo", "--limit", 40)
    assert gen_db(*demo, cwd=tmp_path).returncode == 0  # in the default file
    done = gen_db(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "data/enron_emails.db exists and holds other email than the Enron emails of the Hub" in done.stderr
    assert gen_db("--db", "data/enron_emails.db", cwd=tmp_path).returncode == 0  # asked for by name: what it holds
    (tmp_path / "emailrl.toml").write_text('source = "demo"\n')
    assert "already holds" in gen_db(cwd=tmp_path).stdout
    named = ("--db", "data/enron_emails.db", "--overwrite")
    gen_db("--source", own_mbox(tmp_path / "mail.mbox"), *named, cwd=tmp_path)
    assert "holds other email than the demo mailbox (source = demo)" in gen_db(cwd=tmp_path).stderr


def test_a_part_of_the_demo_has_questions_of_every_split(tmp_path: Path) -> None:
    gen_db("--source", "demo", "--db", "demo.db", "--limit", 300, cwd=tmp_path)
    splits = {scenario.split for scenario in read_jsonl(tmp_path / "demo_questions.jsonl")}
    assert splits == {"train", "val", "test"}


def test_a_rebuilt_database_does_not_silently_keep_the_questions_of_the_old_one(tmp_path: Path) -> None:
    gen_db("--source", "demo", "--db", "m.db", cwd=tmp_path)
    source = ("--source", own_mbox(tmp_path / "mail.mbox"), "--db", "m.db")
    rebuilt = gen_db(*source, "--overwrite", cwd=tmp_path)
    assert f"Note: {tmp_path / 'm_questions.jsonl'} belongs to the replaced database." in rebuilt.stderr
