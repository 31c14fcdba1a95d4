"""Words of six languages are found as their readers look for them: inflected, in compounds, and without spaces."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from mail.mails import found, rows

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.languages import language_of
from emailrl.mail.sources import RawEmail

MAILS = {
    "english": ("Pier survey", "Hello, the survey of the pier is done and you will have the report on Monday."),
    "german": (
        "Terminvorschlag",
        "Hallo, die Stromrechnungen für März sind da und der Mietvertrag ist nicht verlängert.",
    ),
    "french": ("Réunions", "Bonjour, les factures sont payées et nous avons une réunion avec les voisins."),
    "spanish": ("Los pagos", "Hola, los pagos de las casas están hechos y una reunión con el vecino está lista."),
    "russian": ("Документы", "Добрый день, счета оплачены, а встречи с юристом перенесены на среду."),
    "japanese": ("会議の件", "明日の午後、会議室で契約書の確認をします。ﾊﾟｽﾎﾟｰﾄをQ3会議に持参してください。"),
}
# Keyword, the mail that its reader expects, and whether the words alone (``names=False``) find it.
SEARCHES = [
    ("survey", "english", True),
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
    ("pago", "spanish", False),
    ("reuniones", "spanish", False),
    ("casa", "spanish", False),
    ("счет", "russian", False),
    ("встреча", "russian", False),
    ("документ", "russian", False),
    ("午後", "japanese", False),
    ("会議室", "japanese", False),
    ("契約", "japanese", False),
    ("書", "japanese", False),
    ("パスポート", "japanese", False),
    ("Q3会議", "japanese", False),
    ("明日 契約書", "japanese", False),
]
ABSENT = ["Kartoffel", "voiture", "coche", "собака", "午前", "議会", "確認会議", "Rechnungshof"]


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
    for keyword in ABSENT:
        assert found(db, "bob@x.org", keyword) == [], keyword
    with open_mailbox(db, "bob@x.org") as box:
        shown = {keyword: box.search([keyword])[0].snippet for keyword, _, _ in SEARCHES}
    assert not any("\ue000" in snippet for snippet in shown.values())
    assert "<b>Stromrechnungen</b>" in shown["Rechnung"] and "<b>счета</b>" in shown["счет"]
    assert "<b>会議室で契約書の確認をします</b>" in shown["契約"]


def test_languages_are_told_apart_and_english_mail_gets_nothing(db: Path, email: Callable[..., RawEmail]) -> None:
    assert {name: language_of(*mail) for name, mail in MAILS.items()} == {
        name: "" if name in ("english", "japanese") else name for name in MAILS
    }
    assert rows(db, "SELECT count(*) FROM emails WHERE extra <> ''") == [(5,)]
