"""Experts read questions, search by what they say, read on, and use nothing that was not shown."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from sft.shown import unshown
from tiny import make_database, make_questions

from emailrl.engines.renderer import parse_tool_calls
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails, demo_questions
from emailrl.mail.sources.message import RawEmail
from emailrl.questions.load import read_questions, write_scenarios
from emailrl.questions.template import HARD_KINDS, KINDS, generate
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL, possessive
from emailrl.records.trajectory import Message, Scenario
from emailrl.settings import Settings, load_settings
from emailrl.sft.asked import answer_of, read_question
from emailrl.sft.searching import CAREFUL, Habits, conversations, is_right, play

SLOTS = {"person": "Chris Williams", "topic": "Re-hedging: who, when?", "date": "May 3, 2001", "month": "May 2001"}


@pytest.mark.parametrize("kind", [*KINDS, *(k for k in HARD_KINDS if k.answerable)], ids=lambda kind: kind.name)
def test_every_wording_of_every_kind_is_read_back(kind) -> None:  # type: ignore[no-untyped-def]
    for wording in kind.wordings:
        for form in (*THEIR_MAIL, *MY_MAIL) if "{mail}" in wording else ("",):
            mail = form.format(persons=possessive(SLOTS["person"]), **SLOTS)
            asked = read_question(wording.format(mail=mail, **SLOTS))
            assert asked is not None and asked.kind == kind.name and asked.fact is kind.fact
            text = wording.replace("{mail}", form)
            assert asked.person == ("Chris Williams" if "{person" in text else None)
            assert asked.topic == (SLOTS["topic"] if "{topic}" in text else None)
            assert asked.day == (date(2001, 5, 3) if "{date}" in text else None)
            assert asked.month == (date(2001, 5, 1) if "{month}" in text else None)
            if form:
                assert asked.is_mine == (form in MY_MAIL)


def test_a_weekday_before_the_date_is_passed_over() -> None:
    asked = read_question("Who wrote to me on Thursday, May 3, 2001?")
    assert asked is not None and (asked.kind, asked.day) == ("only_sender_of_day", date(2001, 5, 3))


def test_other_words_are_no_template_question() -> None:
    assert read_question("When does the lease end?") is None


OWNER, ROSS, EVE = "ann.lee@example.com", "bob.ross@example.com", "eve@other.example"


def shown(subject: str = "Lease of the barn", sender: str = ROSS, **fields: Any) -> dict[str, Any]:
    people = {"to_addresses": [OWNER], "cc_addresses": [], "bcc_addresses": []}
    first = {"message_id": "<1@x>", "date": "2001-05-03 09:00:00", "subject": subject, "from_address": sender}
    return first | people | {"body": "The rent is $450 a month.", "file_name": ""} | fields


def answer_in(question: str, read: dict[str, Any]) -> str | None:
    asked = read_question(question)
    assert asked is not None
    return answer_of(asked, read, OWNER)


@pytest.mark.parametrize(
    ("question", "read", "expected"),
    [
        ('Who wrote to me about "Lease of the barn"?', shown(), "Bob Ross"),
        ('Who wrote to me about "Lease of the barn"?', shown("RE: Lease of the barn", EVE), EVE),
        ('Who wrote to me about "Lease of the barn"?', shown("Lease of the barn and the yard"), None),
        ('Who wrote to me about "Lease of the barn"?', shown(sender=OWNER), None),
        ('When did Bob Ross write to me about "Lease of the barn"?', shown(), "May 3, 2001"),
        ('When did Bob Ross write to me about "Lease of the barn"?', shown(sender="al.ross@example.com"), None),
        ('When did I send the mail about "Lease of the barn"?', shown(sender=OWNER), "May 3, 2001"),
        ("What did Bob Ross write to me about on May 3, 2001?", shown("Fw: Lease"), "Lease"),
        ("What did Bob Ross write to me about on May 2, 2001?", shown(), None),
        ("Who sent me a mail on Thursday, May 3, 2001?", shown(sender=EVE), EVE),
        ('Who did I send the mail "Lease of the barn" to?', shown(sender=OWNER, to_addresses=[ROSS]), "Bob Ross"),
        ('Who was copied on my mail about "Lease of the barn"?', shown(sender=OWNER, cc_addresses=[EVE]), EVE),
        ('Who was copied on my mail about "Lease of the barn"?', shown(sender=OWNER), None),
        (
            'Who else received Bob Ross\' mail about "Lease of the barn"?',
            shown(to_addresses=[OWNER, EVE], bcc_addresses=[EVE]),
            EVE,
        ),
        ('Who replied to my mail about "Lease of the barn"?', shown("Re: Lease of the barn"), "Bob Ross"),
        ('Who replied to my mail about "Lease of the barn"?', shown(), None),
        ('Who started the thread "Lease of the barn"?', shown(), "Bob Ross"),
        ('Who started the thread "Lease of the barn"?', shown("Re: Lease of the barn"), None),
        ('Who started the thread "Lease of the barn"?', shown(body="> The rent?\nYes."), None),
        ("What was the first message from Bob Ross after May 2, 2001 about?", shown(), "Lease of the barn"),
        ("What was the first message from Bob Ross after May 3, 2001 about?", shown(), None),
        ("Before May 4, 2001, what was the subject of the latest mail from Bob Ross?", shown(), "Lease of the barn"),
        ("Before May 3, 2001, what was the subject of the latest mail from Bob Ross?", shown(), None),
        ('What dollar amount is mentioned in the mail "Lease of the barn" from Bob Ross?', shown(), "$450 a month"),
        ('What phone number is given in the mail "Lease of the barn" from Bob Ross?', shown(), None),
        ("What did Bob Ross write to me about on May 3, 2001?", shown(date=None), None),
    ],
)  # fmt: skip
def test_what_a_mail_answers(question: str, read: dict[str, Any], expected: str | None) -> None:
    assert answer_in(question, read) == expected


ME = "ann.lee@home.example"
BOB, ZOE = "bob.ross@home.example", "zoe.kim@else.example"


def mail(name: str, day: int, sender: str, subject: str, body: str = "See you.") -> RawEmail:
    to = [ME] if sender != ME else [BOB]
    return RawEmail(f"<{name}@x>", subject, sender, to, [], [], datetime(2001, 5, day, 9, tzinfo=UTC), body)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Four mails from Bob, two from Zoe at another host, one of the owner's."""
    mails = [mail(f"b{day}", day, BOB, f"Barn report {day}") for day in (3, 7, 11, 20)]
    mails += [mail("z5", 5, ZOE, "Harvest plan"), mail("z9", 9, ZOE, "Harvest plan, late", "Regards, Zoe Kim")]
    build_database([*mails, mail("m8", 8, ME, "Barn report 7 copied")], tmp_path / "mail.db")
    return load_settings({"db": tmp_path / "mail.db"}, environ={}, cwd=tmp_path)


def ask(question: str, settings: Settings, *, answer: str = "?", source: str = "<?>") -> list[tuple[str, Any]]:
    """What a careful searcher calls, with which arguments."""
    scenario = Scenario("q", question, answer, [source], ME, "2001-06-01", kind="any")
    _, messages = play(scenario, settings, CAREFUL, random.Random(0))
    assert unshown(messages) == []
    return calls(messages)


def calls(messages: list[Message]) -> list[tuple[str, Any]]:
    said = [parse_tool_calls(message.content)[0] for message in messages if message.role == "assistant"]
    return [(call.name, call.arguments) for call in said]


def answered(text: str, *sources: str) -> tuple[str, Any]:
    return "return_final_answer", {"answer": text, "sources": list(sources)}


def test_by_sender_and_day_without_a_keyword(settings: Settings) -> None:
    assert ask("What did Bob Ross write to me about on May 7, 2001?", settings) == [
        ("search_emails", {"keywords": [], "from_addr": BOB, "sent_after": "2001-05-07", "sent_before": "2001-05-08"}),
        ("read_email", {"message_id": "<b7@x>"}),
        answered("Barn report 7", "<b7@x>"),
    ]


def test_an_address_that_cannot_be_guessed_is_looked_up_by_the_name(settings: Settings) -> None:
    window = {"keywords": [], "sent_before": "2001-05-09"}
    assert ask("Before May 9, 2001, what was the subject of the latest mail from Zoe Kim?", settings) == [
        ("search_emails", {**window, "from_addr": "zoe.kim@home.example"}),
        ("search_emails", {"keywords": ["Zoe Kim"]}),
        ("read_email", {"message_id": "<z9@x>"}),
        ("search_emails", {**window, "from_addr": ZOE}),
        ("read_email", {"message_id": "<z5@x>"}),
        answered("Harvest plan", "<z5@x>"),
    ]


def test_the_first_after_a_day_is_the_oldest_hit(settings: Settings) -> None:
    called = ask("What was the first message from Bob Ross after May 7, 2001 about?", settings)
    assert called[0][1] | {"max_results": 10} == called[0][1] and called[0][1]["sent_after"] == "2001-05-08"
    assert called[1:] == [("read_email", {"message_id": "<b11@x>"}), answered("Barn report 11", "<b11@x>")]


def test_hits_are_counted_and_all_cited(settings: Settings) -> None:
    [(_, search), answer] = ask("How many mails did Bob Ross send me in May 2001?", settings)
    assert (search["sent_after"], search["sent_before"]) == ("2001-05-01", "2001-06-01")
    assert answer == answered("4", "<b20@x>", "<b11@x>", "<b7@x>", "<b3@x>")


def test_it_reads_on_past_a_mail_that_does_not_fit(settings: Settings) -> None:
    called = ask('Who sent me the mail with the subject "Harvest plan"?', settings)
    assert [call for call in called if call[0] == "read_email"][-1][1] == {"message_id": "<z5@x>"}
    assert called[-1] == answered("Zoe Kim", "<z5@x>")


@pytest.mark.parametrize(
    "question", ["What did Bob Ross write to me about on May 8, 2001?", 'Who wrote to me about "Sale of the yard"?']
)
def test_where_nothing_fits_it_does_not_know(question: str, settings: Settings) -> None:
    assert ask(question, settings)[-1] == answered("I don't know")


def test_turns_that_run_out_end_in_not_knowing(settings: Settings) -> None:
    short = settings.model_copy(update={"agent": settings.agent.model_copy(update={"max_turns": 2})})
    called = ask("What did Bob Ross write to me about on May 7, 2001?", short)
    assert [name for name, _ in called] == ["search_emails", "return_final_answer"]
    assert called[-1] == answered("I don't know")


def test_where_a_search_needs_a_keyword_it_has_one(settings: Settings) -> None:
    agent = settings.agent.model_copy(update={"search_without_keywords": False})
    called = ask("How many mails did Bob Ross send me in May 2001?", settings.model_copy(update={"agent": agent}))
    assert called[0][1]["keywords"] == ["the"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Template questions on the demo mail, of twenty kinds."""
    folder = tmp_path_factory.mktemp("demo")
    build_database(demo_emails(42), folder / "mail.db")
    write_scenarios(folder / "q.jsonl", generate(folder / "mail.db", limit=700))
    given = {"db": folder / "mail.db", "questions": folder / "q.jsonl", "max_source_mails": 9}
    return load_settings(given, environ={}, cwd=folder)


@pytest.fixture(scope="module")
def played(demo: Settings) -> list[tuple[Scenario, list[Message]]]:
    return list(conversations(demo, seed=1))


def test_nothing_is_used_that_was_not_shown(played: list[tuple[Scenario, list[Message]]]) -> None:
    assert len({scenario.kind for scenario, _ in played}) >= 18
    assert [found for _, messages in played for found in unshown(messages)] == []


def test_what_the_question_file_hides_changes_nothing(
    demo: Settings, played: list[tuple[Scenario, list[Message]]]
) -> None:
    for scenario, messages in played:
        hidden = replace(scenario, answer="42", message_ids=["<other@x>"], kind=None, how_realistic=0.5, split=None)
        assert play(hidden, demo, Habits(), random.Random(f"1/0/{scenario.id}"))[1] == messages


def test_the_check_sees_what_was_not_shown(played: list[tuple[Scenario, list[Message]]]) -> None:
    scenario, messages = next((s, m) for s, m in played if s.kind == "subject")
    cheats: list[tuple[str, dict[str, Any]]] = [
        ("read_email", {"message_id": scenario.message_ids[0]}),
        ("search_emails", {"keywords": ["xylophone"]}),
        ("search_emails", {"keywords": [], "from_addr": "first.last@nowhere.example"}),
        ("search_emails", {"keywords": [], "sent_after": "1987-05-06"}),
        ("return_final_answer", {"answer": "xylophone", "sources": []}),
        ("return_final_answer", {"answer": "I don't know", "sources": ["<other@x>"]}),
    ]
    for name, arguments in cheats:
        call = json.dumps({"name": name, "arguments": arguments})
        assert len(unshown([*messages[:2], Message("assistant", f"<tool_call>\n{call}\n</tool_call>")])) == 1


def test_most_are_answered_in_several_ways_and_turns(
    demo: Settings, played: list[tuple[Scenario, list[Message]]]
) -> None:
    asked = read_questions(None, demo.data).of("train", limit=None, seed=1).scenarios
    assert len(played) >= 0.97 * len(asked)
    turns = Counter(sum(message.role == "assistant" for message in messages) for _, messages in played)
    assert len(turns) >= 4 and sum(count for number, count in turns.items() if number > 3) > 0.15 * len(played)
    scenario = next(s for s, _ in played if s.kind == "sender")
    ways = {
        tuple(str(call) for call in calls(play(scenario, demo, Habits(), random.Random(seed))[1])) for seed in range(40)
    }
    assert len(ways) >= 15


def test_questions_in_other_words_than_the_email_are_mostly_answered(demo: Settings, tmp_path: Path) -> None:
    questions = write_scenarios(tmp_path / "q.jsonl", demo_questions(42))
    data = demo.data.model_copy(update={"questions": questions, "train_dataset_size": 100})
    rephrased = demo.model_copy(update={"data": data})
    assert len(list(conversations(rephrased, seed=1))) >= 70
    scenario = next(s for s in demo_questions(42) if s.question.startswith("How much money did they ask for "))
    project = scenario.question.removesuffix("?").split()[-1]
    searches = [call["keywords"] for name, call in calls(play(scenario, demo, CAREFUL, random.Random(0))[1])
                if name == "search_emails"]  # fmt: skip
    assert searches[-1] == [project] and not {"did", "they", "ask"} & {word for words in searches for word in words}


def test_the_same_seed_says_the_same(demo: Settings, played: list[tuple[Scenario, list[Message]]]) -> None:
    assert list(conversations(demo, seed=1)) == played
    assert [m for _, m in conversations(demo, seed=2)] != [m for _, m in played]


def test_wrong_answers_are_left_out(settings: Settings, tmp_path: Path) -> None:
    question = "What did Bob Ross write to me about on May 7, 2001?"
    right = Scenario("1", question, "Barn report 7", ["<b7@x>"], ME, "2001-06-01", split="train", kind="subject")
    rows = [right, replace(right, id="2", answer="Roof"), replace(right, id="3", split="val", inbox_address=BOB)]
    write_scenarios(tmp_path / "q.jsonl", rows)
    data = settings.data.model_copy(update={"questions": tmp_path / "q.jsonl"})
    kept = list(conversations(settings.model_copy(update={"data": data}), seed=1))
    assert [scenario.id for scenario, _ in kept] == ["1"]


def test_a_question_in_free_words_gets_its_reference_answer_once_the_source_was_read(tmp_path: Path) -> None:
    make_database(tmp_path / "mail.db")
    settings = load_settings({"db": tmp_path / "mail.db"}, environ={}, cwd=tmp_path)
    [whole] = make_questions(1)
    environment, messages = play(replace(whole, kind=None), settings, CAREFUL, random.Random(0))
    assert is_right(environment) and unshown(messages) == []
    assert calls(messages)[-1] == answered(whole.answer, whole.message_ids[0])
    taught = settings.model_copy(update={"data": settings.data.model_copy(update={"output_field": "any"})})
    told = replace(whole, answer="It ends on 31 May 2002, I think.")
    assert calls(play(told, taught, Habits(), random.Random(0))[1])[-1][1]["answer"] == told.answer
    elsewhere = replace(whole, message_ids=["<gone@x>"])
    assert calls(play(elsewhere, settings, CAREFUL, random.Random(0))[1])[-1] == answered("I don't know")
