"""The ``emailrl`` command: one Typer app, one thin file per command, and one place where errors become exit codes. A
command's file is imported only when the command runs, and does not import torch, transformers or a database driver at
the top, so ``--help`` stays fast."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Annotated, Any, Final, NoReturn, TextIO

import typer
import typer.main
from typer import Option
from typer.core import TyperCommand, TyperGroup

import emailrl
from emailrl.base import process
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import cut, guard_streams, one_line, tell
from emailrl.cli.output import say

LONGEST_ERROR: Final = 2000  # in characters; the name of a tensor or a key may be a megabyte long

_GROUPS: Final = {
    "Start": {
        "quickstart": "Run the whole cycle on a demo mailbox, in minutes.",
        "doctor": "Show what is installed, what is missing, how to fix it.",
        "plan": "Estimate the memory, tokens, time and cost of a run.",
        "trust": "Trust a folder's settings: servers, keys and code.",
    },
    "Mail and questions": {
        "gen-db": "Build the searchable email database from a mailbox.",
        "gen-questions": "Generate questions with known answers from a database.",
        "forget": "Remove a mailbox from everything below a folder.",
    },
    "Training": {
        "sft": "Fine-tune a policy on scripted or recorded trajectories.",
        "rollout": "Answer questions with a policy and record trajectories.",
        "train": "Train a policy's LoRA adapter on its own rollouts.",
        "serve": "Start and supervise vLLM servers for training.",
        "checkpoints": "List, show and prune the checkpoints of training runs.",
    },
    "Results": {
        "benchmark": "Measure policies on the test questions.",
        "inspect-trajectory": "Show a trajectory turn by turn, token by token.",
        "report": "Write an HTML page of a run, with curves and failures.",
        "view": "Serve the page of a run on this machine, live.",
        "export": "Export a checkpoint as an adapter or merged weights.",
        "convert": "Convert trajectories for other viewers and trainers.",
    },
    "Agent": {
        "ask": "Ask a mailbox a question, and see the source emails.",
        "mcp": "Serve a mailbox to MCP clients: search, read, ask.",
        "serve-agent": "Serve the agent to chat clients (OpenAI's API).",
        "publish-env": "Write the task as a package for a hub.",
    },
}
COMMANDS: Final = {name: told for group in _GROUPS.values() for name, told in group.items()}
"""Summaries for ``emailrl --help``; a command's module has its name and, as docstring, its help."""


class _Command(TyperCommand):
    """Lists the options in groups, those without one first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                own = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _Commands(TyperGroup):
    """Imports a command on first use."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            name = cmd_name.replace("-", "_")
            module = importlib.import_module(f"emailrl.cli.{name}")
            found = getattr(module, name)
            if not isinstance(found, typer.Typer):
                command, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
                found.command(cls=_Command, help=module.__doc__)(command)
            self.commands[cmd_name] = typer.main.get_command(found)
            self.commands[cmd_name].short_help = COMMANDS[cmd_name]
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(max(map(len, COMMANDS))), told) for name, told in group.items()])


app = typer.Typer(
    name="emailrl",
    cls=_Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

# Newer Typer versions vendor click, older ones import it: in both, this is the base class of usage errors.
_WrongUsage: Final[type[typer.BadParameter]] = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def emailrl_command(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    """Build a searchable mailbox, let a language model search it, train that model, benchmark it and export it.

    Examples:

    \b
      emailrl quickstart                                the cycle on demo mail
      emailrl gen-db --source demo --db data/demo.db    index a mailbox
      emailrl train --model nano --learning-rate 2e-3   train a policy on it
      emailrl benchmark                                 measure the checkpoint
      emailrl inspect-trajectory --verbose              look inside a trajectory
    """
    if version:
        print(f"emailrl {emailrl.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif os.environ.get("WORLD_SIZE", "1") != "1" and context.invoked_subcommand not in ("train", "sft"):
        raise UsageError(f"emailrl {context.invoked_subcommand} runs as one process.", "Start it without torchrun.")


def _prepare_streams() -> TextIO | None:
    """Make printing safe: a terminal may lack or obey characters. Returns the file in place of a closed stdout."""
    closed = None
    if not sys.stdout:
        import tempfile  # slow

        closed = tempfile.TemporaryFile("w+")  # noqa: SIM115
    sys.stdout = sys.stdout or closed
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    guard_streams()
    # A library's progress bar consists of control characters.
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return closed


_OTHER_WORDS: Final = {  # of other programs for options, by which they are suggested
    "--num-generations": ("group_size",),
    "--limit": ("num_questions", "num_scenarios"),
    "--out": ("output", "output_dir", "save_path"),
    "--max-steps": ("steps",),
}


def _usage(error: Any) -> tuple[str, str]:
    """A usage error as a sentence that quotes the value, which newer Typer omits, and what to do about it."""
    from pydantic import ValidationError

    command = error.ctx.command_path if error.ctx else "emailrl"
    hint = f"See {command} --help."
    is_unknown = error.message.startswith("No such option") and error.ctx is not None
    text = (error.message if is_unknown else error.format_message()).rstrip(".").replace("Value error, ", "")
    if isinstance(cause := error.__cause__, ValidationError):
        text = text.replace("Input should be", f"{cause.errors(include_url=False)[0]['input']!r} should be")
    if is_unknown:
        hint = _instead(error, command) or hint
    elif error.ctx and "unexpected extra argument" in error.message:
        parameters = error.ctx.command.params
        options = [each.opts[0] for each in parameters if each.param_type_name == "option" and not each.is_flag]
        if len(options) > 1 and all(each.param_type_name == "option" for each in parameters):
            hint = f"Values need an option, such as {options[0]} or {options[1]}; see {command} --help."
    return text if text.endswith("?") else f"{text}.", hint


def _instead(error: Any, command: str) -> str | None:
    """The option of this command that an unknown one stands for, else the setting of that name, else the nearest."""
    from emailrl.settings.names import by_name, nearest

    word = error.option_name.lstrip("-").replace("-", "_")
    options = {spelling: each.name for each in error.ctx.command.params for spelling in each.opts}
    leaf = by_name().get(word)
    known = [spelling for spelling, name in options.items() if leaf and name == leaf.key]
    meant = next(iter([*known, *(spelling for spelling, words in _OTHER_WORDS.items() if word in words)]), None)
    if meant not in options:
        trains = command in ("emailrl train", "emailrl plan")  # they read all settings of training
        if leaf and error.ctx.parent and (trains or leaf.section not in ("training", "algorithm", "evaluation")):
            return f"Set {leaf.env_names[0]} in the environment or emailrl.toml; options: {command} --help."
        words = {spelling.lstrip("-").replace("-", "_"): spelling for spelling in options if spelling.startswith("--")}
        meant = words.get(nearest(word, words) or "")
    return f"Did you mean {meant}? See {command} --help." if meant else None


def fail(message: str, hint: str, exit_code: int) -> NoReturn:
    """Exit with one line on stderr, ``error: message hint``; with several ranks, one per host prints it."""
    process.report(cut(one_line(f"error: {message} {hint}"), LONGEST_ERROR), say)
    sys.exit(exit_code)


@process.ending_with("vllm")
def main() -> NoReturn:
    """Run the command line; exit codes: 0 success, 1 failure, 2 usage or settings error, 130 interrupted."""
    closed = _prepare_streams()
    process.install()
    try:
        result = app(prog_name="emailrl", standalone_mode=False)
        sys.stdout.flush()
        if closed and closed.tell():
            fail("The output was lost: stdout is closed.", "Leave it open, or redirect it to a file or /dev/null.", 1)
    except EmailRLError as error:
        fail(error.message, error.hint, error.exit_code)
    except _WrongUsage as error:
        fail(*_usage(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        result = process.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) closed the pipe; flushing the buffer at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = 1
    except ImportError as error:
        from emailrl.base.install import explained  # reads packages' metadata, which a good start need not

        fail((said := explained(error)).message, said.hint, 1)
    except UnicodeEncodeError as error:
        if not "\udc80" <= error.object[error.start] <= "\udcff":
            raise
        # Python's surrogate for an undecodable byte, which only occurs in file names and arguments.
        fail("A file or folder name here is not valid UTF-8, which some libraries reject.", "Rename it.", 1)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Change its permissions or use another path." if isinstance(error, PermissionError) else ""
        hint = "Free some space, or write elsewhere." if is_full else hint
        where = error.filename or ("The output cannot be written" if is_full else "")
        fail(f"{where}: {error.strerror}{'.' * bool(hint)}" if where else str(error), hint, 1)
    if result == process.INTERRUPTED:
        process.ending()
        if process.reports():
            tell("interrupted")
    sys.exit(result if isinstance(result, int) else 0)
