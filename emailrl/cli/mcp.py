"""Serve one mailbox to MCP clients such as Claude Desktop: search and read it, and ask the trained agent.

The client starts this command and talks to it over stdin and stdout; with --http, clients connect to an address
instead. All tools are read-only. One server serves one inbox. The policy behind the tool ask is chosen as
`emailrl ask` chooses it, and loaded on the first question. The client's model reads the emails that it opens: use one
that you trust with your mail.

Examples:

\b
  emailrl mcp --db data/mail.db --inbox ann@example.com
  emailrl mcp --db data/mail.db --http --port 8766
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from emailrl.base.errors import UsageError
from emailrl.cli.options import Checkpoint, Host, Inbox, Overrides, Port, Trust, setting_options
from emailrl.cli.output import say


@setting_options("model_name engine thinking chat_template_kwargs db max_cost")
def mcp(
    *,
    inbox: Inbox = None,
    http: Annotated[bool, Option("--http", help="Listen on an address for streamable HTTP.")] = False,
    host: Host = "127.0.0.1",
    port: Port = 8766,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    trust: Trust = False,
) -> None:
    import asyncio
    from functools import cache, partial
    from importlib.util import find_spec

    from emailrl.agent.task import agent_mailbox
    from emailrl.cli.ask import open_agent
    from emailrl.cli.inputs import server_token
    from emailrl.integrations.mcp import build_server, serve_stdio
    from emailrl.questions.inbox import find_inbox
    from emailrl.settings import load_settings

    if not http and (host, port) != ("127.0.0.1", 8766):
        raise UsageError("--host and --port need --http.", "Add --http, or leave them out.")
    settings = load_settings(overrides, trust=trust)
    own = find_inbox(settings.store.db, inbox)
    agent = settings.agent.model_copy(update={"show_names": True})  # as people search; ART-E's is for training
    loaded = cache(lambda: open_agent(settings, own, checkpoint, overrides["model_name"]))
    ask = (lambda question: loaded().answer(question, own)) if settings.is_chat or find_spec("torch") else None
    server = build_server(partial(agent_mailbox, agent, settings.store.db, own, None), agent, ask)
    if not http:
        say("Serving MCP on stdin and stdout.")
        asyncio.run(serve_stdio(server))
        return
    from emailrl.integrations.guard import Guard, listen

    token = server_token(host, settings.store.server_token)
    listen(Guard(server.streamable_http_app(host=host), token), host, port, f"MCP at http://{host}:{port}/mcp")
