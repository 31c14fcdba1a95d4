"""The tools' side of the store: what a mailbox finds, shows and refuses."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mail.mails import found, rows

from emailrl.agent.task import agent_mailbox
from emailrl.agent.tools import read_email, read_thread
from emailrl.base.errors import EmailRLError, ToolError, UsageError
from emailrl.mail import Email, SearchHit, database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.settings import AgentSettings, StoreSettings

ANN, BOB, CY = "ann@x.org", "bob@x.org", "cy@x.org"
DAY_3, DAY_4 = "2001-05-03", "2001-05-04"


@pytest.mark.parametrize(
    ("inbox", "keywords", "options", "expected"),
    [
        # newest first, and only the inbox, which is compared in lower case
        (BOB, ["budget"], {}, [4, 3, 1, 6]), (CY, ["budget"], {}, [5, 4]), (ANN, ["budget"], {}, [5, 4, 3, 1, 6]),
        (" Bob@X.org ", ["lunch"], {}, [2]),
        (ANN, ["budget"], {"max_results": 2}, [5, 4]),
        # keywords are joined by and, words in one are a phrase, and keywords without a letter are left out
        (BOB, ["draft", "gas"], {}, [1]), (BOB, ["gas budget"], {}, [4, 3, 1, 6]), (BOB, ["budget gas"], {}, []),
        (BOB, ["BUDGET", "final"], {}, [3]), (BOB, ["!!!", "final"], {}, [3]), (BOB, ["!!!", ""], {}, []),
        # without keywords, a filter is enough
        (BOB, [], {"from_addr": ANN}, [4, 3, 1, 6]), (BOB, [], {"to_addr": CY}, [4, 2]),
        (BOB, [], {"sent_after": "2001-05-02", "sent_before": DAY_4, "max_results": 1}, [3]),
        (BOB, [], {"until": DAY_3, "order": "relevance", "from_addr": ANN}, [1]),
        (BOB, [], {"to_addr": CY, "from_addr": BOB}, [2]), (BOB, [], {"from_addr": "dee@x.org"}, []),
        # senders and recipients
        (BOB, ["lunch"], {"from_addr": "Bob@x.org"}, [2]), (BOB, ["lunch"], {"from_addr": ANN}, []),
        (BOB, ["budget"], {"to_addr": CY}, [4]), (ANN, ["budget"], {"to_addr": CY}, [5, 4]),
        (BOB, ["budget"], {"to_addr": "unknown@x.org"}, []),
        (BOB, ["budget"], {"from_addr": "", "to_addr": "", "sent_after": "", "sent_before": ""}, [4, 3, 1, 6]),
        # dates, from inclusive to exclusive
        (BOB, ["budget"], {"sent_after": DAY_3}, [4, 3]), (BOB, ["budget"], {"sent_before": DAY_3}, [1]),
        (BOB, ["budget"], {"sent_after": DAY_3, "sent_before": DAY_4}, [3]),
        (BOB, ["budget"], {"sent_after": DAY_4, "sent_before": DAY_3}, []),
        (BOB, ["budget"], {"sent_after": "2002-01-01"}, []),
        # the date of the question binds them
        (BOB, ["budget"], {"until": DAY_3}, [1]), (BOB, ["budget"], {"until": DAY_3, "sent_before": "2001-06-01"}, [1]),
        (BOB, ["budget"], {"until": DAY_3, "sent_after": DAY_3}, []),
        # hostile keywords are words that no mail holds
        *((BOB, [keyword], {}, []) for keyword in
          ('"', '""', "budget OR lunch", "NEAR(gas budget)", "body: gas", "(", "a\0b", "'; --", "\ue0001", "\ue0012",
           "parties", "é", "日本", "x" * 1000, "\x1b[31m")),
        # signs of the query language mean nothing
        *((BOB, [keyword], {}, [4, 3, 1, 6]) for keyword in ("gas*", "^gas", "-gas", '"gas"', "gas\0", "{gas}")),
    ],
)  # fmt: skip
def test_what_is_found(db: Path, inbox: str, keywords: list[str], options: dict[str, Any], expected: list[int]) -> None:
    assert found(db, inbox, *keywords, **options) == [f"<{number}@x>" for number in expected]


def test_an_unknown_inbox_is_an_error_except_for_the_agent_s_environment(db: Path) -> None:
    with pytest.raises(UsageError, match=r"from or to nobody@x\.org"):
        open_mailbox(db, "nobody@x.org")
    box = agent_mailbox(AgentSettings(), db, "nobody@x.org", None)
    assert not box.known and box.search(["budget"]) == [] and box.count(["budget"]) == 0


@pytest.mark.parametrize("arguments", [{}, {"from_addr": " "}, {"sent_after": ""}, {"max_results": 3}], ids=repr)
def test_neither_keywords_nor_a_filter_is_refused(db: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match=r"^No keywords provided for search\.$"):
        found(db, BOB, until=DAY_3, **arguments)
    with pytest.raises(ToolError, match=r"^No keywords provided for search\.$"):
        open_mailbox(db, BOB, without_keywords=False).search([], from_addr=ANN)


def test_without_keywords_the_snippet_is_how_a_mail_begins(tmp_path: Path, email: Any) -> None:
    db, words = tmp_path / "mail.db", " ".join(f"w{number}" for number in range(15))
    mails = [email(1, subject="Long", body=f"{words} w15"), email(2, subject="Whole", body=f"\n{words}\n", day=None)]
    build_database(mails, db)
    hits = open_mailbox(db, BOB).search([], from_addr=ANN)
    assert [hit.snippet for hit in hits] == [f"Long ... {words} ...", f"Whole ... {words}"]


@pytest.mark.parametrize("number", [1, 14, 15, 29])
def test_snippets_show_the_text_however_many_people(tmp_path: Path, email: Any, number: int) -> None:
    db, people = tmp_path / "mail.db", tuple(f"p{n}@x.org" for n in range(number))
    bodies = {"begins": "gas " + "w " * 40, "middle": "w " * 40 + "gas " + "w " * 40, "short": "w gas"}
    mails = [email(n, subject=name, body=body, to=people) for n, (name, body) in enumerate(bodies.items())]
    build_database([*mails, email(9, subject="gas " + "w " * 9, body="w. gas", to=people)], db)
    expected = rows(
        db,
        "SELECT message_id, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15) FROM emails_fts f "
        "JOIN emails e ON e.id = f.rowid WHERE emails_fts MATCH 'gas' ORDER BY e.id",
    )
    assert len(expected) == 4
    for inbox in (ANN, *people):
        for options in ({}, {"from_addr": ANN}):
            hits = open_mailbox(db, inbox).search(["gas"], **options)
            assert [(hit.message_id, hit.snippet) for hit in hits] == expected


def test_read_gives_the_whole_mail_of_the_inbox_up_to_the_day(db: Path) -> None:
    four = Email("<4@x>", "2001-05-04 00:00:00", "Budget", ANN, [CY], [BOB], [], "Copy of the gas budget.", "f/4.")
    assert open_mailbox(db, CY).read("<4@x>") == four
    (hit,) = open_mailbox(db, BOB).search(["final", "gas"], from_addr=ANN)
    assert hit == SearchHit("<3@x>", "The <b>gas</b> budget is <b>final</b>.")
    for inbox, until, number, is_shown in (
        (BOB, None, 5, False), (CY, None, 5, True),  # a bcc receives the mail too
        (ANN, None, 9, False), (BOB, DAY_3, 3, False), (BOB, DAY_3, 1, True),
        (BOB, DAY_3, 6, False),  # a mail without a date may be from after the question
    ):  # fmt: skip
        assert (open_mailbox(db, inbox, until).read(f"<{number}@x>") is not None) is is_shown, (inbox, until, number)


def test_ids_are_known_with_and_without_brackets_and_as_written_first(tmp_path: Path, email: Any) -> None:
    ids = ["<1@x>", "2@x", "<3@x>", "3@x"]
    mails = [replace(email(number), message_id=each) for number, each in enumerate(ids)]
    build_database(mails, tmp_path / "ids.db")
    box = open_mailbox(tmp_path / "ids.db", mails[0].from_address)
    asked = {"1@x": "<1@x>", "<1@x>": "<1@x>", "<2@x>": "2@x", "2@x": "2@x", "<3@x>": "<3@x>", "3@x": "3@x"}
    assert {each: found.message_id for each in asked if (found := box.read(each))} == asked
    assert box.read("") is box.read("<>") is box.read("4@x") is None
    assert read_thread(box, "1@x") == [read_email(box, "<1@x>")]


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"keywords": []}, {"keywords": "budget"}, {"keywords": None}, {"keywords": [1]}, {"keywords": [None]},
    {"keywords": ["x" * 1001]}, {"keywords": ["x"] * 33}, {"keywords": ["\ud800"]}, {"keywords": {"a": 1}},
    {"max_results": 11}, {"max_results": 0}, {"max_results": -1}, {"max_results": "5"}, {"max_results": True},
    {"max_results": 1.0}, {"max_results": None}, {"from_addr": 3}, {"to_addr": ["a@b"]}, {"from_addr": "\udfff"},
    {"sent_after": "yesterday"}, {"sent_after": "2001-5-1"}, {"sent_before": "2001-02-30"}, {"sent_before": 20010101},
    {"sent_after": "20010101"}, {"sent_after": "2001-W01-1"}, {"sent_after": "٢٠٠١-٠١-٠١"},
    {"sent_after": "2001-01-01\n"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", BAD_ARGUMENTS, ids=repr)
def test_bad_arguments_are_tool_errors(db: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ToolError):
        open_mailbox(db, BOB).search(**{"keywords": ["budget"], **wrong})


def test_bad_mailboxes_and_ids_are_tool_errors(db: Path) -> None:
    for wrong in ({"inbox": ""}, {"inbox": None}, {"inbox": 1}, {"until": "soon"}, {"order": "best"}, {"order": None}):
        with pytest.raises(ToolError):
            open_mailbox(db, **{"inbox": BOB} | wrong)
    for message_id in (None, 3, ["<1@x>"], "\ud800"):
        with pytest.raises(ToolError):
            open_mailbox(db, BOB).read(message_id)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
def test_thousands_of_mailboxes_need_few_file_handles(db: Path) -> None:
    descriptors = Path("/proc/self/fd")
    open_mailbox(db, BOB).search(["gas"])
    before = len(list(descriptors.iterdir()))
    boxes = [open_mailbox(db, BOB, DAY_4) for _ in range(3000)]
    for box in (boxes[0], boxes[-1]):
        assert [hit.message_id for hit in box.search(["gas"])] == ["<3@x>", "<1@x>"]
    assert len(list(descriptors.iterdir())) == before
    with boxes[0]:
        pass
    with pytest.raises(EmailRLError, match="closed"):
        boxes[0].search(["gas"])


def test_threads_have_their_own_connections(db: Path) -> None:
    def work(number: int) -> list[str]:
        box = open_mailbox(db, BOB)
        return [hit.message_id for _ in range(50) for hit in box.search(["budget"])]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [["<4@x>", "<3@x>", "<1@x>", "<6@x>"] * 50] * 4


def test_a_replaced_database_is_seen_by_mailboxes_opened_after(db: Path, email: Any) -> None:
    old = open_mailbox(db, BOB)
    build_database([email(9, body="Something new about gas.")], db, overwrite=True)
    assert found(db, BOB, "gas") == ["<9@x>"]
    assert len(old.search(["gas"])) == 4


def test_no_database_another_file_another_version_and_no_index(tmp_path: Path, db: Path) -> None:
    with pytest.raises(EmailRLError, match="No such mail database"):
        open_mailbox(tmp_path / "missing.db", BOB)
    text = tmp_path / "text.db"
    text.write_text("This is not a database at all, only some text." * 100)
    with pytest.raises(UsageError, match="cannot be read as a mail database"):
        open_mailbox(text, BOB)
    rows(db, "UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    with pytest.raises(UsageError, match="older version"):
        open_mailbox(db, BOB)
    without = tmp_path / "without.db"
    with closing(sqlite3.connect(without)) as connection:
        connection.executescript("CREATE TABLE emails(id); CREATE TABLE recipients(id); CREATE TABLE meta(key, value)")
    with pytest.raises(UsageError, match="not written by emailrl"):
        open_mailbox(without, BOB)
    with pytest.raises(UsageError, match="not written by emailrl"):
        database_fingerprint(without)


SEARCH_IN_40_MB = """
import sqlite3, sys
from pathlib import Path
from emailrl.mail import open_mailbox
box = open_mailbox(Path(sys.argv[1]), "ann@x.org", order="relevance")
sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 40000000")  # of the process
box.search(["a"] * 32)
"""


def test_a_search_without_memory_asks_for_fewer_keywords(tmp_path: Path, email: Any) -> None:
    """By relevance, SQLite keeps all positions of all keywords."""
    mails = [email(1, body="a " * 1_000_000)]
    build_database(mails, tmp_path / "mail.db", settings=StoreSettings(max_body_chars=0))
    command = [sys.executable, "-c", SEARCH_IN_40_MB, tmp_path / "mail.db"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ToolError: The search needs too much memory. Use fewer keywords." in done.stderr


def test_a_search_has_a_limited_number_of_words(tmp_path: Path) -> None:
    db = build_database([RawEmail("<1@x>", "s", "a@x", ["b@x"], [], [], None, "a " * 99)], tmp_path / "m.db").db
    for names in (False, True):
        with open_mailbox(db, "a@x", names=names) as box:
            assert [hit.message_id for hit in box.search(["a " * 60, "a a", "a", "a"])] == ["<1@x>"]
            for keywords in (["a " * 65], ["a." * 33, "a " * 32], ["a"] * 33):
                with pytest.raises(ToolError, match="words"):
                    box.search(keywords)
