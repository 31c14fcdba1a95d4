"""``emailrl mcp`` and the official client: over stdin and stdout, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from documents.pages import DOCS
from integrations.conftest import foreign
from tiny import ANN

import emailrl
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources.reading import RawEmail
from emailrl.settings import load_settings

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

QUESTION = {"question": "When does the lease end?"}
CONFIGURATIONS = re.findall(r"```json\n(.+?)```", (DOCS / "guides/clients.md").read_text(), re.DOTALL)


def over_stdio(db: Path, environment: dict[str, str], work: Callable[[Any], Awaitable[Any]]) -> Any:
    arguments = ["-m", "emailrl", "mcp", "--db", str(db), "--inbox", ANN]
    return connect(arguments, db, environment, work)


def connect(arguments: list[str], db: Path, environment: dict[str, str], work: Callable[[Any], Awaitable[Any]]) -> Any:
    own = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=str(db.parent))

    async def connected() -> Any:
        async with mcp.Client(own) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(connected(), 60))


def test_an_official_client_searches_reads_and_asks(db: Path, environment: dict[str, str]) -> None:
    async def work(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["search_emails", "read_email", "read_thread", "ask"]
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        assert tools["search_emails"].input_schema["required"] == ["keywords"]

        found = await client.call_tool("search_emails", {"keywords": ["lease"], "from_addr": "bob@example.com"})
        assert [hit["message_id"] for hit in found.structured_content["emails"]] == ["<m0@x>"]
        framed = re.fullmatch(r".*\n<mail-([0-9a-f]{16})>\n(.+)\n</mail-\1>", found.content[0].text, re.DOTALL)
        assert framed is not None and json.loads(framed[2]) == found.structured_content
        read = await client.call_tool("read_email", {"message_id": "<m0@x>"})
        assert "31 May 2002" in read.structured_content["body"] and framed[1] not in read.content[0].text

        for message_id in ("<m0@x>", "m0@x"):
            thread = await client.call_tool("read_thread", {"message_id": message_id})
            assert thread.structured_content["emails"] == [read.structured_content]
        for keywords, has_hint in ((["lease nowhere"], True), (["lease", "nowhere"], False)):
            none = (await client.call_tool("search_emails", {"keywords": keywords})).structured_content
            assert none["emails"] == [] and ("hint" in none) is has_hint

        answer = (await client.call_tool("ask", QUESTION)).structured_content
        assert (answer["answer"], answer["sources"][0]) == ("On 31 May 2002.", "<m0@x>")

    over_stdio(db, environment, work)


def test_mail_is_found_by_a_senders_name_in_another_spelling(db: Path, environment: dict[str, str]) -> None:
    when, bob = datetime(2001, 5, 1, tzinfo=UTC), "bob@example.com"
    mail = RawEmail("<m@x>", "Keys", bob, [ANN], [], [], when, "Ready.", names={bob: "Bob Hütte"})
    build_database([mail], db, append=True)

    async def work(client: Any) -> None:
        for wanted in ({"keywords": ["Huette"]}, {"keywords": ["key"], "from_addr": "Bob Huette"}):
            found = await client.call_tool("search_emails", wanted)
            assert [hit["message_id"] for hit in found.structured_content["emails"]] == ["<m@x>"]
        [tool] = [tool for tool in (await client.list_tools()).tools if tool.name == "search_emails"]
        told = {name: each["description"] for name, each in tool.input_schema["properties"].items()}
        assert "UTC" in tool.description and "names of people and attached files" in told["keywords"]
        assert all("a person of this name" in told[name] for name in ("from_addr", "to_addr"))
        read = await client.call_tool("read_email", {"message_id": "<m@x>"})
        assert "Bob Hütte" in read.content[0].text

    over_stdio(db, environment, work)


def test_a_hit_shows_the_subject_and_the_attached_files_that_were_found(db: Path, environment: dict[str, str]) -> None:
    when, files = datetime(2001, 5, 1, tzinfo=UTC), [f"{number}.pdf" for number in range(30)]
    mail = RawEmail(
        "<m@x>", "Keys", "bob@example.com", [ANN], [], [], when, "Ready.", attachments=["Zeppelin.pdf", *files]
    )
    build_database([mail], db, append=True)

    async def work(client: Any) -> None:
        found = await client.call_tool("search_emails", {"keywords": ["zeppelin"]})
        [hit] = found.structured_content["emails"]
        assert (hit["message_id"], hit["subject"]) == ("<m@x>", "Keys")
        assert hit["attachments"] == ["Zeppelin.pdf", *files[:19]]

    over_stdio(db, environment, work)


def test_a_replaced_database_is_served_as_it_is_now(db: Path, environment: dict[str, str]) -> None:
    async def work(client: Any) -> None:
        for subject in ("Keys", "Doors"):
            mail = RawEmail("<m@x>", subject, ANN, [ANN], [], [], datetime(2001, 5, 1, tzinfo=UTC), "Ready.")
            build_database([mail], db, overwrite=True)
            read = await client.call_tool("read_email", {"message_id": "<m@x>"})
            assert read.structured_content["subject"] == subject

        async def fails(*words: str) -> None:
            calls = ("search_emails", {"keywords": ["keys"]}), ("read_email", {"message_id": "m@x"}), ("ask", QUESTION)
            for name, arguments in calls:
                failed = await client.call_tool(name, arguments)
                assert failed.is_error and all(word in failed.content[0].text for word in words), name
                assert "zoe@x.org" not in failed.content[0].text, "whose mail it has now is nobody's business"

        build_database([replace(mail, from_address="zoe@x.org", to=["zoe@x.org"])], db, overwrite=True)
        await fails("replaced", ANN)
        db.unlink()
        await fails("No such mail database", str(db))
        db.write_bytes(b"no database")
        await fails("cannot be read", str(db))
        build_database([mail], Path(f"{db}.new"))
        Path(f"{db}.new").replace(db)
        assert not (await client.call_tool("read_email", {"message_id": "m@x"})).is_error

    over_stdio(db, environment, work)


def test_a_line_that_is_no_message_is_answered_with_an_error(db: Path, environment: dict[str, str]) -> None:
    lone = r'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"arguments": {"a": "\ud800"}}}'
    lines = {lone: 7, r'{"id": "\ud800"}': None, '{"id": "x"}': "x", "[" * 99_999: None, "no JSON": None, "[]": None}
    command = [sys.executable, "-m", "emailrl", "mcp", "--db", str(db), "--inbox", ANN]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        for line, own in lines.items():
            server.stdin.write(f"{line}\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
            assert (answer["id"], answer["error"]["code"]) == (own, -32600)
        server.stdin.close()


def test_what_a_client_gets_wrong_is_an_error_of_the_tool(db: Path) -> None:
    from emailrl.integrations.mcp import build_server

    server = build_server(lambda: open_mailbox(db, ANN), load_settings(environ={}, cwd=db.parent).agent, None)

    async def work() -> list[Any]:
        async with mcp.Client(server) as client:
            wrong = [
                ("read_email", {"message_id": "<nobody@x>"}), ("read_thread", {"message_id": "<nobody@x>"}),
                ("search_emails", {"keywords": "lease"}),
                ("search_emails", {"keywords": ["lease"], "inbox": "bob@example.com"}), ("ask", {"question": "?"}),
                ("return_final_answer", {"answer": "", "sources": []}), ("read_email", {}),
            ]  # fmt: skip
            return [await client.call_tool(name, arguments) for name, arguments in wrong]

    assert all(result.is_error and result.content[0].text for result in asyncio.run(work()))


@pytest.mark.parametrize("is_there", [True, False])
def test_where_torch_cannot_be_imported_a_mailbox_is_searched_and_nobody_answers(
    db: Path, environment: dict[str, str], is_there: bool
) -> None:
    async def work(client: Any) -> None:
        listed = [tool.name for tool in (await client.list_tools()).tools]
        assert listed == ["search_emails", "read_email", "read_thread", *["ask"] * is_there]
        found = await client.call_tool("search_emails", {"keywords": ["deposit"]})
        assert not found.is_error and found.structured_content["emails"]
        asked = await client.call_tool("ask", QUESTION)
        assert asked.is_error and ("libtorch.so: cannot open" in asked.content[0].text) == is_there

    (db.parent / "broken").mkdir()
    (db.parent / "broken/torch.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    start = (
        "import sys\nfrom emailrl.__main__ import main\n" + "sys.modules['torch'] = None\n" * (not is_there) + "main()"
    )
    own = ["-c", start, "mcp", "--db", str(db), "--inbox", "ann@example.com"]
    connect(own, db, environment | {"EMAILRL_ENGINE": "auto", "PYTHONPATH": str(db.parent / "broken")}, work)


def test_over_http_only_this_machine_or_the_bearer_of_the_token_is_served(serve: Callable[..., str]) -> None:
    own = serve("mcp", "--http")

    async def tools() -> list[str]:
        async with mcp.Client(f"{own}/mcp") as client:
            return [tool.name for tool in (await client.list_tools()).tools]

    assert asyncio.run(asyncio.wait_for(tools(), 60)) == ["search_emails", "read_email", "read_thread", "ask"]
    guarded = serve("mcp", "--http", "--host", "0.0.0.0", SERVER_TOKEN="t0ken")

    def status(address: str, **headers: str) -> int:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        return httpx.post(f"{address}/mcp", json=body, headers={"Accept": "application/json", **headers}).status_code

    assert status(own, Host="evil.example") == 421
    assert status(own, Origin="https://evil.example") == status(own, Origin="null") == 403
    assert status(guarded) == status(guarded, Authorization="Bearer t0ke") == 401
    assert status(guarded, Authorization="Bearer t0ken", Host="mail.lan") not in (401, 403, 421)


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_the_guides_configurations_start_the_server(text: str, db: Path, environment: dict[str, str]) -> None:
    async def work(client: Any) -> None:
        assert len((await client.list_tools()).tools) == 4

    [servers] = json.loads(text).values()
    [server] = servers.values()
    assert server["command"] == "emailrl" and "/home/ann/mail.db" in server["args"]
    own = [str(db) if part == "/home/ann/mail.db" else part for part in server["args"]]
    connect(["-m", "emailrl", *own], db, environment, work)


def test_the_guide_has_configurations() -> None:
    assert len(CONFIGURATIONS) == 2


def server_json() -> dict[str, Any]:
    return json.loads((DOCS.parent / "server.json").read_text())


def test_the_registrys_entry_starts_this_server(db: Path, environment: dict[str, str]) -> None:
    entry = server_json()
    [package] = entry["packages"]
    assert entry["version"] == package["version"] == emailrl.__version__ and package["identifier"] == "emailrl"
    # By which the registry knows that the package is its owner's.
    assert f"mcp-name: {entry['name']}" in (DOCS.parent / "README.md").read_text()
    assert len(entry["description"]) <= 100
    given = {"--db": str(db), "--inbox": ANN}
    arguments = list[str]()
    for one in package["packageArguments"]:
        arguments += [one["value"]] if one["type"] == "positional" else [one["name"], given.pop(one["name"])]

    async def work(client: Any) -> None:
        assert len((await client.list_tools()).tools) == 4

    assert not given
    connect(["-m", "emailrl", *arguments], db, environment, work)


@pytest.mark.clients
def test_the_registrys_schema_takes_the_entry(tmp_path: Path) -> None:
    """skillsaw ships the schemas that the registry has released, and its rules for publishing."""
    python = foreign("skillsaw", "skillsaw==0.22.0")

    def told(entry: dict[str, Any]) -> str:
        (tmp_path / "server.json").write_text(json.dumps(entry))
        command = [python, "-m", "skillsaw", "lint", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True).stdout

    entry = server_json()
    assert "mcp-registry-server-json-valid" not in told(entry)
    entry["packages"][0]["transport"] = {"type": "pipe"}
    assert "mcp-registry-server-json-valid" in told(entry)


def test_a_slow_search_delays_no_other_call(db: Path) -> None:
    from emailrl.integrations.mcp import build_server

    goes_on = threading.Event()

    def opened() -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert goes_on.wait(30)
        return open_mailbox(db, ANN)

    async def work() -> Any:
        async with mcp.Client(build_server(opened, load_settings(environ={}, cwd=db.parent).agent, None)) as client:
            search = asyncio.create_task(client.call_tool("search_emails", {"keywords": ["lease"]}))
            await asyncio.sleep(0.1)
            assert (await client.list_tools()).tools and not search.done()
            goes_on.set()
            return await search

    found = asyncio.run(asyncio.wait_for(work(), 60))
    assert [hit["message_id"] for hit in found.structured_content["emails"]] == ["<m0@x>"]
