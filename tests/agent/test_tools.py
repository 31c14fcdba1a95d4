"""The schemas are ART-E's, and arguments are checked against the same signatures."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from mail_calls import INBOX

from emailrl.agent.tools import TOOLS, call_tool, check_arguments, to_json, tool_schemas
from emailrl.base.errors import ToolError
from emailrl.mail import Mailbox, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.settings import AgentSettings, StoreSettings


@pytest.fixture
def mailbox(db: Path) -> Mailbox:
    return open_mailbox(db, INBOX, until="2002-05-10")


def parameters(name: str) -> dict:
    return {schema["function"]["name"]: schema["function"]["parameters"] for schema in tool_schemas()}[name]


def test_names_parameters_and_types_are_those_of_art_e_and_all_are_described() -> None:
    options = ["from_addr", "to_addr", "sent_after", "sent_before", "max_results"]
    assert {name: (list(parameters(name)["properties"]), parameters(name)["required"]) for name in TOOLS} == {
        "search_emails": (["keywords", *options], ["keywords"]),
        "read_email": (["message_id"], ["message_id"]),
        "return_final_answer": (["answer", "sources"], ["answer", "sources"]),
    }
    search = parameters("search_emails")["properties"]
    strings = {"type": "array", "items": {"type": "string"}}
    assert search["keywords"] == strings | {"description": search["keywords"]["description"]}
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert search["from_addr"] == optional | {"description": "Only emails sent by this address."}
    most = "Most emails to return, at most 10."
    assert search["max_results"] == {"type": "integer", "description": most, "default": 10}
    sources = parameters("return_final_answer")["properties"]["sources"]
    assert sources["anyOf"] == [strings, {"type": "null"}]
    for schema in tool_schemas():
        assert schema["function"]["description"]
        assert all(p["description"] for p in schema["function"]["parameters"]["properties"].values())
    # The mailbox, and with it the inbox, is the first parameter of every tool.
    assert all(next(iter(inspect.signature(tool).parameters)) == "mailbox" for tool in TOOLS.values())
    tool_schemas()[0]["function"]["name"] = "broken"
    assert tool_schemas()[0]["function"]["name"] == "search_emails"


def test_the_search_tool_says_in_which_order_it_answers_and_whether_it_needs_keywords() -> None:
    def search(agent: AgentSettings | None = None) -> tuple[str, str]:
        function = tool_schemas(agent)[0]["function"]
        return function["description"], function["parameters"]["properties"]["keywords"]["description"]

    newest, keywords = search(AgentSettings(search_order="newest", search_without_keywords=False))
    assert newest.endswith("keywords, newest first.")
    assert keywords == "Words or phrases that must all occur in the subject or body."
    both = newest, f"{keywords} May be empty where an address or a date is given."
    assert search() == search(AgentSettings(search_order="newest", search_without_keywords=True)) == both
    assert search(AgentSettings(search_order="relevance"))[0] == newest.replace("newest first", "most relevant first")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search_emails", {}, "search_emails needs the argument 'keywords'."),
        ("search_emails", {"keywords": "pump"}, "search_emails: 'keywords' must be a list of strings."),
        ("search_emails", {"keywords": ["pump", 3]}, "search_emails: 'keywords' must be a list of strings."),
        ("search_emails", {"keywords": ["x"], "max_results": True}, "search_emails: 'max_results' must be integer."),
        ("search_emails", {"keywords": ["x"], "max_results": "5"}, "search_emails: 'max_results' must be integer."),
        ("search_emails", {"keywords": ["x"], "from_addr": 1}, "search_emails: 'from_addr' must be string or null."),
        ("search_emails", {"keywords": ["x"], "inbox": "a@b"}, "search_emails has no argument 'inbox'."),
        ("search_emails", {"keywords": ["x"], "mailbox": "a@b"}, "search_emails has no argument 'mailbox'."),
        ("read_email", {"message_id": None}, "read_email: 'message_id' must be string."),
        ("return_final_answer", {"answer": "x"}, "return_final_answer needs the argument 'sources'."),
        ("return_final_answer", {"answer": 4, "sources": []}, "return_final_answer: 'answer' must be string."),
    ],
)
def test_arguments_that_do_not_fit(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        check_arguments(name, arguments)
    assert str(caught.value) == message


def test_search_limits_and_refusals(mailbox: Mailbox) -> None:
    with pytest.raises(ToolError, match="No keywords provided for search"):
        call_tool(mailbox, "search_emails", {"keywords": []})
    with pytest.raises(ToolError, match="max_results must be less than or equal to 10"):
        call_tool(mailbox, "search_emails", {"keywords": ["pump"], "max_results": 11})
    with pytest.raises(ToolError):
        call_tool(mailbox, "search_emails", {"keywords": ["pump"], "sent_after": "May 3"})
    hits = call_tool(mailbox, "search_emails", {"keywords": ["pump"], "max_results": 10})
    assert [hit["message_id"] for hit in hits] == ["<2@x>", "<1@x>"]  # the newest first, before the query date
    assert hits[1]["snippet"] == "<b>Pump</b> order"


def test_a_search_by_sender_and_dates_needs_no_keywords(mailbox: Mailbox) -> None:
    found = call_tool(mailbox, "search_emails", {"keywords": [], "from_addr": "otto@corvane.test"})
    assert found == [{"message_id": "<1@x>", "snippet": "Pump order ... The pump order is due on May 20."}]
    dates = {"sent_after": "2002-05-03", "sent_before": "2002-05-05"}
    found = call_tool(mailbox, "search_emails", {"keywords": [], **dates})
    assert [hit["message_id"] for hit in found] == ["<2@x>"]


def test_read_gives_the_whole_mail_with_its_recipients(mailbox: Mailbox) -> None:
    assert call_tool(mailbox, "read_email", {"message_id": "<1@x>"}) == {
        "message_id": "<1@x>",
        "date": "2002-05-02 09:30:00",
        "subject": "Pump order",
        "from_address": "otto@corvane.test",
        "to_addresses": [INBOX],
        "cc_addresses": ["cc@corvane.test"],
        "bcc_addresses": [],
        "body": "The pump order is due on May 20.",
        "file_name": "1.",
    }


def test_read_cuts_what_no_context_window_holds(tmp_path: Path) -> None:
    crowd = [f"p{number}@x.org" for number in range(1003)]
    mails = [
        RawEmail(f"<{extra}@x>", "gas", INBOX, crowd[: 1000 + extra], [], [], None, "x" * (200_000 + extra))
        for extra in (0, 3)
    ]
    settings = StoreSettings(max_body_chars=0, max_recipients=0)
    box = open_mailbox(build_database(mails, tmp_path / "long.db", settings=settings).db, INBOX)
    whole = call_tool(box, "read_email", {"message_id": "<0@x>"})
    assert whole["body"] == "x" * 200_000 and whole["to_addresses"] == crowd[:1000]
    cut = call_tool(box, "read_email", {"message_id": "<3@x>"})
    assert cut["body"] == "x" * 200_000 + " … (cut: 200,000 of 200,003 characters)"
    assert cut["to_addresses"] == [*crowd[:1000], "… and 3 more"]


@pytest.mark.parametrize("message_id", ["<3@x>", "<4@x>", "<9@x>", "", "' OR 1=1 --"])
def test_read_finds_nothing_outside_the_inbox_or_after_the_query_date(mailbox: Mailbox, message_id: str) -> None:
    assert call_tool(mailbox, "read_email", {"message_id": message_id}) == {"error": "Email not found"}


def test_results_are_compact_json_with_letters_as_they_are() -> None:
    assert to_json([{"id": "<1@x>", "snippet": "caf\u00e9 \u2013"}]) == '[{"id":"<1@x>","snippet":"caf\u00e9 \u2013"}]'
