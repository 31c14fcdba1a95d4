"""Convert trajectories for other viewers and trainers.

inspect: a log that `inspect view` opens; atif: a folder of ATIF documents, with tokens and log-probabilities; sts: a
folder of sessions, which Hugging Face's trace viewer shows; openai: chat messages with tool calls, a conversation a
line. `emailrl sft --trajectories` reads the second and the last back. Names and addresses are replaced, and tokens left
out, unless all mail is the demo's; --no-redact keeps everything, for training.

Examples:

\b
  emailrl convert rollout-001.jsonl --to inspect
  emailrl convert outputs/grpo_masked --to sts --out traces
  emailrl convert teacher.jsonl --to openai --no-redact --out chat.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from emailrl.base.disk import check_out, check_own, new_folder, write_out
from emailrl.base.plain import counted
from emailrl.cli.options import Json, Overwrite, addresses_in, names_in, path_option
from emailrl.cli.output import print_json, result_console, say


def convert(
    file: Annotated[Path, Argument(help="Trajectory file, or run folder: its newest one.")],
    to: Annotated[Literal["inspect", "atif", "sts", "openai"], Option("--to", help="Format.")],
    out: Annotated[
        Path | None, path_option("--out", help="File or folder to write. Default: in this folder, after the file.")
    ] = None,
    redact: Annotated[
        bool | None,
        Option("--redact/--no-redact", help="Replace names and addresses. Default: unless all mail is the demo's."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    from emailrl.integrations.formats import FORMATS, is_demo, redacted
    from emailrl.page.place import find_file
    from emailrl.page.redact import Redactor
    from emailrl.records import read_trajectories, trajectory_to_dict
    from emailrl.settings import load_settings

    source, format = find_file(file), FORMATS[to]
    if (target := out) is None:
        check_own(target := Path(source.stem + format.suffix), "--out")
    if format.is_file:
        check_out(target, may_exist=overwrite)
    trajectories = [*read_trajectories(source)]
    is_redacted = not is_demo(trajectories) if redact is None else redact
    if is_redacted:
        db, redactor = load_settings(looks_only=True).store.db, Redactor()
        for each in trajectories:
            texts = trajectory_to_dict(each)
            redactor.learn([texts[name] for name in ("messages", "turns", "scenario", "final_answer")])
        redactor.learn_mailbox(addresses_in(db))
        redactor.learn_names(names_in(db))
        trajectories = [redacted(each, redactor.record) for each in trajectories]
    note = "Redacted: names and addresses are replaced; other facts in texts stay" if is_redacted else ""
    files = format.write(trajectories, note)
    if format.is_file:
        write_out(target, files[""])
    else:
        with new_folder(target) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)
    what = "redacted" if is_redacted else "with email text"
    result_console(json=json).print(f"{target}: {counted(len(trajectories), 'trajectory')}, {what}", soft_wrap=True)
    if is_redacted:
        say(f"{note}: read it before you share it.")
    if json:
        print_json({"out": target, "num_trajectories": len(trajectories), "redacted": is_redacted})
