"""Shell blocks taken apart: the simple commands of a script, and whether each could be run as written."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator

import typer
import typer.main
from documents.pages import ROOT

from emailrl.cli.app import app
from emailrl.settings import load_settings
from emailrl.settings.names import by_name, leaves

ENDS = {";", "&&", "||", "|", "&", "(", ")", "do", "done", "then", "fi"}
SETTINGS = {name for leaf in leaves() for name in leaf.env_names}
OTHERS_VARIABLES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTHON"}
SHELL = {"cd", "source", "export", "eval", "for", "echo", "tail", "grep", "head", "ls", "kill", "mkdir", "cp", "seq"}
"""What a block may use of the shell."""
OTHERS = {"vllm", "docker", "git", "torchrun", "tensorboard", "nvidia-smi", "zensical", "wandb"}
"""Programs of others, whose options are theirs."""
NOWHERE = ROOT / "tests"
"""A folder without settings files."""
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands(script: str) -> Iterator[list[str]]:
    """The words of every simple command, without redirections; a loop's variable has its first value."""
    values: dict[str, str] = {}
    text = re.sub(r"\\\n", " ", script)
    for line in text.splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in ENDS:
                words.append(re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), word))
                continue
            if words[:1] == ["for"]:
                values[words[1]] = words[3]
            elif words:
                yield _without_redirections(words)
            words = []


def _without_redirections(words: list[str]) -> list[str]:
    """``a 2> b`` comes as the words a, 2, >, b."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if not re.fullmatch(r">>?&?|<", word):
            kept.append(word)
            continue
        next(rest, None)
        if kept and kept[-1] in ("1", "2"):
            kept.pop()
    return kept


def check(words: list[str]) -> None:
    """Raise AssertionError, or an error of usage, if the command could not be run as written."""
    given: dict[str, str] = {}
    while words and (variable := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0])):
        assert variable[1] in SETTINGS | OTHERS_VARIABLES, f"{variable[1]} is no setting"
        given[variable[1]] = variable[2]
        words = words[1:]
    load_settings(cwd=NOWHERE, environ=given)
    if not words:
        return
    program, *rest = words
    if program == "export":
        check([word for word in rest if "=" in word])
    elif program == "emailrl":
        parse(rest)
    elif program == "make":
        assert {word for word in rest if "=" not in word and not word.startswith("-")} <= TARGETS, words
    elif program in ("pip", "pipx", "uv"):
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= EXTRAS, words
    elif program == "uvx":
        check(rest[2:] if rest[0] == "--from" else rest)
    elif program in ("python", "python3"):
        check_python(rest)
    else:
        assert program in SHELL | OTHERS or program.startswith("."), f"{program}: an unknown program"


def check_python(words: list[str]) -> None:
    """A script exists and knows the flags; a module of this package exists."""
    if words[0] == "-m":
        module = words[1]
        if module == "emailrl":
            parse(words[2:])
        elif module.startswith(("emailrl.", "tests.")):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), words
    elif words[0].startswith("tests/"):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        if "from runner import Bench" in source:
            source += (ROOT / "tests/gpu/runner.py").read_text(encoding="utf-8")
        for flag in re.findall(r"(?:^| )(--[\w-]+)", " ".join(words[1:])):
            assert f'"{flag}"' in source or flag in source, f"{words[0]} has no {flag}"


def parse(words: list[str]) -> None:
    """Parse a command line of ``emailrl`` without running it."""
    command = typer.main.get_command(app)
    context = None
    name = "emailrl"
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"emailrl has no command {name}"
        command = found
    try:
        given = command.make_context(name, list(words), parent=context).params
    except typer.Exit as ended:  # --help, --version
        assert ended.exit_code == 0
        return
    values = {
        key: value for key, value in given.items() if key in by_name() and value and not isinstance(value, bool | list)
    }
    load_settings(values, cwd=NOWHERE, environ={})
