"""Names of people and attachments, threads and the senders of machine mail: as written, stored, found and shown."""

from __future__ import annotations

from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import getaddresses
from pathlib import Path
from urllib.parse import quote

import pytest
from mail.mails import found, mbox, rows

from emailrl.base.errors import UsageError
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.database import database_fingerprint
from emailrl.mail.languages import spellings
from emailrl.mail.sources import RawEmail, open_source, parse_message
from emailrl.mail.sources.reading import MADE_UP
from emailrl.mail.threads import threads_of

ME = "ann@x.org"
MUELLER, OBRIEN, LUKASZ = "Jürgen Müller", "Sam O'Brien", "Łukasz Żak"


def written(number: int, name: str, subject: str, body: str, *files: str, **headers: str) -> bytes:
    """A mail of May 2026 as Python's own library writes it, with encoded words and RFC 2231 parameters."""
    mail = EmailMessage(SMTP.clone(linesep="\n"))
    mail["From"] = Address(name, f"p{number}", "x.de")
    mail["To"] = [Address("Ann Lee", "ann", "x.org"), Address("", "bob", "x.org")]
    mail["Subject"], mail["Message-ID"] = subject, f"<{number}@x>"
    mail["Date"] = datetime(2026, 5, number, 9, tzinfo=UTC)
    for header, value in headers.items():
        mail[header.replace("_", "-")] = value
    mail.set_content(body)
    for file in files:
        mail.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename=file)
    return bytes(mail)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("names") / "own.mbox"
    letters = [
        written(1, MUELLER, "Miete", "Anbei. Frau Weiß wohnt in der Hauptstraße.", "Mieterhöhung_2026.pdf"),
        written(2, OBRIEN, "Re: Miete", "Thanks, Mueller told me.", In_Reply_To="<1@x>", References="<0@x> <1@x>"),
        written(3, LUKASZ, "Termin", "Bis morgen."),
        written(4, "Shop", "Sale", "Buy.", List_Unsubscribe="<mailto:u@x>", Precedence="bulk"),
        written(5, "Ann Lee", "AW: Termin", "Gerne."),
    ]
    path.write_bytes(mbox(*letters))
    return build_database(open_source(path), path.with_suffix(".db")).db


@pytest.mark.parametrize(
    ("keyword", "numbers"),
    [
        (MUELLER, [1]), ("Juergen Mueller", [1]), ("Mueller", [2, 1]), ("Müller", [2, 1]), ("muller", [2, 1]),
        ("Mieterhoehung", [1]), ("Mieterhöhung", [1]), ("Mieterho\u0308hung 2026", [1]), ("mieterhohung", [1]),
        ("O'Brien", [2]), ("Łukasz", [3]), ("Lukasz Zak", [3]), ("Zak", [3]), ("Frau Weiss", [1]),
        ("Hauptstrasse", [1]),
        ("Ann Lee", [5, 4, 3, 2, 1]), ("Lee Ann", [5, 4, 3, 2, 1]), ("OBrien", [2]), ("x.de", []),
    ],
)  # fmt: skip
def test_names_are_found_in_every_spelling_and_not_by_art_e_s_queries(
    db: Path, keyword: str, numbers: list[int]
) -> None:
    assert found(db, ME, keyword) == [f"<{number}@x>" for number in numbers]
    box = open_mailbox(db, ME)
    assert box.count([keyword]) == len(numbers)
    assert not any("\ue000" in hit.snippet for hit in box.search([keyword]))
    [(raw,)] = rows(db, "SELECT count(*) FROM emails_fts WHERE emails_fts MATCH ?", f'"{keyword}"')
    exact = [hit.message_id for hit in open_mailbox(db, ME, names=False).search([keyword])]
    in_text = {"Mueller": ["<2@x>"]}.get(keyword, [])
    assert exact == in_text and raw == len(in_text)


def test_snippets_show_the_text_as_written(db: Path) -> None:
    def snippet(keyword: str) -> str:
        return open_mailbox(db, ME).search([keyword])[-1].snippet.strip()

    assert snippet("Hauptstrasse") == "Anbei. Frau Weiß wohnt in der <b>Hauptstraße</b>."
    assert snippet("Jürgen").startswith("Miete ... Anbei."), "a name alone has no place in the text"


def test_an_email_has_names_files_thread_and_machine_as_written(db: Path) -> None:
    box = open_mailbox(db, ME)
    first, reply, _, sale, answer = (box.read(f"<{number}@x>") for number in range(1, 6))
    assert first and reply and sale and answer
    assert (first.from_name, reply.from_name) == (MUELLER, OBRIEN)
    assert first.names == {"p1@x.de": MUELLER, "ann@x.org": "Ann Lee"} and first.named("bob@x.org") == "bob@x.org"
    assert first.attachments == ["Mieterhöhung_2026.pdf"] and reply.attachments == []
    assert first.thread_id == reply.thread_id and box.thread(reply) == [first.message_id, reply.message_id]
    assert len(box.thread(answer)) == 2 and sale.thread_id is None and box.thread(sale) == [sale.message_id]
    assert open_mailbox(db, ME, "2026-05-02").thread(first) == [first.message_id], "the future is not counted"
    assert [each.machine for each in (first, sale)] == ["", "newsletter"]


@pytest.mark.parametrize("last", ["Last", "van Dyke", "Müller-Lüdenscheidt", "Smith, Jr."])
def test_a_name_that_begins_with_the_last_name_is_whole_however_it_is_written(last: str) -> None:
    name = f"{last}, Dr. First"
    encoded = f"=?utf-8?q?{quote(name)}?=".replace("%", "=")
    for written in (f'"{name}"', f"'{name}'", name, name.replace(",", "\\,"), encoded):
        mail = parse_message(f"From: {written} <a@x>\nTo: b@x, {written} <a@x>; Bo Lee <c@x>\n\n".encode())
        assert isinstance(mail, RawEmail) and mail.to == ["b@x", "a@x", "c@x"], written
        assert mail.names == {"a@x": name, "c@x": "Bo Lee"}, written


def test_python_s_parser_reads_the_same_names(shared_data: Path) -> None:
    plain = 'Ann Lee <a@x>, "Lee, Bob" <b@x>, \'Cy\' <c@x>, d@x, "e@x" <e@x>, =?utf-8?q?J=C3=BCrgen?= <f@x>, g@x (Gil)'
    mail = parse_message(f"From: z@x\nTo: {plain}\n\n".encode())
    assert isinstance(mail, RawEmail)
    expected = {"a@x": "Ann Lee", "b@x": "Lee, Bob", "c@x": "Cy", "f@x": "Jürgen"}
    assert mail.names == expected and mail.to == [f"{letter}@x" for letter in "abcdefg"]
    compared = 0
    for name, raw in open_source(shared_data / "enron" / "enron_mail_subset.tar.gz").items:  # type: ignore[misc]
        head = raw.partition(b"\n\n")[0]
        if b"\nTo: " not in head or b"<" not in head.partition(b"\nTo: ")[2].partition(b"\n")[0]:
            continue
        own = parse_message(raw, name)
        value = head.decode("latin-1").partition("\nTo: ")[2].partition("\nSubject:")[0]
        people = {  # an address with two names has the first
            address.lower(): shown.strip("'")
            for shown, address in reversed(getaddresses([value]))
            if shown and "@" not in shown
        }
        assert isinstance(own, RawEmail) and {each: own.names.get(each) for each in people} == people, name
        compared += len(people)
    assert compared > 500


def test_cmu_s_lists_name_people_only_if_they_are_as_many_as_the_addresses() -> None:
    exchange = "Lee, Ann </O=ENRON/CN=ALEE>, Roe, Bo </O=ENRON/CN=BROE>"
    cases = {
        ("a@x, b@x", "Ann Lee, Bo Roe"): ["Ann Lee", "Bo Roe"],
        ("a@x, b@x", exchange): ["Lee, Ann", "Roe, Bo"],
        ("a@x, b@x", 'Ann Lee, "Roe, Bo" <b@x> @ENRON'): ["Ann Lee", "Roe, Bo"],
        ("a@x", exchange): [], ("a@x, b@x", "Ann Lee, Bo Roe, Cy"): [], ("a@x", "a@x"): [],
    }  # fmt: skip
    for (to, listed), names in cases.items():
        mail = parse_message(f"From: z@x\nTo: {to}\nX-From: Zoe Z\nX-To: {listed}\nSubject: s\n\nb".encode())
        assert isinstance(mail, RawEmail) and mail.names.pop("z@x") == "Zoe Z"
        assert list(mail.names.values()) == names, listed


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ("Auto-Submitted: no", ""), ("Auto-Submitted: auto-generated", "notification"),
        ("Auto-Submitted: auto-replied (vacation)", "auto-reply"), ("Precedence: auto_reply", "auto-reply"),
        ("Return-Path: <>", "auto-reply"), ("Return-Path: <bo@x>", ""), ("Precedence: bulk", "newsletter"),
        ("List-Id: News <n.x.org>", "newsletter"), ("List-Unsubscribe: <https://x/u>\nList-Post: NO", "newsletter"),
        ("List-Id: <dev.x.org>\nList-Post: <mailto:dev@x.org>\nPrecedence: list", ""),  # people write there
        ("Feedback-ID: 1:x:y:z", "notification"), ("X-Auto-Response-Suppress: All", "notification"),
        ("Content-Type: text/calendar; method=REQUEST", "calendar"), ("Content-Type: text/calendar", ""),
        ("Content-Type: multipart/report; boundary=b", "auto-reply"),
    ],
)  # fmt: skip
def test_headers_tell_what_machines_send(headers: str, kind: str) -> None:
    mail = parse_message(f"From: Bo <bo@x>\nSubject: s\n{headers}\n\nb".encode())
    assert isinstance(mail, RawEmail) and mail.machine == kind
    nobody = parse_message(b"From: no-reply@shop.x\nSubject: s\n\nb")
    assert isinstance(nobody, RawEmail) and nobody.machine == "notification"


@pytest.mark.parametrize(
    ("keyword", "numbers"),
    [
        ("+48601482337", [1]),
        ("0048601482337", [1]),
        ("0612345678", [2]),
        ("+33612345678", [2]),
        ("7135550142", [2]),
        ("601482337", [1]),
        ("0475318206", [3]),
        ("+32475318206", [3]),
        ("0701234567", [3]),
        ("0046701234567", [3]),
        ("02079460958", [3]),
        ("+493012345678", []),
        ("601482338", []),
        ("55512345678", []),
        ("12345678", []),
    ],
)
def test_a_number_without_spaces_finds_its_groups(tmp_path: Path, keyword: str, numbers: list[int]) -> None:
    others = "0475/31.82.06, +46 70-123 45 67, (020) 7946 0958"
    bodies = ["Call (+48) 601-482-337.", "06 12 34 56 78 or 713-555-0142.", others]
    (tmp_path / "m.mbox").write_bytes(mbox(*(written(at, "P", "call", body) for at, body in enumerate(bodies, 1))))
    build_database(open_source(tmp_path / "m.mbox"), tmp_path / "m.db", workers=0)
    assert found(tmp_path / "m.db", ME, keyword) == [f"<{number}@x>" for number in numbers]


def test_hostile_names_are_one_short_line_without_control(tmp_path: Path) -> None:
    evil = "=?utf-8?q?A=00=1B[31m=E2=80=AE_B=0A_=EE=80=80C?= " + "x" * 300
    raw = f'From: {evil} <a@x>\nTo: ann@x.org\nSubject: s\nContent-Disposition: attachment; filename="..\x1b/f"\n\nb'
    mail = parse_message(raw.encode())
    assert isinstance(mail, RawEmail) and mail.names["a@x"].startswith("A [31m B �C xxx")
    assert len(mail.names["a@x"]) == 200 and mail.attachments == [".. /f"]
    made = RawEmail("<1@x>", "s", "a@x", [ME], [], [], None, "b", names={"a@x": "one\ntwo\tthree"})
    db = build_database([made], tmp_path / "m.db").db
    email = open_mailbox(db, ME).read("<1@x>")
    assert email and email.from_name == "one" and found(db, ME, "three") == ["<1@x>"]


def test_other_spellings_are_those_of_words_that_have_any() -> None:
    assert spellings("Müller") == ["Müller", "Mueller"] and spellings("Strauß") == ["Strauß", "Strauss"]
    assert spellings("Søren Ärger") == ["Søren Ärger", "Soeren Aerger", "Soren Ärger"]
    assert spellings("café") == ["café"] and spellings("plain") == ["plain"]


def test_threads_follow_references_and_only_replies_without_any_their_subject() -> None:
    us = "\ue0001\ue000 \ue0002\ue000"
    mails = [
        (number, message_id, subject, refs, f"2001-05-{number:02} 09:00:00", us)
        for number, message_id, subject, refs in [
            (1, "<a>", "Hello", ""), (2, "<b>", "Re: Hello", "<a>"), (3, "<c>", "other", "<gone> <b>"),
            (4, "<d>", "Report", ""), (5, "<e>", "Report", ""), (6, "<f>", "Lunch", ""),
            (7, "<g>", "AW: RE[2]: lunch ", ""),
            (8, "<h>", "Re: Hello", ""), (9, "<i>", "Re:", ""), (10, "<j>", "Re:", ""),
        ]
    ]  # fmt: skip
    threads = dict(threads_of(mails))
    groups = {tuple(each for each in threads if threads[each] == thread) for thread in threads.values()}
    assert groups == {(1, 2, 3, 8), (6, 7)}


def test_a_common_subject_does_not_join_the_mail_of_years(tmp_path: Path) -> None:
    """Replies without Message-ID, References and In-Reply-To, as old programs write them."""

    def rechnung(day: str, sender: str, receiver: str, subject: str = "Re: Rechnung") -> bytes:
        sent = datetime.fromisoformat(day).strftime("%a, %d %b %Y 09:00:00 +0000")
        return f"From: {sender}\nTo: {receiver}\nSubject: {subject}\nDate: {sent}\n\nAm {day}.".encode()

    mails = [
        rechnung("2021-03-01", "gas@x", ME, "Rechnung"), rechnung("2021-03-02", "water@x", ME, "Rechnung"),
        rechnung("2021-03-03", ME, "gas@x"), rechnung("2021-04-02", "gas@x, cy@x", ME),  # 30 days later
        rechnung("2021-05-03", ME, "gas@x"), rechnung("2022-03-01", "gas@x", ME, "Rechnung"),  # 31 days, ten months
        rechnung("2022-03-02", ME, "gas@x"), rechnung("2022-03-02", ME, "new@x"),
    ]  # fmt: skip
    (tmp_path / "m.mbox").write_bytes(mbox(*mails))
    db = build_database(open_source(tmp_path / "m.mbox"), tmp_path / "m.db", workers=0).db
    query = "SELECT group_concat(day, ' ') FROM ({}) GROUP BY thread_id ORDER BY 1"
    days = "SELECT substr(date, 1, 10) AS day, thread_id FROM threads JOIN emails ON id = email_id ORDER BY date"
    assert rows(db, query.format(days)) == [("2021-03-01 2021-03-03 2021-04-02",), ("2022-03-01 2022-03-02",)]


def test_appending_gives_the_threads_of_one_build(tmp_path: Path) -> None:
    mails = [parse_message(written(n, "Bo", f"s{n}", "b", References=f"<{max(1, n - 1)}@x>")) for n in range(1, 7)]
    whole = build_database(mails, tmp_path / "whole.db").db
    parts = build_database([mails[n] for n in (0, 2, 5)], tmp_path / "parts.db").db
    build_database([mails[n] for n in (1, 3, 4)], parts, append=True)
    query = "SELECT message_id, thread_id FROM emails JOIN threads ON email_id = id ORDER BY 1"
    assert rows(whole, query) == rows(parts, query) and len({thread for _, thread in rows(whole, query)}) == 1
    assert database_fingerprint(whole) == database_fingerprint(parts)


def test_a_database_of_the_old_schema_is_one_line_that_names_the_rebuild(db: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    old.write_bytes(db.read_bytes())
    rows(old, "UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    rows(old, "DROP TABLE threads")
    for use in (lambda: open_mailbox(old, ME), lambda: build_database([], old, append=True)):
        with pytest.raises(UsageError, match="an older version") as refused:
            use()
        assert f"emailrl gen-db --db {old} --overwrite" in str(refused.value)


def test_people_are_named_by_address_or_name(db: Path) -> None:
    with open_mailbox(db, ME) as box:
        for name in ("Mueller", "jürgen müller", "Müller, Jürgen", "Jürgen Müller <p1@x.de>", "P1@x.de"):
            assert [hit.message_id for hit in box.search([], from_addr=name)] == ["<1@x>"], name
        assert [hit.message_id for hit in box.search(["Termin"], from_addr="Lukasz")] == ["<3@x>"]
        assert box.count([], to_addr="Ann Lee") == 5 and box.count([], from_addr="Ann Lee") == 1
        assert [hit.message_id for hit in box.search([], from_addr="obrien")] == ["<2@x>"]
        assert box.search([], from_addr="Miete") == box.search([], from_addr="Mieterhöhung") == []
    assert open_mailbox(db, ME, names=False).search([], from_addr="Mueller") == []


def test_an_address_after_words_is_no_message_id() -> None:
    def referred(value: str) -> list[str]:
        return parse_message(f"From: a@x\nTo: b@x\nIn-Reply-To: {value}\nSubject: s\n\nb\n".encode()).references

    assert referred("Your message of Monday <bob@corp.com>") == referred("Monday\n <bob@corp.com>") == []
    assert referred("<a@x> (Bob <bob@corp.com> wrote)") == ["<a@x>"]
    assert referred("<a@x>\n\t<b@x>,<c@x>, <d@x>") == [f"<{name}@x>" for name in "abcd"]
    assert referred('Your message of "Mon" <9504031600.AA12@x>') == ["<9504031600.AA12@x>"]


@pytest.mark.parametrize("own", ["<>", "< >", ""])
def test_an_empty_message_id_is_none(own: str) -> None:
    email = parse_message(f"From: a@x\nTo: b@x\nMessage-ID: {own}\nSubject: s\n\nb\n".encode())
    assert "no_message_id" in email.defects and email.message_id.endswith(MADE_UP)
