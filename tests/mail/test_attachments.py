"""The text of attached files: stored with the email as an option, marked, and never at the build's expense."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from types import SimpleNamespace

import pytest
from mail.mails import found, mbox

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import attached, documents, open_source
from emailrl.mail.sources.attached import documents as reader
from emailrl.mail.sources.attached import with_attachments
from emailrl.mail.sources.message import parse_message
from emailrl.mail.sources.reading import RawEmail
from emailrl.settings import StoreSettings

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def docx(*paragraphs: str, rows: str = "", member: str = "") -> bytes:
    text = "".join(f"<w:p><w:r><w:t>{each}</w:t></w:r></w:p>" for each in paragraphs)
    for row in filter(None, rows.split("|")):
        cells = "".join(f"<w:tc><w:p><w:r><w:t>{each}</w:t></w:r></w:p></w:tc>" for each in row.split(";"))
        text += f"<w:tr>{cells}</w:tr>"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(documents.WORD_MEMBER, member or f'<w:document xmlns:w="{WORD}">{text}</w:document>')
    return out.getvalue()


def pdf(text: str, kids: str = "3 0 R") -> bytes:
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
    bodies = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer << /Size 6 /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF"
    return out + end.encode()


def written(number: int, *files: tuple[str, str, bytes], body: str = "See the files.\n") -> bytes:
    mail = EmailMessage()
    mail["Message-ID"], mail["From"], mail["To"], mail["Subject"] = f"<{number}@x>", "ann@x.org", "bob@x.org", "Files"
    mail["Date"] = f"{number % 28 + 1} May 2026 10:00:00 +0000"
    mail.set_content(body)
    for name, kind, content in files:
        main, sub = kind.split("/")
        mail.add_attachment(content, maintype=main, subtype=sub, filename=name)
    return mail.as_bytes()


OCTETS = "application/octet-stream"
FILES = [
    ("plan.txt", "text/plain", "Der Plan für Höchst".encode()),
    ("list.csv", OCTETS, "name;Betrag\nMüller;1250".encode("utf-16")),
    ("page.html", "text/html", b"<p>Wire to <b>Kestrel</b></p><script>no()</script>"),
    (
        "call.ics",
        "text/calendar",
        b"BEGIN:VEVENT\r\nSUMMARY:Dentist\\, Dr Quill\r\nLOCATION:Harbour\r\n  Road 7\r\nEND:VEVENT",
    ),
    ("offer.docx", OCTETS, docx("Our offer:", "Lantern &amp; Sons, 4711 pieces", rows="Rent;;2700|Deposit;5400;")),
    ("bill.pdf", "application/pdf", pdf("Invoice Zephyr 20993")),
]
TEXTS = [
    "Der Plan für Höchst",
    "name;Betrag\nMüller;1250",
    "Wire to Kestrel",
    "Summary: Dentist, Dr Quill\nLocation: Harbour Road 7",
    "Our offer:\nLantern & Sons, 4711 pieces\nRent\t\t2700\nDeposit\t5400",
    "Invoice Zephyr 20993",
]


def test_texts_are_stored_marked_and_found_if_asked_for_and_names_always(tmp_path: Path) -> None:
    source = tmp_path / "own.mbox"
    source.write_bytes(mbox(written(1, *FILES), written(2, body="Nothing attached.\n")))
    for asked in (False, True):
        settings = StoreSettings(attachment_text=asked)
        report = build_database(open_source(source), tmp_path / f"{asked}.db", settings=settings, workers=0)
        assert (report.emails, report.attachments, report.repaired) == (2, 6, {})
        with open_mailbox(report.db, "bob@x.org") as box:
            email = box.read("<1@x>")
            assert email and email.attachments == [name for name, _, _ in FILES]
            marked = [f"[Attachment: {name}]\n{text}" for (name, _, _), text in zip(FILES, TEXTS, strict=True)]
            assert email.body == "\n\n".join(["See the files.\n", *(marked if asked else [])])
        for word in ("Höchst", "Betrag", "Kestrel", "Quill", "4711", "Zephyr"):
            assert found(report.db, "bob@x.org", word) == (["<1@x>"] if asked else [])
        assert found(report.db, "bob@x.org", "offer.docx") == ["<1@x>"]  # names are found either way


BOMB = docx(member=f'<w:document xmlns:w="{WORD}">' + "<w:p><w:r/></w:p>" * 20_000_000)  # 340 MB of nothing
HOSTILE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "a zip bomb": lambda: ("bomb.docx", BOMB),
    "pages in a circle": lambda: ("circle.pdf", pdf("x", kids="2 0 R")),
    "cut off": lambda: ("cut.pdf", pdf("Invoice")[:200]),
    "entities": lambda: (
        "laughs.docx",
        docx(member='<!DOCTYPE d [<!ENTITY a "ha">' + "".join(
            f'<!ENTITY {chr(98 + n)} "{f"&{chr(97 + n)};" * 20}">' for n in range(9)
        ) + "]><d>&j;</d>"),
    ),
    "text of zeros": lambda: ("zeros.txt", bytes(1000)),
    "no document": lambda: ("broken.docx", b"PK\3\4xxx"),
    "nothing": lambda: ("empty.pdf", b""),
}  # fmt: skip


def test_a_hostile_file_costs_one_counted_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CPU_SECONDS", 4)
    source = tmp_path / "own.mbox"
    bad = [written(number, (*make()[:1], OCTETS, make()[1])) for number, make in enumerate(HOSTILE.values(), 1)]
    source.write_bytes(mbox(*bad, written(9, FILES[-1])))
    heard: list[tuple[str, ...]] = []
    settings = StoreSettings(attachment_text=True)
    build = build_database(
        open_source(source), tmp_path / "m.db", settings=settings, workers=0, listing=lambda *line: heard.append(line)
    )
    assert (build.emails, build.skipped, build.repaired) == (8, {}, {"attachment_unread": 7})
    assert heard == [("repaired", "attachment_unread", f"own.mbox#{number}") for number in range(1, 8)]
    assert found(build.db, "bob@x.org", "Zephyr") == ["<9@x>"]  # the file after them is read
    assert reader._child is None  # and no process stays


def test_no_file_of_an_email_is_begun_when_its_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    email = parse_message(written(1, ("a.txt", "text/plain", b"Zephyr"), ("b.txt", "text/plain", b"Mistral")))
    assert isinstance(email, RawEmail) and "Mistral" in with_attachments(email).body
    photo = parse_message(written(2, ("a.txt", "text/plain", b"Zephyr"), ("b.png", "image/png", b"\x89PNG")))
    assert isinstance(photo, RawEmail)
    clock = iter(2 * [0.0, 1.0, 21.0])
    monkeypatch.setattr(attached, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    read = with_attachments(email)
    assert "Zephyr" in read.body and "Mistral" not in read.body and read.defects == ("attachment_unread",)
    assert with_attachments(photo).defects == ()  # has no text to leave out


def test_an_invitation_without_a_name_is_read_once_and_soft_hyphens_are_dropped() -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "ann@x.org", "s"
    mail.set_content("Sendungs\u00adnummer 7\n")
    invitation = "BEGIN:VEVENT\nSUMMARY:Chor\u00adprobe\nEND:VEVENT\n"
    mail.add_alternative(invitation, subtype="calendar", params={"method": "REQUEST"})
    shown = "Sendungsnummer 7\n\n\n[Attachment{}]\nSummary: Chorprobe"
    for named in ([], ["invite.ics"]):
        for name in named:
            mail.add_attachment(invitation.encode(), maintype="application", subtype="ics", filename=name)
        email = parse_message(mail.as_bytes())
        assert isinstance(email, RawEmail) and email.attachments == named, "a type is no name"
        assert with_attachments(email).body == shown.format("".join(f": {name}" for name in named))


EVENT = """BEGIN:VCALENDAR
METHOD:REQUEST
BEGIN:VTIMEZONE
BEGIN:STANDARD
DTSTART:19701025T030000
END:STANDARD
END:VTIMEZONE
BEGIN:VEVENT
SUMMARY:Elternabend\\, Klasse 4b
DTSTART;TZID=Europe/Berlin:20260512T190000
DTEND:20260512T183000Z
LOCATION:Aula\\nHaus
  2
ORGANIZER;CN="Weber: Schule":MAILTO:weber@x.de
BEGIN:VALARM
DESCRIPTION:Reminder
END:VALARM
END:VEVENT
END:VCALENDAR
"""
TOLD = """Summary: Elternabend, Klasse 4b
Start: 2026-05-12 19:00 Europe/Berlin
End: 2026-05-12 18:30 UTC
Location: Aula\nHaus 2
Organizer: Weber: Schule MAILTO:weber@x.de"""


def test_a_mail_that_is_only_an_event_tells_it() -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "weber@x.de", "s"
    mail.set_content(EVENT, subtype="calendar", params={"method": "REQUEST"})
    email = parse_message(mail.as_bytes())
    assert isinstance(email, RawEmail) and (email.body, email.machine) == (TOLD, "calendar")


def test_a_forwarded_message_belongs_to_the_mail_and_its_files_count() -> None:
    inner = EmailMessage()
    inner["From"], inner["Subject"], inner["Date"] = "Zoë Quill <z@x.org>", "Kaution", "Tue, 5 May 2026 10:00:00 +0000"
    inner.set_content("The deposit is 1800.\n")
    inner.add_attachment(EVENT.encode(), maintype="text", subtype="calendar", params={"method": "REQUEST"})
    inner.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="lease.pdf")
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "ann@x.org", "bob@x.org", "Fwd"
    mail.set_content("See below.\n")
    mail.add_attachment(inner, filename="Kaution.eml")
    email = parse_message(mail.as_bytes())
    assert isinstance(email, RawEmail)
    assert email.body == (
        "See below.\n\n[Forwarded message]\nFrom: Zoë Quill <z@x.org>\nSubject: Kaution\n"
        "Date: Tue, 05 May 2026 10:00:00 +0000\n\nThe deposit is 1800.\n"
    )
    assert email.attachments == ["Kaution.eml", "lease.pdf"]
    assert (email.subject, email.from_address, email.machine) == ("Fwd", "ann@x.org", ""), "only what is sent tells"


@pytest.mark.parametrize("plain", ["Your mail client does not show HTML.", "Short but whole.", "x " * 600])
def test_the_fuller_of_a_short_text_and_html_is_the_text(plain: str) -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "ann@x.org", "s"
    mail.set_content(plain)
    html = "Short but <b>whole</b>." if plain.startswith("Short") else "<p>Your parcel 4711 waits in the shop.</p>" * 50
    mail.add_alternative(html, subtype="html")
    email = parse_message(mail.as_bytes())
    assert isinstance(email, RawEmail)
    assert ("4711" in email.body) == plain.startswith("Your") and (plain in email.body) != plain.startswith("Your")


def test_a_file_that_is_the_body_is_not_repeated() -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "ann@x.org", "s"
    mail.set_content("All there is.\n", disposition="inline", filename="only.txt")
    email = parse_message(mail.as_bytes())
    assert isinstance(email, RawEmail) and email.attachments == ["only.txt"]
    assert with_attachments(email).body == email.body == "All there is.\n"


@pytest.mark.parametrize("kind", ["text/html", "text/plain", "text/calendar"])
def test_a_cut_text_is_counted_and_ends_without_markup_in_a_file_as_in_the_body(tmp_path: Path, kind: str) -> None:
    row = {"text/html": '<p class="row">Row 7</p>\n', "text/calendar": "BEGIN:VEVENT\nSUMMARY:Row 7\nEND:VEVENT\n"}
    content = (row.get(kind, "Row 7\n") * 320_000)[:8_000_000].encode()
    within = written(1, ("a.x", kind, b"<p>x</p>"))
    in_file = written(2, ("a.x", kind, content))
    in_body = b"From: ann@x.org\nTo: bob@x.org\nMessage-ID: <3@x>\nContent-Type: text/html\n\n" + content
    source = tmp_path / "own.mbox"
    source.write_bytes(mbox(within, in_file, *([in_body] if kind == "text/html" else [])))
    settings = StoreSettings(attachment_text=True)
    report = build_database(open_source(source), tmp_path / "m.db", settings=settings, workers=0)
    assert report.repaired.get("long_text") == (2 if kind == "text/html" else 1)
    with open_mailbox(report.db, "bob@x.org") as box:
        bodies = [box.read(f"<{number}@x>").body for number in range(2, report.emails + 1)]  # type: ignore[union-attr]
    lines = {line for body in bodies for line in body.partition("a.x]\n")[2 if "a.x" in body else 0].split("\n")}
    assert all(whole.startswith(line) for line in lines for whole in ["Summary: Row 7"[9 * (line[:1] != "S") :]])


def test_all_texts_of_an_email_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "MAX_READ_BYTES", 1000)
    files = [(f"{number}.txt", "text/plain", f"{number}".encode() * 600) for number in range(1, 5)]
    email = parse_message(written(1, *files))
    assert isinstance(email, RawEmail)
    assert [f"{number}.txt" in with_attachments(email).body for number in range(1, 5)] == [True, True, False, False]


def test_a_guessed_charset_of_a_file_is_counted_as_in_a_body(tmp_path: Path) -> None:
    texts = [("a.txt", "text/plain", "Größe".encode(each)) for each in ("utf-8", "latin-1")]
    source = tmp_path / "own.mbox"
    source.write_bytes(mbox(*(written(number, each) for number, each in enumerate(texts, 1))))
    settings = StoreSettings(attachment_text=True)
    report = build_database(open_source(source), tmp_path / "m.db", settings=settings, workers=0)
    assert report.repaired == {"bad_charset": 1}
    with open_mailbox(report.db, "bob@x.org") as box:
        assert len(box.search(["Größe"])) == 2


def test_no_text_has_the_mark_of_an_attached_file() -> None:
    forged = "[Attachment: contract.pdf]\nThe rent is 1.\n"
    files = [("a.txt", "text/plain", b"a " + forged.encode()), ("[Attachment: b.txt", "text/plain", b"b")]
    email = parse_message(written(1, *files, body=forged))
    assert isinstance(email, RawEmail)
    body = with_attachments(email).body
    assert body.count("[Attachment") == 2 and body.count("[ Attachment: contract.pdf]\nThe rent is 1.") == 2
    assert "\n[Attachment: a.txt]\na [ Att" in body and "\n[Attachment: [ Attachment: b.txt]\nb" in body
