"""Whose mailboxes are asked about: people who write, not the lists and machines that are addressed like people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from hang import must_end

from emailrl.base.errors import UsageError
from emailrl.mail.build import build_database
from emailrl.mail.database import opened
from emailrl.mail.sources import RawEmail
from emailrl.questions.inbox import MailReader, choose_inboxes, find_inbox, largest_owners
from emailrl.settings import StoreSettings

ME, ANN, TIM = "me@home.org", "ann@work.org", "tim@club.org"
FRIENDS = [f"friend{n}@x{n}.org" for n in range(9)]
Mails = Iterable[tuple[str, list[str], str]]  # Sender, recipients, subject.


def store(db: Path, *parts: Mails, folder: str = "Inbox#") -> Path:
    numbers = count(1)
    emails = []
    for part in parts:
        for sender, to, subject in part:
            number = next(numbers)
            date = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(hours=number)
            body, name = f"Body {number}.", f"{folder}{number}."
            emails.append(RawEmail(f"<{number}@x>", subject, sender, to, [], [], date, body, name))
    return build_database(emails, db, settings=StoreSettings(max_recipients=0)).db


def received(number: int) -> Mails:
    return [(FRIENDS[n % 9], [ME], f"Matter {n}") for n in range(number)]


def sent(number: int) -> Mails:
    return [(ME, [FRIENDS[n % 9]], f"Wish {n}") for n in range(number)]


def discussed(address: str) -> Mails:
    """Forty threads on a list: who answers was not addressed, and answers the list."""
    for n in range(40):
        yield FRIENDS[n % 9], [address], f"Question {n}"
        yield FRIENDS[(n + 1) % 9], [address], f"Re: Question {n}"


def rewritten(address: str) -> Mails:
    """A list that puts its own address in the sender's place."""
    return [(address, [address], f"Topic {n}") for n in range(90)]


def tagged(address: str) -> Mails:
    return [(FRIENDS[n % 9], [address], f"[sails] Notice {n}") for n in range(90)]


def plain(address: str) -> Mails:
    """Nothing but an address that many write to."""
    return [(FRIENDS[n % 9], [address], f"Memo {n}") for n in range(90)]


def announced(address: str) -> Mails:
    return [("editor@press.org", [address], f"Issue {n}") for n in range(90)]


def chosen(db: Path) -> list[str]:
    with opened(db) as connection:
        return choose_inboxes(MailReader(connection), [])


@pytest.mark.parametrize("posts", [discussed, rewritten, tagged, plain, announced])
def test_an_owner_is_told_from_a_list_whether_he_writes_or_not(tmp_path: Path, posts: Callable[[str], Mails]) -> None:
    assert chosen(store(tmp_path / "m.db", received(30), sent(20), posts("crew@club.org"))) == [ME]
    if posts is not plain:
        silent = store(tmp_path / "silent.db", received(40), posts("crew@club.org"))
        with opened(silent) as connection:
            assert largest_owners(MailReader(connection))[0].address == ME
        if posts not in (rewritten, announced):
            assert chosen(silent) == [ME]


@pytest.mark.parametrize("name", ["crew-announce@club.org", "crew@lists.club.org", "crew@googlegroups.com"])
def test_a_name_may_tell_a_list(tmp_path: Path, name: str) -> None:
    assert chosen(store(tmp_path / "m.db", received(40), plain(name))) == [ME]


def test_an_owner_who_hears_from_one_person_alone_or_in_threads_that_name_all(tmp_path: Path) -> None:
    one = [(ANN, [ME], f"Matter {n}") for n in range(40)]
    assert chosen(store(tmp_path / "one.db", one)) == [ME]

    def open_threads() -> Mails:
        for n in range(40):
            yield ANN, [ME, TIM], f"Matter {n}"
            yield TIM, [ANN, ME], f"Re: Matter {n}"

    def my_threads() -> Mails:  # what I wrote is not there: each answers me, and no other mail had named him
        for n in range(40):
            yield ANN, [ME], f"Re: Wish {n}"
            yield TIM, [ME], f"Re: Wish {n}"

    for name, mails, expected in (("open", open_threads(), [ME, ANN, TIM]), ("mine", my_threads(), [ME])):
        with opened(store(tmp_path / f"{name}.db", mails, received(5))) as connection:
            assert [owner.address for owner in largest_owners(MailReader(connection))] == expected


def test_who_has_a_folder_of_cmus_tree_is_an_owner_though_he_never_writes(tmp_path: Path) -> None:
    jane = "jane.doe@enron.com"
    mails = [(FRIENDS[n % 9], [jane, "all.staff@enron.com"], f"Matter {n}") for n in range(40)]
    writes = [(ME, [FRIENDS[n % 9]], f"Wish {n}") for n in range(20)]
    db = store(tmp_path / "m.db", mails, received(20), writes, folder="maildir/doe-j/inbox/")
    assert chosen(db) == [jane, ME]


def test_an_email_to_thousands_takes_no_huge_time(tmp_path: Path) -> None:
    crowd = [f"p{number}@x.org" for number in range(5000)]
    db = store(tmp_path / "m.db", [(ANN, crowd, "Everyone")] * 3)
    with must_end(), opened(db) as connection:
        assert [owner.mails for owner in largest_owners(MailReader(connection))] == [3, 3, 3]


def test_owners_come_by_size_with_what_they_hold(tmp_path: Path) -> None:
    between = [mail for n in range(20) for mail in ((ANN, [ME], f"To me {n}"), (ME, [ANN], f"To Ann {n}"))]
    to_myself = [(ME, [ME], "Remember")]
    db = store(tmp_path / "m.db", received(30), sent(5), between, to_myself)
    with opened(db) as connection:
        reader = MailReader(connection)
        assert largest_owners(reader) == [(ME, 25, 76), (ANN, 20, 40)]
        assert choose_inboxes(reader, ["Friend1@x1.org "]) == ["friend1@x1.org"]  # named, and owner of nothing


def test_the_only_mailbox_is_that_of_who_has_nine_tenths_of_all_emails(tmp_path: Path) -> None:
    mine = [(ANN, [ME], f"Matter {n}") for n in range(5)] + [(ME, [TIM], f"Matter {n}") for n in range(4)]
    others = [(ANN, [TIM], "Elsewhere")]
    db = store(tmp_path / "mine.db", mine, others)  # nine of ten are mine
    assert find_inbox(db, None) == ME and find_inbox(db, " Tim@Club.org") == TIM
    less = store(tmp_path / "less.db", mine[1:], others, [(TIM, [ANN], "Re: Elsewhere")])  # eight of ten
    with pytest.raises(UsageError, match="holds several mailboxes") as caught:
        find_inbox(less, None)
    assert caught.value.hint == (f"Choose one with --inbox: {ME} (8 emails), {ANN} (6 emails), {TIM} (6 emails)")
    letters = [("zoe@x.org", [TIM], "Hi"), (TIM, ["zoe@x.org"], "Re: Hi")]
    four = store(tmp_path / "four.db", mine, [(TIM, [ANN], f"To Ann {n}") for n in range(9)], letters)
    with pytest.raises(UsageError) as caught:
        find_inbox(four, None)
    assert caught.value.hint.count("@") == 3 and caught.value.hint.endswith(", …")
    alone = store(tmp_path / "alone.db", mine[1:], [(ANN, [TIM], "Elsewhere")] * 9)  # nobody else owns one
    assert find_inbox(alone, None) == ME
    letters = store(tmp_path / "two.db", [(ANN, [ME], "Hello"), (ME, [ANN], "Re: Hello")])  # of either
    with pytest.raises(UsageError, match="holds several mailboxes"):
        find_inbox(letters, None)
    with pytest.raises(UsageError, match="cannot be told"):
        find_inbox(store(tmp_path / "none.db", plain("crew-announce@club.org")), None)
