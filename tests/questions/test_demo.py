"""Whether a mailbox is the demo's."""

from __future__ import annotations

from pathlib import Path

from emailrl.questions.beside import has_only_demo_email, write_demo
from emailrl.settings import StoreSettings
from emailrl.store.build import build_database
from emailrl.store.demo import demo_emails


def test_the_demo_is_known_by_its_message_ids_not_by_its_domain(tmp_path: Path) -> None:
    demo = write_demo(tmp_path / "demo.db", settings=StoreSettings(), seed=3).db
    assert has_only_demo_email(demo)

    own = list(demo_emails(3))
    own[-1].message_id = "<a1@mail.example>"
    assert not has_only_demo_email(build_database(iter(own), tmp_path / "own.db").db)
