"""The tools' side of the store: what a mailbox finds, shows and refuses."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from emailrl.base.errors import EmailRLError, ToolError, UsageError
from emailrl.mail import Email, SearchHit, database_fingerprint, open_mailbox
from emailrl.mail.build import build_database
from emailrl.settings import StoreSettings


def ids(hits: list[SearchHit]) -> list[str]:
    return [hit.message_id for hit in hits]


def test_newest_first_and_only_the_inbox(db: Path) -> None:
    assert ids(open_mailbox(db, "bob@x.org").search(["budget"])) == ["<4@x>", "<3@x>", "<1@x>", "<6@x>"]
    assert ids(open_mailbox(db, "cy@x.org").search(["budget"])) == ["<5@x>", "<4@x>"]
    assert ids(open_mailbox(db, "ann@x.org").search(["budget"])) == ["<5@x>", "<4@x>", "<3@x>", "<1@x>", "<6@x>"]
    assert open_mailbox(db, "nobody@x.org").search(["budget"]) == []


def test_the_inbox_is_compared_in_lower_case(db: Path) -> None:
    assert ids(open_mailbox(db, " Bob@X.org ").search(["lunch"])) == ["<2@x>"]


def test_keywords_are_joined_by_and_and_words_in_one_are_a_phrase(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org")
    assert ids(box.search(["draft", "gas"])) == ["<1@x>"]
    assert ids(box.search(["gas budget"])) == ["<4@x>", "<3@x>", "<1@x>", "<6@x>"]
    assert box.search(["budget gas"]) == []
    assert ids(box.search(["BUDGET", "final"])) == ["<3@x>"]


def test_keywords_without_a_letter_are_left_out(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org")
    assert ids(box.search(["!!!", "final"])) == ["<3@x>"]
    assert box.search(["!!!", ""]) == []


def test_without_keywords_a_filter_is_enough(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org")
    assert ids(box.search([], from_addr="ann@x.org")) == ["<4@x>", "<3@x>", "<1@x>", "<6@x>"]
    assert ids(box.search([], to_addr="cy@x.org")) == ["<4@x>", "<2@x>"]
    assert ids(box.search([], sent_after="2001-05-02", sent_before="2001-05-04", max_results=1)) == ["<3@x>"]
    assert ids(box.search((), to_addr="cy@x.org", from_addr="bob@x.org")) == ["<2@x>"]
    assert box.search([], from_addr="dee@x.org") == []
    early = open_mailbox(db, "bob@x.org", until="2001-05-03", order="relevance")
    assert ids(early.search([], from_addr="ann@x.org")) == ["<1@x>"], "no mail is more relevant than another"


@pytest.mark.parametrize("arguments", [{}, {"from_addr": " "}, {"sent_after": ""}, {"max_results": 3}], ids=repr)
def test_neither_keywords_nor_a_filter_is_refused(db: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match=r"^No keywords provided for search\.$"):
        open_mailbox(db, "bob@x.org", until="2001-05-03").search([], **arguments)


def test_a_mailbox_can_insist_on_keywords(db: Path) -> None:
    with pytest.raises(ToolError, match=r"^No keywords provided for search\.$"):
        open_mailbox(db, "bob@x.org", without_keywords=False).search([], from_addr="ann@x.org")


@pytest.mark.parametrize("in_order", [True, False])
def test_without_keywords_the_snippet_is_how_a_mail_begins(tmp_path: Path, email: Any, in_order: bool) -> None:
    words = " ".join(f"w{number}" for number in range(15))
    mails = [email(1, subject="Long", body=f"{words} w15"), email(2, subject="Whole", body=f"\n{words}\n", day=None)]
    build_database(mails, tmp_path / "mail.db")
    if not in_order:
        with closing(sqlite3.connect(tmp_path / "mail.db")) as connection, connection:
            connection.execute("DELETE FROM meta WHERE key = 'ids_follow_dates'")
    hits = open_mailbox(tmp_path / "mail.db", "bob@x.org").search([], from_addr="ann@x.org")
    assert [hit.snippet for hit in hits] == [f"Long ... {words} ...", f"Whole ... {words}"]


def test_snippets_mark_the_keywords_alone(db: Path) -> None:
    (hit,) = open_mailbox(db, "bob@x.org").search(["final", "gas"], from_addr="ann@x.org")
    assert hit == SearchHit("<3@x>", "The <b>gas</b> budget is <b>final</b>.")


@pytest.mark.parametrize("number", [1, 13, 14, 15, 16, 29])
def test_snippets_show_the_text_however_many_people(tmp_path: Path, email: Any, number: int) -> None:
    people = tuple(f"p{n}@x.org" for n in range(number))
    bodies = {"begins": "gas " + "w " * 40, "middle": "w " * 40 + "gas " + "w " * 40, "short": "w gas"}
    mails = [email(n, subject=name, body=body, to=people) for n, (name, body) in enumerate(bodies.items())]
    build_database([*mails, email(9, subject="gas " + "w " * 9, body="w. gas", to=people)], tmp_path / "mail.db")
    with closing(sqlite3.connect(tmp_path / "mail.db")) as connection:
        expected = connection.execute(
            "SELECT message_id, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15) FROM emails_fts f "
            "JOIN emails e ON e.id = f.rowid WHERE emails_fts MATCH 'gas' ORDER BY e.id"
        ).fetchall()
    assert len(expected) == 4
    for inbox in ("ann@x.org", *people):
        box = open_mailbox(tmp_path / "mail.db", inbox)
        assert [(hit.message_id, hit.snippet) for hit in box.search(["gas"])] == expected
        assert [(hit.message_id, hit.snippet) for hit in box.search(["gas"], from_addr="ann@x.org")] == expected


def test_sender_and_recipient_filters(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org")
    assert ids(box.search(["lunch"], from_addr="Bob@x.org")) == ["<2@x>"]
    assert box.search(["lunch"], from_addr="ann@x.org") == []
    assert ids(box.search(["budget"], to_addr="cy@x.org")) == ["<4@x>"]
    assert ids(open_mailbox(db, "ann@x.org").search(["budget"], to_addr="cy@x.org")) == ["<5@x>", "<4@x>"]
    assert box.search(["budget"], to_addr="unknown@x.org") == []
    assert len(box.search(["budget"], from_addr="", to_addr="", sent_after="", sent_before="")) == 4


def test_dates_from_inclusive_to_exclusive(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org")
    assert ids(box.search(["budget"], sent_after="2001-05-03")) == ["<4@x>", "<3@x>"]
    assert ids(box.search(["budget"], sent_before="2001-05-03")) == ["<1@x>"]
    assert ids(box.search(["budget"], sent_after="2001-05-03", sent_before="2001-05-04")) == ["<3@x>"]
    assert box.search(["budget"], sent_after="2001-05-04", sent_before="2001-05-03") == []
    assert box.search(["budget"], sent_after="2002-01-01") == []


def test_until_binds_search_and_read(db: Path) -> None:
    box = open_mailbox(db, "bob@x.org", until="2001-05-03")
    assert ids(box.search(["budget"])) == ["<1@x>"]
    assert ids(box.search(["budget"], sent_before="2001-06-01")) == ["<1@x>"]
    assert box.search(["budget"], sent_after="2001-05-03") == []
    assert box.read("<3@x>") is None
    assert box.read("<6@x>") is None, "a mail without a date may be from after the question"
    assert box.read("<1@x>") is not None


def test_read_gives_the_whole_mail(db: Path) -> None:
    assert open_mailbox(db, "cy@x.org").read("<4@x>") == Email(
        "<4@x>", "2001-05-04 00:00:00", "Budget", "ann@x.org", ["cy@x.org"], ["bob@x.org"], [],
        "Copy of the gas budget.", "f/4.",
    )  # fmt: skip


def test_read_is_limited_to_the_inbox(db: Path) -> None:
    assert open_mailbox(db, "bob@x.org").read("<5@x>") is None
    assert open_mailbox(db, "cy@x.org").read("<5@x>") is not None, "a bcc receives the mail too"
    assert open_mailbox(db, "ann@x.org").read("<9@x>") is None


def test_max_results(db: Path) -> None:
    assert ids(open_mailbox(db, "ann@x.org").search(["budget"], max_results=2)) == ["<5@x>", "<4@x>"]


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
        open_mailbox(db, "bob@x.org").search(**{"keywords": ["budget"], **wrong})


@pytest.mark.parametrize("wrong", [{"inbox": ""}, {"inbox": None}, {"inbox": 1}, {"until": "soon"}], ids=repr)
def test_bad_mailboxes_are_tool_errors(db: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ToolError):
        open_mailbox(db, **{"inbox": "bob@x.org", **wrong})


@pytest.mark.parametrize("wrong", [None, 3, ["<1@x>"], "\ud800"])
def test_bad_ids_are_tool_errors(db: Path, wrong: Any) -> None:
    with pytest.raises(ToolError):
        open_mailbox(db, "bob@x.org").read(wrong)


HOSTILE = ['"', '""', "budget OR lunch", "NEAR(gas budget)", "body: gas", "(", "a\0b", "'; --", "\ue0001", "\ue0012",
           "parties", "é", "日本", "x" * 1000, "\x1b[31m"]  # fmt: skip


@pytest.mark.parametrize("keyword", HOSTILE)
def test_hostile_keywords_are_words_that_no_mail_holds(db: Path, keyword: str) -> None:
    assert open_mailbox(db, "bob@x.org").search([keyword]) == []


@pytest.mark.parametrize("keyword", ["gas*", "^gas", "-gas", '"gas"', "gas\0", "{gas}"])
def test_signs_of_the_query_language_mean_nothing(db: Path, keyword: str) -> None:
    assert ids(open_mailbox(db, "bob@x.org").search([keyword])) == ["<4@x>", "<3@x>", "<1@x>", "<6@x>"]


def test_a_database_of_another_version_is_refused(db: Path) -> None:
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    with pytest.raises(UsageError, match="another version"):
        open_mailbox(db, "bob@x.org")


def test_a_closed_mailbox_says_so(db: Path) -> None:
    with open_mailbox(db, "bob@x.org") as box:
        box.search(["gas"])
    with pytest.raises(EmailRLError, match="closed"):
        box.search(["gas"])


def test_thousands_of_mailboxes_need_few_file_handles(db: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("no /proc here")
    open_mailbox(db, "bob@x.org").search(["gas"])
    before = len(list(descriptors.iterdir()))
    boxes = [open_mailbox(db, "bob@x.org", "2001-05-04") for _ in range(3000)]
    assert ids(boxes[0].search(["gas"])) == ids(boxes[-1].search(["gas"])) == ["<3@x>", "<1@x>"]
    assert len(list(descriptors.iterdir())) == before


def test_threads_have_their_own_connections(db: Path) -> None:
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        box = open_mailbox(db, "bob@x.org")
        for _ in range(50):
            found[number] = ids(box.search(["budget"]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [["<4@x>", "<3@x>", "<1@x>", "<6@x>"]] * 4


def test_a_replaced_database_is_seen_by_mailboxes_opened_after(db: Path, email: Any) -> None:
    old = open_mailbox(db, "bob@x.org")
    build_database([email(9, body="Something new about gas.")], db, overwrite=True)
    assert ids(open_mailbox(db, "bob@x.org").search(["gas"])) == ["<9@x>"]
    assert len(old.search(["gas"])) == 4


def test_no_database_another_file_and_no_index(tmp_path: Path) -> None:
    with pytest.raises(EmailRLError, match="No such mail database"):
        open_mailbox(tmp_path / "missing.db", "a@b")
    text = tmp_path / "text.db"
    text.write_text("This is not a database at all, only some text." * 100)
    with pytest.raises(UsageError, match="cannot be read as a mail database"):
        open_mailbox(text, "a@b")
    without = tmp_path / "without.db"
    connection = sqlite3.connect(without)
    connection.executescript(
        "CREATE TABLE emails(id); CREATE TABLE recipients(email_id); CREATE TABLE meta(key, value)"
    )
    connection.close()
    with pytest.raises(UsageError, match="full-text index"):
        open_mailbox(without, "a@b")
    with pytest.raises(UsageError, match="full-text index"):
        database_fingerprint(without)


def test_a_search_without_memory_asks_for_fewer_keywords(tmp_path: Path, email: Any) -> None:
    # The limit is that of a process; by relevance, SQLite keeps all positions of all keywords.
    body = "a " * 1_000_000
    build_database([email(1, body=body)], tmp_path / "mail.db", settings=StoreSettings(max_body_chars=0))
    done = subprocess.run(
        [sys.executable, "-c", SEARCH_IN_40_MB, tmp_path / "mail.db"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "The search needs too much memory. Use fewer keywords.\n", done.stderr


SEARCH_IN_40_MB = """
import sqlite3, sys
from pathlib import Path
from emailrl.base.errors import ToolError
from emailrl.mail import open_mailbox
box = open_mailbox(Path(sys.argv[1]), "ann@x.org", order="relevance")
sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 40000000")
try:
    box.search(["a"] * 32)
except ToolError as error:
    print(error)
"""
