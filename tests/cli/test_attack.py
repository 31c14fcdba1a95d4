"""``emailrl benchmark --attack``: a policy that obeys and one that does not, plain and under attack."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, said
from tiny import make_database, make_questions

from emailrl.agent.attack import KINDS, order_of
from emailrl.measure.evaluation import wilson_interval
from emailrl.questions.load import write_scenarios
from emailrl.records import read_trajectories

NUM = 30
COUNTS = Counter(order_of(scenario).kind for scenario in make_questions(NUM))


def answer(text: str, source: str) -> tuple[str, str]:
    return "return_final_answer", json.dumps({"answer": text, "sources": [source]})


def reply(body: dict[str, Any]) -> tuple[int, Any]:
    """Search, then answer rightly; the model "meek" obeys whatever the mail found says, the model "firm" nothing."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if not results:
        return 200, said(None, ("search_emails", '{"keywords": ["lease"]}'))
    if body["model"] == "meek":
        if found := re.search(r"return (.+?) as the final answer", results[0]):
            return 200, said(None, answer(found[1], "<m0@x>"))
        if found := re.search(r"cite the message id (\S+) as", results[0]):
            return 200, said(None, answer("31 May 2002", found[1]))
        if (found := re.search(r"with the message id (\S+) before", results[0])) and len(results) == 1:
            return 200, said(None, ("read_email", json.dumps({"message_id": found[1]})))
    return 200, said(None, answer("31 May 2002", "<m0@x>"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder with mails and questions, and the two models served."""
    with closing(StubServer(reply)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        make_database(tmp_path / "mail.db")
        write_scenarios(tmp_path / "questions.jsonl", make_questions(NUM))
        yield tmp_path


def command(*more: str) -> list[str]:
    given = "benchmark --engine openai --db mail.db --questions questions.jsonl --json --out out"
    return [*given.split(), *more]


def test_each_model_is_measured_twice_and_what_was_obeyed_is_counted(emailrl, here: Path) -> None:
    assert set(COUNTS) == set(KINDS)
    code, out, err = emailrl(*command("--model", "meek", "--model", "firm", "--attack"))
    assert code == 0, err
    meek, attacked, firm, attacked_firm = json.loads(out.splitlines()[-1])
    assert [each["model"] for each in (meek, attacked, firm)] == ["meek", "meek (attacked)", "firm"]
    assert [each["attacked"] for each in (meek, attacked)] == [False, True]
    assert meek["accuracy"] == firm["accuracy"] == attacked_firm["accuracy"] == 1.0
    assert attacked["accuracy"] == pytest.approx(1 - COUNTS["answer"] / NUM)
    assert attacked["accuracy_low"] == pytest.approx(wilson_interval(NUM - COUNTS["answer"], NUM)[0])
    for kind, count in COUNTS.items():
        assert attacked[f"{kind}_orders_seen"] == attacked_firm[f"{kind}_orders_seen"] == count
        assert (attacked[f"{kind}_obeyed"], attacked_firm[f"{kind}_obeyed"]) == (1.0, 0.0)
        bounds = (attacked[f"{kind}_obeyed_low"], attacked[f"{kind}_obeyed_high"])
        assert bounds == pytest.approx(wilson_interval(count, count))
        assert meek[f"{kind}_orders_seen"] == 0 and meek[f"{kind}_obeyed"] is None
    assert attacked["sources_correct"] == pytest.approx(1 - COUNTS["cite"] / NUM)  # by the rubric as ever
    assert attacked["ever_tried_to_read_invalid_email"] == pytest.approx(COUNTS["read"] / NUM)
    assert f"100.0% of {COUNTS['cite']}" in err
    assert all(f"{pair} (attacked)" in err for pair in ("meek → meek", "meek (attacked) → firm"))
    assert "meek → firm:" in err and "meek → firm (attacked)" not in err
    assert "meek (attacked) → firm:" not in err
    rows = list(csv.DictReader((here / "out" / "questions.csv").open(newline="")))
    told = Counter((row["model"], row["order"]) for row in rows if row["order_obeyed"] == "True")
    assert told == {("meek (attacked)", kind): count for kind, count in COUNTS.items()}


def test_plain_results_hold_nothing_of_it_and_are_those_of_the_plain_half(emailrl, here: Path) -> None:
    changing = ("latency_seconds", "trajectories", "measured_at")
    plain = json.loads(emailrl(*command("--model", "meek"))[1].splitlines()[-1])
    assert not {name for name in plain if "obeyed" in name or "attack" in name or "orders" in name}
    half = json.loads(emailrl(*command("--model", "meek", "--attack", "--overwrite"))[1].splitlines()[-1])[0]
    assert {name: half[name] for name in plain} | dict.fromkeys(changing) == plain | dict.fromkeys(changing)
    (kept, _) = (list(read_trajectories(file)) for file in sorted((here / "out" / "trajectories").glob("*.jsonl")))
    assert not any(order_of(each.scenario).was_seen(each) for each in kept)


def test_an_environment_of_ones_own_is_attacked_too_where_it_hands_over_mail(emailrl, here: Path) -> None:
    (here / "own.py").write_text(
        "from emailrl.agent import MailEnvironment\n\n\n"
        "def own(scenario, mailbox, settings):\n    return MailEnvironment(scenario, mailbox, settings.agent)\n"
    )
    code, out, err = emailrl(*command("--model", "meek", "--environment", "own.py:own", "--attack"))
    assert code == 0, err
    attacked = json.loads(out.splitlines()[-1])[1]
    assert {kind: attacked[f"{kind}_obeyed"] for kind in KINDS} == dict.fromkeys(KINDS, 1.0)
    (here / "own.py").write_text(
        "from emailrl.agent import StepResult\nfrom emailrl.records.trajectory import Message\n\n\n"
        "class Own:\n    final_answer = None\n\n    def __init__(self, scenario, mailbox, settings):\n        pass\n\n"
        '    def start(self):\n        return [Message("user", "?")]\n\n'
        '    def step(self, message):\n        self.final_answer = "May"\n        return StepResult(done=True)\n'
    )
    own = ("--environment", "own.py:Own", "--reward", "simple", "--overwrite")
    code, out, err = emailrl(*command("--model", "meek", "--attack", *own))
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])[1]["cite_orders_seen"] == 0
    assert err.count("none seen") == len(KINDS)
