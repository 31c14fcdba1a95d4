"""Write the mail-search task as a package for an environment hub: verifiers (prime-rl) or OpenEnv.

The package holds mailbox, questions and settings, and installs with pip; trajectories earn what they earn in
`emailrl train` with the offline check. Without --db the mailbox is the demo's: nobody's private mail, and every
answer exact.

Examples:

\b
  emailrl publish-env verifiers --out mail-search
  emailrl publish-env openenv --out mail-search-space
  emailrl publish-env verifiers --db data/mine.db --out private-env
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument

from emailrl.cli.options import Json, Trust, path_option
from emailrl.cli.output import print_json, result_console, warn


def publish_env(
    kind: Annotated[Literal["verifiers", "openenv"], Argument(help="The hub's interface.")],
    out: Annotated[Path, path_option("--out", help="Folder to write; it must be new or empty.")],
    db: Annotated[Path | None, path_option("--db", help="Database to publish. Default: the demo mailbox.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.integrations.publish import publish
    from emailrl.mail.database import no_database
    from emailrl.settings import load_settings

    settings = load_settings(trust=trust)
    if db is not None and not db.is_file():
        raise no_database(db)
    told = publish(kind, out, settings, db)
    if not told["is_demo"]:
        warn(f"{out} contains the whole mailbox and the answers: publish it only where all may read them.")
    said = f"{out}: {told['num_questions']} questions on {told['num_emails']:,} emails, for {kind}"
    result_console(json=json).print(said, soft_wrap=True)
    if json:
        print_json({"out": out} | told)
