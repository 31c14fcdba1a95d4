"""``gen-questions --generator llm`` as a user runs it, killed and begun again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from questions.llm.chat_stub import ChatStub, good, mails_of, questions_on

from emailrl.cli.app import main
from emailrl.questions.load import missing_ids, read_jsonl

Serve = Callable[..., ChatStub]
Run = Callable[..., "tuple[int, dict[str, Any], str]"]


@pytest.fixture
def emailrl(mail_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``emailrl(url, *options)`` → exit code, the JSON it printed, what it told on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(url: str, *options: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["emailrl", *command(mail_db, url), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), json.loads(out) if out else {}, err

    return run


def command(db: Path, url: str) -> list[str]:
    return ["gen-questions", "--generator", "llm", "--db", str(db), "--out", "q.jsonl", "--generator-base-url", url,
            "--generator-model", "m", "--limit", "60", "--json"]  # fmt: skip


def test_a_whole_run_gives_a_question_file_like_any_other(
    emailrl: Run, serve: Serve, mail_db: Path, tmp_path: Path
) -> None:
    stub = serve(usage={"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110})
    code, told, err = emailrl(stub.url)
    assert code == 0, err
    assert (told["questions"], told["prompts"], told["kinds"], told["dropped"]) == (60, 6, {"llm": 60}, {})
    assert (told["tokens_in"], told["tokens_out"], told["cost"], told["cached"]) == (600, 60, 0.0, 0)
    assert told["out"] == str(tmp_path / "q.jsonl") and set(told["splits"]) == {"train", "val", "test"}
    scenarios = list(read_jsonl(tmp_path / "q.jsonl"))
    assert missing_ids(scenarios, mail_db)[2] == 60
    sources = {split: {m for s in scenarios if s.split == split for m in s.message_ids} for split in told["splits"]}
    assert not sources["train"] & sources["test"] and not sources["train"] & sources["val"]
    code, _, err = emailrl(stub.url)
    assert code == 2 and "--overwrite" in err
    code, told, err = emailrl(stub.url, "--overwrite")
    assert (code, told["cached"], told["tokens_in"], len(stub.requests)) == (0, 6, 0, 6)
    assert "cost $0.00" in err


def test_one_mailbox_is_all_test_or_split_by_subject_where_it_may_be_shared(
    emailrl: Run, serve: Serve, tmp_path: Path
) -> None:
    stub = serve()
    code, told, err = emailrl(stub.url, "--inbox", "ana.roe@x.org")
    assert (code, set(told["splits"])) == (0, {"test"})
    assert "Note: One mailbox: all questions are for testing" in err and "--allow-shared-inbox" in err
    code, told, err = emailrl(stub.url, "--inbox", "ana.roe@x.org", "--allow-shared-inbox", "--overwrite")
    assert (code, set(told["splits"])) == (0, {"train", "val", "test"}) and "Note: Split by subject: " in err
    scenarios = list(read_jsonl(tmp_path / "q.jsonl"))
    assert all(scenario.shares_inbox for scenario in scenarios)
    pairs = {(message_id, scenario.split) for scenario in scenarios for message_id in scenario.message_ids}
    assert len(pairs) == len({message_id for message_id, _ in pairs})


def test_a_dry_run_sends_and_writes_nothing(emailrl: Run, serve: Serve, tmp_path: Path) -> None:
    stub = serve()
    code, told, err = emailrl(stub.url, "--dry-run")
    assert code == 0
    assert (told["prompts"], told["cached"], told["tokens_out"], told["cost"]) == (6, 0, 6600, 0.0)
    assert "6 to send to m at http://127.0.0.1" in err
    assert stub.requests == [] and list(tmp_path.iterdir()) == []
    code, told, _ = emailrl("https://openrouter.ai/api/v1", "--dry-run")
    assert (code, told["cost"]) == (0, None)


def test_money_is_not_spent_unasked(
    emailrl: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    code, _, err = emailrl("http://203.0.113.9/v1")
    assert code == 2 and "Add --yes" in err
    stub = serve()
    monkeypatch.setenv("GENERATOR_INPUT_PRICE", "100")
    monkeypatch.setenv("GENERATOR_OUTPUT_PRICE", "100")
    code, _, err = emailrl(stub.url)
    assert code == 2 and "needs confirmation" in err
    code, _, err = emailrl(stub.url, "--max-cost", "0.5")
    assert code == 2 and "--max-cost" in err
    assert stub.requests == [] and not (tmp_path / "q.jsonl").exists()
    code, told, _ = emailrl(stub.url, "--yes", "--max-cost", "50")
    assert code == 0 and 0.5 < told["cost"] <= 50 and len(stub.requests) == 6


def test_hostile_replies_leave_only_what_the_mails_bear_out(emailrl: Run, serve: Serve, tmp_path: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
        mails = mails_of(body)
        items: list[Any] = questions_on(mails)[:4]
        first = items[0]
        items[1] = items[1] | {"message_ids": ["<nobody@nowhere>"]}
        items[2] = items[2] | {"answer": "K-9999"}
        items[3] = items[3] | {"question": "Ignore this\x1b]0;owned\x07?"}
        return 200, json.dumps([*items, first, {"__proto__": 1}, "rm -rf /", None, [items], 1e999])

    code, told, err = emailrl(serve(answer).url)
    assert code == 0, err
    assert told["dropped"] == {
        "malformed": 6 * 6, "confabulated_id": 6, "no_source": 6, "answer_not_found": 6, "repeated": 6,
    }  # fmt: skip
    assert told["questions"] == 6
    assert all(s.answer.startswith("K-7") and s.question.isprintable() for s in read_jsonl(tmp_path / "q.jsonl"))
    (tmp_path / "q.jsonl").unlink()
    for reply, said in (("[]", "it wrote none"), ('[{"question": 1}]', "malformed 6")):
        code, _, err = emailrl(serve(lambda body, n, reply=reply: (200, reply)).url, "--generator-model", said[:9])
        assert code == 1 and said in err and not (tmp_path / "q.jsonl").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_keeps_what_was_answered(
    emailrl: Run, serve: Serve, mail_db: Path, tmp_path: Path, how: signal.Signals
) -> None:
    stub = serve(lambda body, n: good(body, n) if n <= 3 else (0, ""))
    environment = os.environ | {"GENERATOR_CONCURRENCY": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "emailrl", *command(mail_db, stub.url)], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    stub.wait_for(4)
    process.send_signal(how)
    out, _ = process.communicate(timeout=300)
    assert (process.returncode, out) == (-9 if how == signal.SIGKILL else 130, b"")
    assert not list(tmp_path.glob("*q.jsonl*"))
    healthy = serve()
    code, told, _ = emailrl(healthy.url)
    assert (code, told["cached"], told["questions"], len(healthy.requests)) == (0, 3, 60, 3)
    answered = {mails_of(request)[0]["message_id"] for request in stub.requests[:3]}
    assert answered.isdisjoint(mails_of(request)[0]["message_id"] for request in healthy.requests)
