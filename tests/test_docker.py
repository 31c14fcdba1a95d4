"""The image: its instructions by a linter and by hand, its entrypoint by a shell, and where Docker runs, a build."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents.commands import SETTINGS, check, parse
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/guides/docker.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def arguments(name: str) -> set[str]:
    return set(re.findall(rf"--{name} (\S+)", DOCKERFILE))


def has_docker() -> bool:
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_linter_finds_nothing() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_everything_it_installs_is_pinned_and_declared() -> None:
    assert re.findall(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.MULTILINE) == ["3.12.11"]
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.12.11")
    bases = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    assert {base for base in bases if ":" in base} == {"python:${PYTHON}-slim-bookworm"}
    assert re.search(r"pip install --no-cache-dir uv==\d+\.\d+\.\d+$", DOCKERFILE, re.MULTILINE)
    installs = re.findall(r"uv pip install (.*?(?:\\\n.*?)*)$", DOCKERFILE, re.MULTILINE)
    assert len(installs) == 3
    assert all(re.search(r"--constraint|--exclude-newer \d{4}-\d\d-\d\d|--no-deps", each) for each in installs)
    assert arguments("extra") == {"smol", "tensorboard", "vllm"} <= PROJECT["optional-dependencies"].keys()


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    first, *rest = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in rest if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE)
    copied = {source for line in copies for source in line.split()[:-1]}
    assert first == "*" and allowed == copied
    assert all((ROOT / name).exists() for name in allowed)


def test_it_does_not_run_as_root_and_its_folders_are_open_to_any_user() -> None:
    final = DOCKERFILE.rpartition("FROM ")[2]
    assert re.findall(r"^USER (.+)$", final, re.MULTILINE) == ["1000"] and "--uid 1000" in final
    [volumes] = re.findall(r"^VOLUME (.+)$", final, re.MULTILINE)
    assert json.loads(volumes) == ["/workspace", "/cache"]
    assert "install --directory --mode=1777 /workspace /cache" in final
    caches = re.findall(r"(\w*(?:CACHE_HOME|CACHE_DIR|HF_HOME))=(\S+)", final)
    assert len(caches) == 4 and all(place.startswith("/cache") for _, place in caches)


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ("python train_grpo.py --mode masked", "emailrl train --mode masked"),
        ("train --preset quick", "emailrl train --preset quick"),
        ("export --out 'my model'", "emailrl export --out 'my model'"),
        ("--help", "emailrl --help"),
        ("emailrl doctor", "emailrl doctor"),
        ("torchrun --nproc-per-node 2 -m emailrl train", "torchrun --nproc-per-node 2 -m emailrl train"),
        ("python -c 'print(1)'", "python -c 'print(1)'"),
    ],
)
def test_the_entrypoint_runs_commands_and_programs(tmp_path: Path, given: str, run: str) -> None:
    [script] = re.findall(r"<<'EOF' /usr/local/bin/entrypoint\n(.*?)^EOF$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    (tmp_path / "entrypoint").write_text(script)
    for program in ("emailrl", "python", "torchrun"):
        (tmp_path / program).write_text('#!/bin/sh\necho "${0##*/}"\nfor word; do echo "$word"; done\n')
        (tmp_path / program).chmod(0o755)
    words = ["/bin/sh", tmp_path / "entrypoint", *shlex.split(given)]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == shlex.split(run)
    assert re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE) == ['["--help"]']


def docker_runs() -> list[list[str]]:
    """Every ``docker run`` of the page, in words."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("docker run")]


def test_the_docker_runs_of_the_page_set_settings_and_run_commands() -> None:
    runs = docker_runs()
    assert ["python", "train_grpo.py", "--mode", "masked"] in [words[-4:] for words in runs]
    for words in runs:
        variables = {value.partition("=")[0] for flag, value in itertools.pairwise(words) if flag == "-e"}
        assert variables <= SETTINGS, words
        image = next(at for at, word in enumerate(words) if word in ("emailrl", "email-agent-grpo"))
        command = words[image + 1 :]
        parse(["train", *command[2:]] if command[:2] == ["python", "train_grpo.py"] else command)


def test_each_script_has_a_command_that_parses() -> None:
    table = PAGE.partition("| script | command |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", table, re.MULTILINE))
    assert len(rows) == len(table.splitlines())
    scripts = {script.removeprefix("python ").removeprefix("./scripts/").split()[0] for script in rows}
    assert scripts == {
        *("train_grpo.py", "run_training.sh", "quick_train.sh", "train.sh", "benchmark.sh", "quick_eval.sh"),
        "generate_database.sh",
    }
    for command in rows.values():
        check(shlex.split(command))


@pytest.mark.slow
@pytest.mark.skipif(not has_docker(), reason="no Docker daemon is reachable")
def test_the_image_builds_and_answers() -> None:
    subprocess.run(["docker", "build", "--tag", "emailrl-test", ROOT], check=True)
    run = ["docker", "run", "--rm", "--user", "4711:4711", "emailrl-test"]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("emailrl ")
    script = "emailrl gen-db --source demo --db demo.db && emailrl benchmark --model nano --db demo.db --limit 4 --json"
    done = subprocess.run(
        [*run, "sh", "-c", f"{script} --questions demo_questions.jsonl"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["num_questions"] == 4
