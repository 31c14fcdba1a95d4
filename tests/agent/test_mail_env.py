"""Stop rules and rubric, one by one, on a real mailbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from mail_calls import call

from emailrl.agent import MailEnvironment, Rubric, tool_schemas
from emailrl.agent.tools import call_tool
from emailrl.base.errors import EmailRLError, ToolError
from emailrl.facts.words import is_i_dont_know
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall
from emailrl.settings import AgentSettings

INBOX = "ida@corvane.test"
Play = Callable[..., MailEnvironment]


def test_first_messages_name_turns_user_and_date(play: Play, scenario) -> None:
    system, user = MailEnvironment(scenario, play().mailbox, AgentSettings(max_turns=6)).start()
    assert (system.role, user.role, user.content) == ("system", "user", "When is the pump order due?")
    assert all(named in system.content for named in ("at most 6 turns", "ida@corvane.test", "2002-05-10"))


def test_a_whole_good_trajectory(play: Play) -> None:
    environment = play()
    search = environment.step(call("search_emails", keywords=["pump", "order"]))
    assert not search.done and search.stop_reason is None
    assert (search.tool_name, search.tool_args) == ("search_emails", {"keywords": ["pump", "order"]})
    (reply,) = search.messages
    assert (reply.role, reply.name, reply.tool_call_id) == ("tool", "search_emails", "c1")
    assert reply.content == search.tool_result
    assert [hit["message_id"] for hit in json.loads(reply.content)] == ["<2@x>", "<1@x>"]

    read = environment.step(call("read_email", message_id="<1@x>"))
    assert json.loads(read.tool_result or "")["body"] == "The pump order is due on May 20."

    end = environment.step(call("return_final_answer", answer="May 20", sources=["<1@x>"]))
    assert end.done and end.stop_reason is StopReason.ANSWERED
    assert end.messages == [] and end.tool_result is None
    assert (environment.final_answer, environment.final_sources) == ("May 20", ["<1@x>"])
    assert environment.rubric == Rubric(attempted_answer=True, num_turns=3, num_sources=1, **RIGHT)


def test_short_ids_and_counts_change_what_is_shown_alone(play: Play, scenario) -> None:
    agent = AgentSettings(short_message_ids=True, count_matches=True, mailbox_in_question=True)
    environment = MailEnvironment(scenario, play().mailbox, agent)
    system, user = environment.start()
    assert scenario.inbox_address not in system.content and scenario.query_date not in system.content
    assert user.content.endswith("\n\nWhen is the pump order due?")
    assert scenario.inbox_address in user.content and scenario.query_date in user.content

    def shown(name: str, **arguments: Any) -> Any:
        result = environment.step(call(name, **arguments))
        assert "@x" not in result.messages[0].content
        if name == "search_emails":  # what is recorded keeps the message ids
            assert {hit["message_id"][-3:] for hit in json.loads(result.tool_result or "")} <= {"@x>"}
        return json.loads(result.messages[0].content)

    found = shown("search_emails", keywords=["pump", "order"], max_results=1)
    assert (found["matches"], [hit["message_id"] for hit in found["emails"]]) == (2, ["m1"])
    found = shown("search_emails", keywords=["pump", "order"])
    assert (found["matches"], [hit["message_id"] for hit in found["emails"]]) == (2, ["m1", "m2"])
    assert shown("search_emails", keywords=["pump"], from_addr="nobody@x.test") == {"matches": 0, "emails": []}
    assert shown("read_email", message_id="m3") == {"error": "Email not found"}
    assert shown("read_email", message_id="m2")["message_id"] == "m2" and environment.rubric.ever_read_right_email
    environment.step(call("return_final_answer", answer="May 20", sources=["m2", "m9"]))
    assert environment.final_sources == ["<1@x>", "m9"] and environment.rubric.sources_correct


def test_names_show_who_and_when_and_change_no_record(tmp_path: Path, scenario) -> None:
    day, names = datetime(2002, 5, 2, tzinfo=UTC), {"otto@corvane.test": "Otto <|im_end|> Groß", INBOX: "Ida"}
    mails = [
        RawEmail("<1@x>", "Pump", "otto@corvane.test", [INBOX], [], [], day, "Due.", names=names,
                 attachments=["p.pdf"]),
        RawEmail("<2@x>", "Re: Pump", INBOX, ["otto@corvane.test"], [], [], day + timedelta(days=1), "Yes.",
                 references=["<1@x>"], machine="notification"),
    ]  # fmt: skip
    db = build_database(mails, tmp_path / "m.db").db
    told = {}
    for on in (True, False):
        mailbox = open_mailbox(db, INBOX, scenario.query_date, names=on)
        environment = MailEnvironment(scenario, mailbox, AgentSettings(show_names=on, short_message_ids=on))
        environment.start()
        search = environment.step(call("search_emails", keywords=["gross" if on else "due"]))
        read = environment.step(call("read_email", message_id="m1" if on else "<1@x>"))
        told[on] = [json.loads(each.messages[0].content) for each in (search, read)]
        assert list(json.loads(search.tool_result or "")[0]) == ["message_id", "snippet"]
    hit = {"message_id": "m1", "from": "Otto <|im_end|> Groß", "date": "2002-05-02", "thread": "1 of 2"}
    assert told[True][0] == [hit | {"snippet": "Pump ... Due."}]
    shown, exact = told[True][1], told[False][1]
    assert (shown["from_address"], shown["to_addresses"]) == (
        "Otto <|im_end|> Groß <otto@corvane.test>",
        [f"Ida <{INBOX}>"],
    )
    assert (shown["thread"], shown["attachments"], "machine" in shown) == ("1 of 2", ["p.pdf"], False)
    assert list(exact) == ["message_id", "date", "subject", "from_address", "to_addresses", "cc_addresses",
                           "bcc_addresses", "body", "file_name"]  # fmt: skip
    assert exact["from_address"] == "otto@corvane.test"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("assistant", "<tool_call>{", parse_error="bad JSON"), "cant_parse_tool_call"),
        (Message("assistant", "It is due on May 20."), "bad_tool_call_args"),
        (call("search_mail", keywords=["x"]), "bad_tool_call_name"),
        (call("search_emails", keywords=[]), "bad_tool_call_args"),
        (call("search_emails", keywords=["x"], max_results=11), "bad_tool_call_args"),
        (call("search_emails", keywords=["x"], sent_before="tomorrow"), "bad_tool_call_args"),
        (call("search_emails", keywords=["x"], inbox="rita@corvane.test"), "bad_tool_call_args"),
        (call("return_final_answer", answer="x", sources="<1@x>"), "bad_tool_call_args"),
    ],
)
def test_what_ends_a_trajectory_at_once(play: Play, message: Message, reason: str) -> None:
    environment = play()
    result = environment.step(message)
    assert result.done and result.stop_reason == reason
    assert result.messages == [], "a refused call is never fed back"
    assert list(json.loads(result.tool_result or "")) == ["error"]
    assert environment.rubric == Rubric(num_turns=1, **{reason: True})
    assert environment.final_answer is None
    with pytest.raises(RuntimeError):
        environment.step(message)


def test_only_the_first_of_several_calls_counts(play: Play) -> None:
    message = call("search_emails", keywords=["lunch"])
    message.tool_calls.append(ToolCall("return_final_answer", {"answer": "x", "sources": []}))
    result = play().step(message)
    assert not result.done and result.tool_name == "search_emails"


RIGHT = dict.fromkeys(("ever_found_right_email", "ever_read_right_email", "sources_correct"), True)
NOODLES, LUNCH, PUMP = (call("search_emails", keywords=[word]) for word in ("noodles", "lunch", "pump"))
BOTH: dict[str, Any] = {"message_ids": ["<3@x>", "<5@x>"]}
ALL = BOTH | {"needs_all": True}


def answer(text: str, *sources: str) -> Message:
    return call("return_final_answer", answer=text, sources=list(sources))


@pytest.mark.parametrize(
    ("changes", "messages", "rubric"),
    [
        # Any source email counts, and one cited twice is one source.
        (
            BOTH,
            [NOODLES, call("read_email", message_id="<5@x>"), answer("x", "<1@x>", "<5@x>", "<5@x>")],
            Rubric(num_turns=3, attempted_answer=True, num_sources=2, **RIGHT),
        ),
        # Wrong emails count for nothing.
        (
            {},
            [NOODLES, call("read_email", message_id="<5@x>"), answer("x", "<5@x>")],
            Rubric(num_turns=3, attempted_answer=True, num_sources=1),
        ),
        # Where all source emails are needed, all must be cited.
        (ALL, [answer("x", "<1@x>", "<5@x>")], Rubric(num_turns=1, attempted_answer=True, num_sources=2)),
        (
            ALL,
            [answer("x", "<5@x>", "<3@x>", "<1@x>")],
            Rubric(num_turns=1, attempted_answer=True, num_sources=3, sources_correct=True),
        ),
        ({}, [call("return_final_answer", answer="x", sources=None)], Rubric(num_turns=1, attempted_answer=True)),
        # "I don't know" is no attempt, and cites nothing right.
        ({}, [answer("I don\u2019t know.", "<1@x>")], Rubric(num_turns=1, returned_i_dont_know=True, num_sources=1)),
        # An answer in the last turn is in time; running out of turns counts one more.
        ({"max_turns": 1}, [answer("May 20")], Rubric(num_turns=1, attempted_answer=True)),
        ({"max_turns": 2}, [PUMP, LUNCH], Rubric(num_turns=3, ran_out_of_turns=True, ever_found_right_email=True)),
    ],
)
def test_the_rubric_of_whole_trajectories(
    play: Play, changes: dict[str, Any], messages: list[Message], rubric: Rubric
) -> None:
    environment = play(**changes)
    results = [environment.step(message) for message in messages]
    assert [result.done for result in results] == [False] * (len(messages) - 1) + [True]
    assert environment.rubric == rubric
    last, in_time = results[-1], not rubric.ran_out_of_turns
    assert last.stop_reason is (StopReason.ANSWERED if in_time else StopReason.RAN_OUT_OF_TURNS)
    assert len(last.messages) == (0 if in_time else 1)


def test_an_invalid_id_is_told_and_noted(play: Play) -> None:
    environment = play()
    result = environment.step(call("read_email", message_id="<3@x>"))
    assert not result.done and result.tool_result == '{"error":"Email not found"}'
    assert environment.rubric == Rubric(num_turns=1, ever_tried_to_read_invalid_email=True)
    environment = play(message_ids=["<3@x>"])  # a source mail that cannot be read was not read
    environment.step(call("read_email", message_id="<3@x>"))
    assert not environment.rubric.ever_read_right_email


def test_spellings_of_i_dont_know() -> None:
    unknown = ["I don't know", "I don't know.", "I don\u2019t know", "i dont know", "I do not know!", "IDK"]
    unknown += ["Don't know", ' "I don\'t know." ', "Sorry, I don't know.", "I'm sorry, but I don't know the answer."]
    unknown += ["I do not know the answer to that"]
    others = ["", "I don't know, maybe May 20", "Otto doesn't know", "I know", "no", "unknown hero"]
    assert [answer for answer in unknown + others if is_i_dont_know(answer)] == unknown


def test_an_environment_plays_once(play: Play) -> None:
    environment = play()
    with pytest.raises(RuntimeError):
        environment.start()
    with pytest.raises(RuntimeError):
        MailEnvironment(environment.scenario, environment.mailbox).step(Message("assistant", ""))


def test_errors_of_the_mailbox_are_not_blamed_on_the_model(play: Play) -> None:
    environment = play()
    environment.mailbox.close()
    with pytest.raises(EmailRLError, match="closed") as caught:
        environment.step(call("search_emails", keywords=["pump"]))
    assert not isinstance(caught.value, ToolError)
    assert not environment.rubric.bad_tool_call_args


def test_a_thread_is_read_whole_if_the_agent_has_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day, other = datetime(2002, 5, 2, 9, tzinfo=UTC), "otto@corvane.test"
    mails = [
        RawEmail(f"<{n}@x>", "Re: Pump", other if n % 2 else INBOX, [INBOX if n % 2 else other], [], [],
                 day + timedelta(hours=n), f"Mail {n}." + "x" * 90, references=[f"<{n - 1}@x>"] if n else [])
        for n in range(7)
    ]  # fmt: skip
    mails.append(RawEmail("<7@x>", "Re: Pump", other, ["z@x"], [], [], day, "Hidden.", references=["<0@x>"]))
    mails.append(RawEmail("<8@x>", "Alone", other, [INBOX], [], [], day, "Alone."))
    db = build_database(mails, tmp_path / "m.db").db
    scenario = Scenario("q", "When?", "May", ["<2@x>"], INBOX, "2002-05-03")
    agent = AgentSettings(read_threads=True, short_message_ids=True, max_turns=9)
    assert [schema["function"]["name"] for schema in tool_schemas(agent)] == [
        "search_emails", "read_email", "read_thread", "return_final_answer",
    ]  # fmt: skip
    environment = MailEnvironment(scenario, open_mailbox(db, INBOX, scenario.query_date), agent)
    environment.start()
    environment.step(call("search_emails", keywords=["Mail"], max_results=1))
    shown = environment.step(call("read_thread", message_id="m1"))
    emails = json.loads(shown.messages[0].content)
    # Oldest first, under short ids; what this mailbox does not have is not shown.
    assert [each["body"][:7] for each in emails] == [f"Mail {n}." for n in range(7)]
    assert emails[-1]["message_id"] == "m1" and len({each["message_id"] for each in emails}) == 7
    assert environment.rubric.ever_read_right_email and not environment.rubric.ever_tried_to_read_invalid_email
    environment.step(call("read_thread", message_id="<7@x>"))
    assert environment.rubric.ever_tried_to_read_invalid_email

    monkeypatch.setattr("emailrl.agent.tools.MAX_THREAD", 3)
    monkeypatch.setattr("emailrl.agent.tools.MAX_READ_CHARS", 30)
    for asked, wanted in (("<0@x>", [0, 1, 2]), ("<4@x>", [3, 4, 5]), ("<6@x>", [4, 5, 6]), ("<8@x>", [8])):
        found = call_tool(environment.mailbox, "read_thread", {"message_id": asked})
        assert [each["message_id"] for each in found] == [f"<{n}@x>" for n in wanted]
        assert len(wanted) == 1 or all("cut: 10 of 97" in each["body"] for each in found)

    without = MailEnvironment(scenario, environment.mailbox)
    without.start()
    assert without.step(call("read_thread", message_id="<1@x>")).stop_reason == "bad_tool_call_name"
