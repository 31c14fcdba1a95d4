"""Experts read questions, search by what they say, read on, and depend on nothing that was not shown."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database, make_questions

from emailrl.engines.dialects import parse
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails, demo_questions
from emailrl.mail.sources.message import RawEmail
from emailrl.questions.load import write_scenarios
from emailrl.questions.template import HARD_KINDS, KINDS, generate
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL, possessive
from emailrl.records.trajectory import Message, Scenario
from emailrl.settings import Settings, load_settings
from emailrl.sft.asked import answer_of, read_question, told_in
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


def test_a_weekday_before_the_date_is_passed_over_and_other_words_are_no_template_question() -> None:
    asked = read_question("Who wrote to me on Thursday, May 3, 2001?")
    assert asked is not None and (asked.kind, asked.day) == ("only_sender_of_day", date(2001, 5, 3))
    assert read_question("When does the lease end?") is None


OWNER, ROSS, EVE = "ann.lee@example.com", "bob.ross@example.com", "eve@other.example"


def shown(subject: str = "Lease of the barn", sender: str = ROSS, **fields: Any) -> dict[str, Any]:
    people = {"to_addresses": [OWNER], "cc_addresses": [], "bcc_addresses": []}
    first = {"message_id": "<1@x>", "date": "2001-05-03 09:00:00", "subject": subject, "from_address": sender}
    return first | people | {"body": "The rent is $450 a month.", "file_name": ""} | fields


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
    asked = read_question(question)
    assert asked is not None and answer_of(asked, read, OWNER) == expected


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


def calls(messages: list[Message]) -> list[tuple[str, Any]]:
    said = [parse(message.content, "hermes")[0] for message in messages if message.role == "assistant"]
    return [(call.name, call.arguments) for call in said]


def ask(question: str, settings: Settings, **agent: Any) -> list[tuple[str, Any]]:
    """What a careful searcher calls, with which arguments."""
    scenario = Scenario("q", question, "?", ["<?>"], ME, "2001-06-01", kind="any")
    changed = settings.model_copy(update={"agent": settings.agent.model_copy(update=agent)})
    return calls(play(scenario, changed, CAREFUL, random.Random(0))[1])


def answered(text: str, *sources: str) -> tuple[str, Any]:
    return "return_final_answer", {"answer": text, "sources": list(sources)}


WINDOW = {"keywords": [], "sent_before": "2001-05-09"}
ON_DAY = "What did Bob Ross write to me about on May 7, 2001?"
IN_MONTH = "How many mails did Bob Ross send me in May 2001?"


@pytest.mark.parametrize(
    ("question", "called"),
    [
        (ON_DAY, [
            ("search_emails", {"keywords": [], "from_addr": BOB, "sent_after": "2001-05-07",
                               "sent_before": "2001-05-08"}),
            ("read_email", {"message_id": "<b7@x>"}),
            answered("Barn report 7", "<b7@x>"),
        ]),
        ("Before May 9, 2001, what was the subject of the latest mail from Zoe Kim?", [  # her address is looked up
            ("search_emails", {**WINDOW, "from_addr": "zoe.kim@home.example"}),
            ("search_emails", {"keywords": ["Zoe Kim"]}),
            ("read_email", {"message_id": "<z9@x>"}),
            ("search_emails", {**WINDOW, "from_addr": ZOE}),
            ("read_email", {"message_id": "<z5@x>"}),
            answered("Harvest plan", "<z5@x>"),
        ]),
        ("What was the first message from Bob Ross after May 7, 2001 about?", [
            ("search_emails", {"keywords": [], "from_addr": BOB, "sent_after": "2001-05-08", "max_results": 10}),
            ("read_email", {"message_id": "<b11@x>"}),
            answered("Barn report 11", "<b11@x>"),
        ]),
        (IN_MONTH, [  # hits are counted, and all cited
            ("search_emails", {"keywords": [], "from_addr": BOB, "sent_after": "2001-05-01",
                               "sent_before": "2001-06-01", "max_results": 10}),
            answered("4", "<b20@x>", "<b11@x>", "<b7@x>", "<b3@x>"),
        ]),
    ],
)  # fmt: skip
def test_the_calls_of_a_careful_searcher(question: str, called: list[Any], settings: Settings) -> None:
    assert ask(question, settings) == called


def test_it_reads_on_past_a_mail_that_does_not_fit_and_does_not_know_where_none_does(settings: Settings) -> None:
    called = ask('Who sent me the mail with the subject "Harvest plan"?', settings)
    assert [call for call in called if call[0] == "read_email"][-1][1] == {"message_id": "<z5@x>"}
    assert called[-1] == answered("Zoe Kim", "<z5@x>")
    for question in (ON_DAY.replace("7", "8"), 'Who wrote to me about "Sale of the yard"?'):
        assert ask(question, settings)[-1] == answered("I don't know")
    called = ask(ON_DAY, settings, max_turns=2)  # turns run out
    assert [name for name, _ in called] == ["search_emails", "return_final_answer"]
    assert called[-1] == answered("I don't know")
    assert ask(IN_MONTH, settings, search_without_keywords=False)[0][1]["keywords"] == ["the"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Template questions on the demo mail, of twenty kinds."""
    folder = tmp_path_factory.mktemp("demo")
    build_database(demo_emails(42), folder / "mail.db")
    write_scenarios(folder / "q.jsonl", generate(folder / "mail.db", limit=700))
    given = {"db": folder / "mail.db", "questions": folder / "q.jsonl", "max_source_mails": 9}
    return load_settings(given, environ={}, cwd=folder)


Played = list[tuple[Scenario, list[Message]]]


@pytest.fixture(scope="module")
def played(demo: Settings) -> Played:
    found, asked = conversations(demo, seed=1)
    assert len(found) >= 0.97 * asked
    return found


def test_what_the_question_file_hides_changes_nothing(demo: Settings, played: Played) -> None:
    for scenario, messages in played:
        hidden = replace(scenario, answer="42", message_ids=["<other@x>"], kind=None, how_realistic=0.5, split=None)
        assert play(hidden, demo, Habits(), random.Random(f"1/0/{scenario.id}"))[1] == messages


def test_most_are_answered_in_several_ways_and_turns(demo: Settings, played: Played) -> None:
    assert len({scenario.kind for scenario, _ in played}) >= 18
    turns = Counter(sum(message.role == "assistant" for message in messages) for _, messages in played)
    assert len(turns) >= 4 and sum(count for number, count in turns.items() if number > 3) > 0.15 * len(played)
    scenario = next(s for s, _ in played if s.kind == "sender")
    ways = {str(calls(play(scenario, demo, Habits(), random.Random(seed))[1])) for seed in range(40)}
    assert len(ways) >= 15
    assert [messages for _, messages in conversations(demo, seed=2)[0]] != [messages for _, messages in played]


def test_questions_in_other_words_than_the_email_are_mostly_answered(demo: Settings, tmp_path: Path) -> None:
    questions = write_scenarios(tmp_path / "q.jsonl", demo_questions(42))
    data = demo.data.model_copy(update={"questions": questions, "train_dataset_size": 100})
    assert len(conversations(demo.model_copy(update={"data": data}), seed=1)[0]) >= 70
    scenario = next(s for s in demo_questions(42) if s.question.startswith("How much money did they ask for "))
    project = scenario.question.removesuffix("?").split()[-1]
    called = calls(play(scenario, demo, CAREFUL, random.Random(0))[1])
    searches = [arguments["keywords"] for name, arguments in called if name == "search_emails"]
    assert searches[0] == [project] and not {"did", "they", "ask"} & {word for words in searches for word in words}


TOLD = "What did Pat Clynes tell O'Neal about FERC's 10,000 units at Red Rock's Clear-Lake meter for Ann's 2001 plan?"


def test_what_is_searched_for_first() -> None:
    """Names and numbers, who acts, other words, and last what many emails share: dates, the asker's name and host."""
    expected = "Clear-Lake, Red Rock, O'Neal, 10,000, FERC, Pat Clynes, units, meter, plan, 2001, Ann"
    assert [" ".join(words) for words in told_in(TOLD, ME)] == expected.split(", ")
    assert told_in("Who is it?", ME) == []


def test_searches_differ_narrow_and_end_where_no_mail_is_the_source(tmp_path: Path) -> None:
    """Nine mails name Zorbu and the harvest, one of them both: the hits that show more of the question are read."""
    alike = [mail(f"{word}{day}", day, BOB, f"{word} {day}") for word in ("Zorbu", "harvest") for day in range(2, 10)]
    both = mail("both", 1, BOB, "Zorbu harvest", "The harvest at Zorbu is late, says the plan.")
    build_database([*alike, both], tmp_path / "mail.db")
    settings = load_settings({"db": tmp_path / "mail.db"}, environ={}, cwd=tmp_path)
    asked = Scenario("q", "How late is the Zorbu harvest?", "Weeks", ["<gone@x>"], ME, "2001-06-01", twins=["<both@x>"])
    searched, source = ("search_emails", {"keywords": ["Zorbu"]}), ("read_email", {"message_id": "<both@x>"})
    environment, messages = play(asked, settings, CAREFUL, random.Random(0))
    assert calls(messages) == [searched, source, answered("Weeks", "<both@x>")]  # a twin is as good
    rubric = environment.rubric
    assert rubric.ever_found_right_email and rubric.ever_read_right_email and rubric.sources_correct
    absent = replace(asked, twins=[], message_ids=[], answer="I don't know", answerable=False)
    for short_ids in (False, True):
        agent = settings.agent.model_copy(update={"short_message_ids": short_ids, "count_matches": short_ids})
        told = settings.model_copy(update={"agent": agent})
        environment, messages = play(absent, told, CAREFUL, random.Random(0))
        said = calls(messages)
        keywords = [arguments["keywords"] for name, arguments in said if name == "search_emails"]
        assert keywords == [["Zorbu"], ["harvest"], ["Zorbu", "harvest"]]
        read = [arguments["message_id"] for name, arguments in said if name == "read_email"]
        assert environment.message_id(read[0]) == "<both@x>" and len(read) == 2
        assert said[-1] == answered("I don't know") and is_right(environment)


def test_wrong_answers_are_left_out(settings: Settings, tmp_path: Path) -> None:
    right = Scenario("1", ON_DAY, "Barn report 7", ["<b7@x>"], ME, "2001-06-01", split="train", kind="subject")
    rows = [right, replace(right, id="2", answer="Roof"), replace(right, id="3", split="val", inbox_address=BOB)]
    write_scenarios(tmp_path / "q.jsonl", rows)
    data = settings.data.model_copy(update={"questions": tmp_path / "q.jsonl"})
    kept, asked = conversations(settings.model_copy(update={"data": data}), seed=1)
    assert [scenario.id for scenario, _ in kept] == ["1"] and asked == 2


def test_a_question_in_free_words_gets_its_reference_answer_once_the_source_was_read(tmp_path: Path) -> None:
    make_database(tmp_path / "mail.db")
    settings = load_settings({"db": tmp_path / "mail.db"}, environ={}, cwd=tmp_path)
    [whole] = make_questions(1)
    environment, messages = play(replace(whole, kind=None), settings, CAREFUL, random.Random(0))
    assert is_right(environment) and calls(messages)[-1] == answered(whole.answer, whole.message_ids[0])
    taught = settings.model_copy(update={"data": settings.data.model_copy(update={"output_field": "any"})})
    told = replace(whole, answer="It ends on 31 May 2002, I think.")
    assert calls(play(told, taught, Habits(), random.Random(0))[1])[-1][1]["answer"] == told.answer
    elsewhere = replace(whole, message_ids=["<gone@x>"])
    assert calls(play(elsewhere, settings, CAREFUL, random.Random(0))[1])[-1] == answered("I don't know")
