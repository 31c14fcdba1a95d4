"""Every command in a folder of a stranger's: no key and no mail leaves, no code of it runs, nothing outside changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_server import LocalServer, QuietHandler
from runs.run_files import plant, tree
from tiny import make_checkpoint, make_database

from emailrl.base.http import tell
from emailrl.cli.quickstart import MARK

COMMANDS = {
    "benchmark": ["benchmark", "--limit", 1],
    "rollout": ["rollout", "--limit", 1],
    "train": ["train", "--max-steps", 1],
    "train --resume": ["train", "--resume", "auto"],
    "gen-questions": ["gen-questions", "--generator", "llm", "--yes", "--out", "new.jsonl"],
    "gen-db": ["gen-db"],
    "plan": ["plan"],
    "export": ["export"],
    "sft": ["sft", "--max-steps", 1],
    "prune": ["checkpoints", "prune", "--yes"],
    "ask": ["ask", "When?"],
}
LOOKING = ("doctor", "inspect-trajectory", "report", "checkpoints list")
KEYS = ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "JUDGE_API_KEY", "GENERATOR_API_KEY", "VLLM_API_KEY", "REWARD_API_KEY")
PWN = "open('PWNED', 'w')\ndef f(*arguments, **named):\n    open('PWNED', 'w')\n    return 1.0\n"
WRITERS = {
    "train": (["train", "--max-steps", 1], ["outputs", "outputs/grpo_masked"]),
    "train --resume": (["train"], ["outputs/grpo_masked/training.log", "outputs/grpo_masked/.replaced"]),
    "sft": (["sft", "--out", "s", "--resume", "auto"], ["s", "s/training.log", "s/policy"]),
    "benchmark": (["benchmark", "--limit", 1], ["outputs", "outputs/benchmarks"]),
    "benchmark --out": (
        ["benchmark", "--limit", 1, "--out", "b", "--overwrite"],
        ["b", "b/trajectories", "b/results.csv"],
    ),
    "rollout": (["rollout", "--limit", 1], ["outputs/rollouts", "outputs/rollouts/rollout-001.jsonl.index"]),
    "rollout --out": (
        ["rollout", "--limit", 1, "--out", "r.jsonl", "--overwrite"],
        ["r.jsonl", "r.conditions.json", "r.jsonl.index"],
    ),
    "export": (["export", "--checkpoint", "latest"], ["outputs", "outputs/exports"]),
    "quickstart": (["quickstart", "--max-steps", 1], [f"quickstart/{name}" for name in ("demo.db", "outputs", "new")]),
    "prune": (["checkpoints", "prune", "--keep", 0, "--yes"], ["outputs/grpo_masked/.checkpoint-1.trash"]),
    "gen-questions": (["gen-questions", "--out", "new.jsonl", "--overwrite"], ["new.jsonl"]),
    "gen-questions beside": (["gen-questions", "--db", "data/m.db"], ["data", "data/m.db", "data/m_questions.jsonl"]),
    "gen-db": (["gen-db", "--overwrite", "--db", "data/m.db"], ["data", "data/m.db"]),
    "page": (["report", "outputs/grpo_masked", "--html", "page.html", "--overwrite"], ["page.html"]),
    "serve": (["serve", "--port", 18099], ["outputs/servers", "outputs/servers/vllm-18099.log"]),
    "judge": (["rollout", "--limit", 1, "--out", "n.jsonl"], ["outputs/judge_cache.sqlite"]),
    "generator": (COMMANDS["gen-questions"], ["outputs/generator_cache.sqlite"]),
}
"""Commands that write, each with what may be a link instead of its own."""


@dataclass
class Listener:
    url: str
    heard: list[tuple[str, str]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Keeps the first line and the Authorization of whatever is sent to it, and answers 404."""
    heard: list[tuple[str, str]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            heard.append((self.requestline, self.headers.get("Authorization", "")))
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

    with closing(LocalServer(Handler)) as server:
        yield Listener(f"http://127.0.0.1:{server.port}", heard)


@pytest.fixture
def here(here: Path, monkeypatch) -> Path:
    """A folder with hostile code too; every key of the user's is in the environment."""
    (here / "pwn.py").write_text(PWN)
    for name in KEYS:
        monkeypatch.setenv(name, "sk-mine")
    tell.cache_clear()
    return here


def settings(folder: Path, lines: str) -> None:
    (folder / "emailrl.toml").write_text(
        'model_name = "model"\ndb = "mail.db"\nquestions = "questions.jsonl"\nmax_tokens = 6\nmax_turns = 2\n'
        'wandb_mode = "disabled"\njudge_retries = 0\nreward_retries = 0\nopenai_retries = 0\ngenerator_retries = 0\n'
        'allow_shared_inbox = true\nsource = "demo"\n' + lines
    )


def everything(url: str) -> str:
    return (
        f'openai_base_url = "{url}/v1"\njudge_base_url = "{url}/v1"\ngenerator_base_url = "{url}/v1"\n'
        f'vllm_urls = "{url}"\nengine = "openai"\njudge = "llm"\nenvironment = "pwn.py:f"\nreward = "{url}/score"\n'
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("file", ["emailrl.toml", ".env"])
def test_nothing_is_sent_and_nothing_is_run(emailrl, here: Path, listener: Listener, command: list, file: str) -> None:
    settings(here, everything(listener.url) if file == "emailrl.toml" else "")
    if file == ".env":
        (here / ".env").write_text(
            "".join(f"{name}_BASE_URL={listener.url}/v1\n" for name in ("OPENAI", "JUDGE", "GENERATOR"))
            + "EMAILRL_ENGINE=openai\nEMAILRL_JUDGE=llm\nEMAILRL_REWARD=pwn:f\nEMAILRL_ENVIRONMENT=pwn.py:f\n"
        )
    before = {path.name for path in here.iterdir()}
    code, out, err = emailrl(*command)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith(f"error: {file} sets "), line
    assert line.endswith("this folder is not trusted. Read its settings, then: emailrl trust .")
    assert listener.heard == [] and {path.name for path in here.iterdir()} == before


@pytest.mark.parametrize("command", LOOKING)
def test_who_only_looks_is_let_in(emailrl, here: Path, listener: Listener, command: str) -> None:
    settings(here, everything(listener.url))
    _, out, err = emailrl(*command.split())
    assert ("not trusted" in " ".join((out + err).split())) == (command == "doctor")  # doctor wraps its lines
    assert listener.heard == [] and not (here / "PWNED").exists()


def test_once_trusted_it_all_happens_and_every_host_is_named(emailrl, here: Path, listener: Listener) -> None:
    """The same folder, trusted: what the tests above look for would be seen if it happened."""
    settings(here, everything(listener.url).replace('"pwn.py:f"', '"mail"'))
    host = listener.url.removeprefix("http://")
    _, _, err = emailrl("rollout", "--limit", 1, "--trust")
    assert f"trusted from now on: emailrl.toml sets openai_base_url = '{listener.url}/v1', which gets" in err
    assert sorted(line for line in err.splitlines() if line.startswith("mail goes")) == sorted(
        f"mail goes to {host}: {use}" for use in ("policy", "judge", "reward")
    )
    assert ("POST /v1/chat/completions HTTP/1.1", "Bearer sk-mine") in listener.heard
    heard = len(listener.heard)
    emailrl("benchmark", "--limit", 1)  # for good
    assert len(listener.heard) > heard


def test_trusted_code_runs_until_it_changes(emailrl, here: Path) -> None:
    settings(here, 'reward = "pwn.py:f"\njudge = "offline"')
    assert emailrl("rollout", "--limit", 1)[0] == 2 and not (here / "PWNED").exists()
    assert emailrl("rollout", "--limit", 1, "--trust")[0] == 0 and (here / "PWNED").exists()
    (here / "pwn.py").write_text(PWN + "# more\n")
    code, _, err = emailrl("rollout", "--limit", 1)
    assert code == 2 and "has changed since it was trusted" in err
    assert emailrl("rollout", "--limit", 1, "--reward", "pwn.py:f")[0] == 0  # the user names it


def test_a_settings_file_of_wandbs_gets_no_key(emailrl, here: Path, listener: Listener, monkeypatch) -> None:
    settings(here, 'judge = "offline"')
    (here / "wandb").mkdir()
    (here / "wandb" / "settings").write_text(f"[default]\nbase_url = {listener.url}\n")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    code, _, err = emailrl("train", "--max-steps", 1)
    assert code == 2 and f"wandb/settings sets base_url = '{listener.url}'" in err and listener.heard == []
    assert emailrl("benchmark", "--limit", 1)[0] == 0  # asks nobody at W&B


@pytest.mark.parametrize(
    ("command", "code"),
    [("-m emailrl doctor", 0), ("-P -m emailrl train --nproc 2 --db none.db", 2)],  # `emailrl` has no -m
    ids=["module", "ranks"],
)
def test_python_and_its_ranks_do_not_import_from_the_folder(here: Path, command: str, code: int) -> None:
    """Neither a package that takes emailrl's or another's place nor a module of the standard library's name; doctor
    imports torch in processes of its own."""
    settings(here, 'judge = "offline"')
    names = ["rich.py", "pydantic.py", "transformers.py", "torch.py"]
    for name in [*names, "contextlib.py", "emailrl/__init__.py"] if code else names:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("open('PWNED', 'w')\nraise SystemExit('pwned')\n")
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=here, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code and not (here / "PWNED").exists(), done.stderr


def test_a_matplotlibrc_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\ntext.latex.preamble: \\input{pwn}\n")
    script = (
        "import matplotlib, pathlib; from emailrl.training.report import new_figure, save;"
        "assert matplotlib.rcParams['text.usetex'];"  # it was read
        "save(new_figure(2, 2), pathlib.Path('curve')); assert not matplotlib.rcParams['text.usetex']"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (tmp_path / "curve.png").stat().st_size > 1000, done.stderr


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(emailrl, here: Path, tmp_path_factory, writer: str) -> None:
    command, names = WRITERS[writer]
    resume = 'resume = "outputs/grpo_masked"\n' if writer == "train --resume" else ""
    settings(here, resume + ("" if writer == "judge" else 'judge = "offline"\n'))
    (here / "quickstart").mkdir()
    (here / "quickstart" / "emailrl.toml").write_text(MARK)
    victim = tmp_path_factory.mktemp("victim")
    make_checkpoint(victim / "checkpoint-1", here / "model")
    for file in ("training.log", "metrics.jsonl", "page.html", "new.jsonl", "r.jsonl"):
        (victim / file).write_text("{}")
    before = tree(victim)
    for name in names:
        for kind in ("link to a file", "link to a folder", "broken link"):
            shutil.copytree(victim, here / "outputs" / "grpo_masked")
            plant(here / name, kind, victim)
            code, out, err = emailrl(*command)
            assert (code, out) == (2, "") and err.splitlines()[-1].startswith("error: "), (name, kind, err)
            assert tree(victim) == before, (name, kind)
            (here / name).unlink()
            shutil.rmtree(here / "outputs", ignore_errors=True)


@pytest.mark.parametrize("command", [["gen-db", "--overwrite"], ["gen-db", "--append"], ["gen-questions"]])
def test_the_only_database_is_not_written_through_a_link(
    emailrl, tmp_path: Path, tmp_path_factory, command: list
) -> None:
    victim = tmp_path_factory.mktemp("victim")
    make_database(victim / "mine.db")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "demo.db").symlink_to(victim / "mine.db")
    (tmp_path / "demo.mbox").write_text("From a Mon Jan  1 00:00:00 2001\nFrom: a@x\nTo: b@x\n\nbody\n")
    before = tree(victim)
    code, _, err = emailrl(*command, *(["--source", "demo.mbox"] if command[0] == "gen-db" else []))
    assert code == 2 and f"--db {victim / 'mine.db'}" in err and tree(victim) == before


def test_a_shipped_quickstart_names_no_files(emailrl, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "emailrl.toml").write_text(f'{MARK}\n[store]\ndb = "/victim/mine.db"\n')
    (tmp_path / ".env").write_text("EMAILRL_DB=/victim/mine.db\nEMAILRL_QUESTIONS=/victim/q\nOUTPUT_DIR=/victim/o\n'")
    settled: list[Path] = []

    def end(db: Path, **_: object) -> None:
        settled.append(db)
        raise KeyboardInterrupt

    monkeypatch.setattr("emailrl.questions.load.write_demo", end)
    assert emailrl("quickstart", "--out", tmp_path)[0] == 130
    assert settled == [tmp_path / "demo.db"]
