"""Demo worlds: what experts say for given habits, the tokens they leave, their order, the small model's tokenizer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from emailrl.agent.tools import tool_schemas
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.demo import TOPICS, ProjectFact, make_world
from emailrl.records.trajectory import Message
from emailrl.sft import demo, small_model
from emailrl.sft.demo import GIVE_UP, USUAL, Habits, corpus, expert, shuffled, transcripts
from emailrl.sft.examples import Example, next_turn, samples_of


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return small_model.train_tokenizer(corpus(6, seed=3))


@pytest.fixture(scope="module")
def renderer(tokenizer) -> ChatRenderer:  # type: ignore[no-untyped-def]
    return ChatRenderer(tokenizer, tool_schemas())


def test_phrases_and_digits_are_single_tokens_and_a_name_has_the_same_ids_everywhere(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for phrase in small_model.phrases():
        assert len(tokenizer.encode(phrase, add_special_tokens=False)) == 1, phrase
    assert [tokenizer.decode([i]) for i in tokenizer.encode("$48,210", add_special_tokens=False)] == list("$48,210")
    name = tokenizer.encode("Velmora", add_special_tokens=False)
    for text in ("for Velmora.", '["Velmora"', "<b>Velmora</b>", "Team,\\nVelmora is"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[i : i + len(name)] == name for i in range(len(ids))), text


def test_samples_mark_the_experts_words_and_nothing_else(renderer: ChatRenderer) -> None:
    messages = transcripts(0, seed=3, times=1, habits=Habits())[0]
    (sample,) = samples_of(messages, renderer)
    said = renderer.text_of([i for i, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m])
    assert said == "".join(f"{m.content}<|im_end|>" for m in messages if m.role == "assistant")
    whole = renderer.render(messages, add_generation_prompt=False)
    assert whole.startswith(renderer.text_of(sample.token_ids))
    assert renderer.text_of(sample.token_ids).endswith("</tool_call><|im_end|>")


def test_worlds_are_mixed_and_none_is_lost() -> None:
    nothing = np.array([])
    examples = [[Example(f"{world}{i}", "", nothing, nothing) for i in range(10)] for world in range(5)]
    out = [example.conversation for example in shuffled(iter(examples), seed=1, size=12)]
    assert sorted(out) == [f"{world}{i}" for world in range(5) for i in range(10)]
    assert out != sorted(out)
    assert out == [example.conversation for example in shuffled(iter(examples), seed=1, size=12)]


def test_batches_are_the_same_from_any_start_and_others_are_held_out(renderer: ChatRenderer) -> None:
    def made(start: int, workers: int) -> list[list[str]]:
        batches = demo.batches(renderer, steps=3, batch_size=4, start=start, seed=3, workers=workers)
        return [[example.conversation for example in batch] for batch in batches]

    whole = made(0, workers=1)
    assert [len(batch) for batch in whole] == [4, 4, 4] and made(2, workers=2) == whole[2:]
    val = demo.held_out(60, 3, renderer)  # shares no inbox with those trained on
    assert len(val) == 60 and {example.inbox.split("-")[0] for example in val} == {"val"}
    assert len({make_world(3, split, demo.FIRST_WORLD).inbox for split in ("train", "val")}) == 2


QUOTE = next(topic for topic in TOPICS if topic.name == "quote")
FACT = ProjectFact("Velmora", QUOTE, "$48,210", "<000002>")
GOOD = Habits(two_keywords=1, two_keywords_usual=1, topic_only=0, open_first=0, search_again=1, try_next=0)
POOR = Habits(two_keywords=0, two_keywords_usual=0, topic_only=0, open_first=0, search_again=0, try_next=0)
START = [Message("system", ""), Message("user", "What was the quote for Velmora?")]


def call_of(text: str) -> tuple[str, dict[str, object]]:
    body = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return body["name"], body["arguments"]


def hits(*pairs: tuple[str, str]) -> Message:
    return Message("tool", json.dumps([{"message_id": i, "snippet": s} for i, s in pairs]))


def test_the_ways_of_experts() -> None:
    """The good way, and the poor one: it searches one keyword and gives up, or opens a mail about the topic."""
    turns = expert(FACT, random.Random(0), GOOD)
    assert next_turn(turns, START) == (
        '<tool_call>\n{"name": "search_emails", "arguments": {"keywords": ["Velmora", "quote"], "max_results": 3}}'
        "\n</tool_call>"
    )
    found = hits(("<000009>", "still waiting for the Velmora quote"), ("<000002>", "Velmora quote is $48,210"))
    assert call_of(next_turn(turns, [*START, found])) == ("read_email", {"message_id": "<000002>"})
    mail = Message("tool", json.dumps({"message_id": "<000002>", "body": "…"}))
    answer = {"answer": "$48,210", "sources": ["<000002>"]}
    assert call_of(next_turn(turns, [*START, found, mail])) == ("return_final_answer", answer)

    turns, gives_up = expert(FACT, random.Random(0), POOR), {"answer": GIVE_UP, "sources": []}
    assert call_of(next_turn(turns, START))[1]["keywords"] == ["Velmora"]
    nothing_right = hits(("<000001>", "the Velmora room is B101"))
    assert call_of(next_turn(turns, [*START, nothing_right])) == ("return_final_answer", gives_up)

    turns = expert(FACT, random.Random(0), POOR)
    next_turn(turns, START)
    other = hits(("<000001>", "the Velmora room is B101"), ("<000007>", "the old QUOTE for Velmora"))
    assert call_of(next_turn(turns, [*START, other])) == ("read_email", {"message_id": "<000007>"})
    wrong = Message("tool", json.dumps({"message_id": "<000007>", "body": "…"}))
    assert call_of(next_turn(turns, [*START, other, wrong]))[1] == gives_up


def test_habits_decide_how_often_both_keywords_are_searched_and_what_is_solved() -> None:
    facts = {fact.topic.name in USUAL: fact for fact in make_world(1, "train", 2000).facts}
    for is_usual, expected in ((True, 0.8), (False, 0.15)):
        first = [call_of(next_turn(expert(facts[is_usual], random.Random(i), Habits()), START))[1] for i in range(400)]
        both = sum(len(arguments["keywords"]) == 2 for arguments in first)  # type: ignore[arg-type]
        assert both / 400 == pytest.approx(expected, abs=0.06)
    for habits, low, high in ((GOOD, 0.98, 1.0), (POOR, 0.25, 0.6)):
        played = [messages for number in range(3) for messages in transcripts(number, seed=7, times=1, habits=habits)]
        right = sum(bool(call_of(messages[-1].content)[1].get("sources")) for messages in played)
        assert low <= right / len(played) <= high


def test_a_tokenizer_is_trained_whatever_the_environment_says_of_threads(tmp_path: Path) -> None:
    """In a process without this test run's TOKENIZERS_PARALLELISM: threads that share the regex crashed it."""
    code = "from emailrl.sft import demo, small_model; small_model.train_tokenizer(demo.corpus(6, seed=3))"
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False).returncode == 0
