"""Each pass over the questions brings other expert conversations, the same ones after a resume."""

from __future__ import annotations

import itertools
from pathlib import Path

from tiny import make_model

from emailrl.agent.tools import tool_schemas
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails
from emailrl.model.load import load_policy
from emailrl.questions import write_scenarios
from emailrl.questions.template import generate
from emailrl.settings import load_settings
from emailrl.sft.data import examples, gather
from emailrl.sft.examples import Example


def test_a_pass_plays_the_same_questions_anew_and_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    build_database(demo_emails(42), tmp_path / "mail.db")
    write_scenarios(tmp_path / "q.jsonl", generate(tmp_path / "mail.db", limit=60))
    given = {
        "model_name": str(make_model(tmp_path / "model")), "db": tmp_path / "mail.db", "max_source_mails": 9,
        "questions": tmp_path / "q.jsonl", "train_dataset_size": 12, "sft_batch_size": 4, "sft_steps": 8,
    }  # fmt: skip
    settings = load_settings(given, environ={}, cwd=tmp_path)
    renderer = ChatRenderer(load_policy(settings).tokenizer, tool_schemas())
    found = gather(settings)
    count = len(found.train)
    assert 8 <= count <= 12
    assert found.notes[0].startswith(f"experts answered {count + len(found.val)} of ")
    data = examples(found, settings, renderer, longest=100_000, workers=None)

    def played(start: int) -> list[Example]:
        return [one for batch in itertools.islice(data.batches(start), 8 - start) for one in batch]

    whole = played(0)
    passes = [{one.conversation: one.token_ids.tobytes() for one in whole[at : at + count]} for at in (0, count)]
    assert passes[0].keys() == passes[1].keys() == {one.id for one in found.train}
    assert sum(passes[0][name] != passes[1][name] for name in passes[0]) > count // 2
    again = [(one.conversation, one.token_ids.tobytes()) for one in played(5)]
    assert again == [(one.conversation, one.token_ids.tobytes()) for one in whole[5 * 4 :]]
