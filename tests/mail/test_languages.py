"""Words of many languages are found as their readers look for them: inflected, in compounds, and without spaces."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from mail.mails import found, rows

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.languages import english_forms
from emailrl.mail.sources import RawEmail

MAILS = {
    "english": ("Pier survey", "Hello, the survey of the pier is done and you will have the report on Monday."),
    "words": ("The ferries", "Even the keys moved, and you are asked to stop by at the ferries we planned."),
    "short": ("Keys", "Schlüssel bei Nora, Zahlungen per PayPal. Sent from my phone, the best you can have."),
    "polish": (
        "Faktury",
        "Cześć, faktury zapłacone. Klucze do mieszkania oddam w piątek, po spotkaniu z lekarzem i odbiorze zegarka.",
    ),
    "german": (
        "Terminvorschlag",
        "Hallo, die Stromrechnungen für März sind da und der Mietvertrag ist nicht verlängert.",
    ),
    "french": ("Réunions", "Bonjour, les factures sont payées et nous avons une réunion avec les voisins."),
    "plurals": ("Garage", "Les pneus et le tuyau sont changés, le menu et les jeux aussi."),
    "dutch": ("Verjaardagsfeestje", "Fieke wordt zeven, één cadeautje is genoeg."),
    "spanish": ("Los pagos", "Hola, los pagos de las casas están hechos y una reunión con el vecino está lista."),
    "russian": ("Документы", "Добрый день, счета оплачены, а встречи с юристом перенесены на среду."),
    "vietnamese": ("Hóa đơn", "Chào chị, hợp đồng thuê căn hộ ở Vie\u0302\u0323t Nam và tiền điện tháng tám."),
    "greek": ("Τιμολόγιο", "Καλημέρα, τα τιμολόγια πληρώθηκαν και μίλησα με τον δικηγόρο."),
    "hebrew": ("חשבונית", "שלום, החשבונית שולמה והפגישה נדחתה ליום רביעי."),
    "arabic": ("فاتورة", "مرحبا، الفاتورة مدفوعة وموعدنا يوم الأربعاء."),
    "thai": ("ค่าไฟ", "สวัสดีค่ะ การประชุม กับทนายความเลื่อนไปวันพุธ"),
    "japanese": ("会議の件", "明日の午後、会議室で契約書の確認をします。ﾊﾟｽﾎﾟｰﾄをQ3会議に持参してください。"),
}
# Keyword, the mail that its reader expects, and whether the words alone (``names=False``) find it.
SEARCHES = [
    ("survey", "english", True),
    ("surveys", "english", False),
    ("reporting", "english", False),
    ("key", "words", False),
    ("ferry", "words", False),
    ("stopped", "words", False),
    ("moving", "words", False),
    ("ferry we plan", "words", False),
    ("Zahlung", "short", False),
    ("faktura", "polish", False),
    ("fakturę", "polish", False),
    ("klucz", "polish", False),
    ("mieszkanie", "polish", False),
    ("zaplacone", "polish", False),
    ("spotkanie", "polish", False),
    ("lekarz", "polish", False),
    ("zegarek", "polish", False),
    ("Termin", "german", False),
    ("Vorschlag", "german", False),
    ("Rechnung", "german", False),
    ("Stromrechnung", "german", False),
    ("Vertrag", "german", False),
    ("Miete", "german", False),
    ("verlaengert", "german", False),
    ("verlängert", "german", True),
    ("facture", "french", False),
    ("payer", "french", False),
    ("reunions", "french", True),
    ("pneu", "plurals", False),
    ("tuyaux", "plurals", False),
    ("menus", "plurals", False),
    ("jeu", "plurals", False),
    ("verjaardag", "dutch", False),
    ("pago", "spanish", False),
    ("reuniones", "spanish", False),
    ("casa", "spanish", False),
    ("счет", "russian", False),
    ("встреча", "russian", False),
    ("документ", "russian", False),
    ("hợp", "vietnamese", True),
    ("hop", "vietnamese", True),
    ("Việt Nam", "vietnamese", True),
    ("viet", "vietnamese", True),
    ("dong", "vietnamese", False),
    ("đồng", "vietnamese", True),
    ("ΤΙΜΟΛΌΓΙΟ", "greek", True),
    ("חשבונית", "hebrew", True),
    ("فاتورة", "arabic", True),
    ("การประชุม", "thai", True),
    ("午後", "japanese", False),
    ("会議室", "japanese", False),
    ("契約", "japanese", False),
    ("書", "japanese", False),
    ("パスポート", "japanese", False),
    ("Q3会議", "japanese", False),
    ("明日 契約書", "japanese", False),
]
ABSENT = ["evening", "plane", "Kartoffel", "voiture", "coche", "собака", "午前", "議会", "確認会議", "Rechnungshof"]
UNKNOWN = ["τιμολογιο", "δικηγόρος", "פגישה", "ทนายความ"]
"""What docs/guides/data.md says is not found: other accents and inflections, prefixes, words without spaces."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One mail of each language among sixty of other words, all of a seeded order."""
    rng, words = random.Random(3), ["harbor", "lantern", "orchid", "copper", "willow", "mason"]
    others = [(f"<{n}@x>", f"Note {n}", f"The {rng.choice(words)} and the {rng.choice(words)}.") for n in range(60)]
    all_mails = [*others, *((f"<{name}@x>", *mail) for name, mail in MAILS.items())]
    rng.shuffle(all_mails)
    made = [RawEmail(i, subject, "ann@x.org", ["bob@x.org"], [], [], None, body, i) for i, subject, body in all_mails]
    return build_database(made, tmp_path_factory.mktemp("db") / "m.db").db


@pytest.mark.parametrize(("keyword", "language", "by_words"), SEARCHES, ids=[each[0] for each in SEARCHES])
def test_a_reader_finds_the_mail(db: Path, keyword: str, language: str, by_words: bool) -> None:
    wanted = f"<{language}@x>"
    assert wanted in found(db, "bob@x.org", keyword)
    plain = [hit.message_id for hit in open_mailbox(db, "bob@x.org", names=False).search([keyword])]
    assert (wanted in plain) == by_words


def test_other_words_are_not_found_and_nothing_private_is_shown(db: Path) -> None:
    for keyword in (*ABSENT, *UNKNOWN):
        assert found(db, "bob@x.org", keyword) == [], keyword
    with open_mailbox(db, "bob@x.org") as box:
        shown = {keyword: box.search([keyword])[0].snippet for keyword, _, _ in SEARCHES}
    assert not any("\ue000" in snippet for snippet in shown.values())
    assert "<b>Stromrechnungen</b>" in shown["Rechnung"] and "<b>счета</b>" in shown["счет"]
    assert "<b>会議室で契約書の確認をします</b>" in shown["契約"]


def test_english_mail_gets_nothing_and_a_word_its_inflections_alone(db: Path) -> None:
    assert {key for (key,) in rows(db, "SELECT message_id FROM emails WHERE extra <> ''")} == {
        f"<{name}@x>" for name in MAILS if name not in ("english", "words")
    }
    assert english_forms("ferries")[0] == "ferry" and english_forms("key")[0] == "keys"
    assert {"planned", "planning"} <= {*english_forms("plan")} and "planed" not in english_forms("plan")
    assert "go" in english_forms("went") and "went" in english_forms("go")
    assert "even" not in english_forms("evening") and "new" not in english_forms("news")


def test_an_append_adds_the_words_of_its_mails(db: Path, tmp_path: Path, email: Callable[..., RawEmail]) -> None:
    grown = tmp_path / "m.db"
    grown.write_bytes(db.read_bytes())
    build_database([email(900, body="Hallo, die Gutschriften sind da.")], grown, append=True)
    assert found(grown, "bob@x.org", "Gutschrift") == ["<900@x>"]
    assert "<german@x>" in found(grown, "bob@x.org", "Rechnung")
