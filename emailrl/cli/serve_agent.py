"""Serve the agent of one mailbox to chat clients, as an OpenAI-compatible endpoint.

Clients see one model, emailrl, at /v1. Searches and reads arrive as they happen, as a reasoning model's thoughts do;
the answer links the emails that it cites. Earlier questions of a conversation are remembered. Without --checkpoint or
--model the policy is chosen as `emailrl ask` chooses it. Only this machine can connect, unless --host names another
address; clients must then send the token that is printed, or SERVER_TOKEN.

Examples:

\b
  emailrl serve-agent --db data/mail.db --inbox ann@example.com
  emailrl serve-agent --db data/mail.db --host 0.0.0.0 --port 8080
"""

from __future__ import annotations

from emailrl.cli.options import Checkpoint, Host, Inbox, Overrides, Port, Trust, setting_options


@setting_options("model_name engine thinking chat_template_kwargs db max_cost")
def serve_agent(
    *,
    inbox: Inbox = None,
    host: Host = "127.0.0.1",
    port: Port = 8767,
    checkpoint: Checkpoint = None,
    overrides: Overrides,
    trust: Trust = False,
) -> None:
    from contextlib import closing

    from emailrl.cli.ask import open_agent
    from emailrl.cli.inputs import server_token
    from emailrl.integrations.chat import EMAILS, ChatServer
    from emailrl.integrations.guard import Guard, listen
    from emailrl.mail import open_mailbox
    from emailrl.questions.inbox import find_inbox
    from emailrl.settings import load_settings

    settings = load_settings(overrides, trust=trust)
    own = find_inbox(settings.store.db, inbox)
    token = server_token(host, settings.store.server_token)
    with closing(open_agent(settings, own, checkpoint, overrides["model_name"], True)) as agent:
        server = ChatServer(
            lambda: open_mailbox(settings.store.db, own, allow_unknown=True),
            lambda question, earlier, report: agent.answer(question, own, earlier=earlier, report=report),
            f"http://{host}:{port}",
        )
        guarded = Guard(server.app, token, lambda path: path.startswith(EMAILS))
        listen(guarded, host, port, f"http://{host}:{port}/v1 (model emailrl)")
