"""What the files of a folder may not decide before the folder is trusted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from emailrl.base.errors import EmailRLError
from emailrl.settings import Settings, Untrusted, folder_risks, load_settings, trust_folder
from emailrl.settings.names import leaves
from emailrl.settings.trust import folders, record_file, remember, wandb_risks

READ_ONLY = {"questions", "chat_template", "smol_base", "adapter"}
"""Paths that are only ever read."""

EVIL = "https://evil.example/v1"
ADDRESSES = ("openai_base_url", "judge_base_url", "generator_base_url", "vllm_urls")


def load(folder: Path, overrides: dict[str, Any] | None = None, /, **environ: str) -> Settings:
    return load_settings(overrides, cwd=folder, environ=environ)


def refused(folder: Path, overrides: dict[str, Any] | None = None, /, **environ: str) -> str:
    with pytest.raises(Untrusted) as caught:
        load(folder, overrides, **environ)
    assert caught.value.exit_code == 2
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    (folder / "emailrl.toml").write_text(text)
    return folder


def test_no_setting_that_names_a_server_code_or_a_place_to_write_is_forgotten() -> None:
    """A new setting that looks like one is marked where it is declared, or this fails."""
    for leaf in leaves():
        told = f"{leaf.field} {leaf.default} {leaf.description}"
        if str in leaf.kinds and not leaf.choices:
            if re.search(r"https?:|\b(urls?|uri|host|endpoint|server|servers)\b|_urls?\b", told) and leaf.field not in (
                "vllm_adapter_path_map",  # folders as the servers see them
                "generator_model",  # names at their servers
                "judge_model",
            ):
                assert leaf.address, leaf.field
            if re.search(r"module:|\.py\b|attention:", told):
                assert leaf.code, leaf.field
        if leaf.is_path:
            assert leaf.written or leaf.field in READ_ONLY, leaf.field
    assert {leaf.field for leaf in leaves() if leaf.address} == {*ADDRESSES, "reward", "teacher"}
    assert {leaf.field for leaf in leaves() if leaf.code} == {
        "reward", "environment", "attn_implementation", "vllm_engine_args"
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        *(f'{name} = "{EVIL}"' for name in (*ADDRESSES, "teacher")),
        'openai_base_url = "http://127.0.0.1:8000/v1"',
        'openai_base_url = "http://api.openai.com/v1"',  # anyone on the way reads the key
        'openai_base_url = "https://api.openai.com@evil.example/v1"',
        'openai_base_url = "https://me:key@api.openai.com/v1"',  # an account of its own
        'openai_base_url = "https://api.openai.com.evil.example/v1"',
        'openai_base_url = "https://evil.example\\\\@api.openai.com/"',
        'openai_base_url = "https://api.openai.com:8443/v1"',
        'openai_base_url = "https://api.openai.com/v1?x=@evil.example"',
        'openai_base_url = "https://api.opena\u0456.com/v1"',  # a Cyrillic i
        'openai_base_url = " https://api.openai.com/v1"',
        'openai_base_url = "https://api.openai.com/v1\\n"',
        'vllm_urls = "https://openrouter.ai/api,https://evil.example"',
        'vllm_urls = "https://openrouter.ai/api"',  # no vLLM server, whose key is none of OpenRouter's
        'reward = "https://api.openai.com/v1"',
        'reward = "https://evil.example/score"',
        'reward = "HTTP://evil.example/score"',
        'reward = "pwn.py:f"',
        'reward = "pwn:f"',
        'reward = "os:system"',
        'reward = "/tmp/pwn.py:f"',
        'environment = "pwn.py:Env"',
        'attn_implementation = "stranger/kernel"',
        'attn_implementation = "paged|stranger/kernel"',
        'output_dir = "../outputs"',
        'output_dir = "/tmp/outputs"',
        'output_dir = "~/outputs"',
        'output_dir = "."',
        'export_dir = "a/../../b"',
        'tensorboard_dir = "/tmp/x"',
        'judge_cache = "/tmp/cache.sqlite"',
        'generator_cache = "../cache.sqlite"',
        'resume = "../other/outputs/grpo_masked"',
        '[rewards]\njudge_base_url = "https://evil.example"',
        'rewards.judge_base_url = "https://evil.example"',
        *(f'{leaf.key} = "sk-theirs"' for leaf in leaves() if leaf.secret),
    ],
)
def test_refused(tmp_path: Path, line: str) -> None:
    told = refused(toml(tmp_path, line))
    assert told.startswith("emailrl.toml sets ") and "is not trusted" in told and "emailrl trust " in told
    assert "sk-theirs" not in told and "\n" not in told


@pytest.mark.parametrize(
    "line",
    [
        'model_name = "nano"\ndb = "mail.db"\nquestions = "q.jsonl"\nmax_steps = 4\njudge = "offline"',
        'model_name = "./model"',
        'db = "/data/mail.db"\nquestions = "/data/q.jsonl"',
        'openai_base_url = "https://api.openai.com/v1"',
        'openai_base_url = "https://API.OpenAI.com:443/v1"',
        'judge_base_url = "https://eu.openrouter.ai/api/v1"',
        'generator_base_url = "https://openrouter.ai/api/v1"',
        'vllm_urls = ""',
        'reward = "simple"\nenvironment = "mail"\nattn_implementation = "flash_attention_2"',
        'output_dir = "outputs/grpo"\nexport_dir = "out"\njudge_cache = "a/../cache.sqlite"',
        'resume = "auto"',
        'resume = "outputs/grpo_masked/final"',
        'openai_api_key = ""',
    ],
)
def test_needs_no_trust(tmp_path: Path, line: str) -> None:
    load(toml(tmp_path, line))


def test_dotenv_reaches_no_other_program(tmp_path: Path) -> None:
    names = ("HF_ENDPOINT", "WANDB_BASE_URL", "HTTPS_PROXY", "PYTHONPATH", "OPENAI_ORG_ID", "OPENAI_BASE_URL")
    (tmp_path / ".env").write_text("".join(f"{name}={EVIL}\n" for name in names))
    assert ".env sets OPENAI_BASE_URL = " in refused(tmp_path)
    before = dict(os.environ)
    load_settings(cwd=tmp_path, trust=True)
    assert dict(os.environ) == before


def test_flags_and_the_environment_are_the_users_own(tmp_path: Path) -> None:
    toml(tmp_path, f'openai_base_url = "{EVIL}"\nreward = "pwn.py:f"')
    assert load(tmp_path, {"reward": "simple"}, OPENAI_BASE_URL=f"{EVIL}/2").openai.openai_base_url == f"{EVIL}/2"
    assert "reward" in refused(tmp_path, OPENAI_BASE_URL="http://127.0.0.1:1/v1")


def test_the_line_names_what_would_happen_and_how_much_more(tmp_path: Path) -> None:
    toml(tmp_path, 'judge_base_url = "http://u:hush@127.0.0.1:9/v1"\nreward = "pwn.py:f"')
    assert refused(tmp_path, JUDGE_API_KEY="sk-mine") == (
        "emailrl.toml sets reward = 'pwn.py:f', which runs that code (and 1 more setting): this folder is not trusted. "
        f"Read its settings, then: emailrl trust {min(os.path.relpath(tmp_path), str(tmp_path), key=len)}"
    )
    [judge] = [risk for risk in folder_risks(tmp_path) if risk.setting == "judge_base_url"]
    assert str(judge) == (
        "emailrl.toml sets judge_base_url = 'http://127.0.0.1:9/v1',"
        " which gets questions and answers, with RULER whole conversations, and your JUDGE_API_KEY"
    )


def test_trust_is_given_once_and_asked_for_anew_when_a_value_changes(tmp_path: Path) -> None:
    toml(tmp_path, f'judge_base_url = "{EVIL}"\nmax_steps = 3')
    trust_folder(tmp_path)
    assert load(tmp_path, JUDGE_API_KEY="sk-mine").rewards.judge_base_url == EVIL
    toml(tmp_path, f'judge_base_url = "{EVIL}"\nmax_steps = 4')
    load(tmp_path)
    toml(tmp_path, f'judge_base_url = "{EVIL}/2"')
    assert "this folder has changed since it was trusted" in refused(tmp_path)
    toml(tmp_path, f'openai_base_url = "{EVIL}"')  # the same value for another setting
    refused(tmp_path)
    toml(tmp_path, f'judge_base_url = "{EVIL}"')
    assert remember(tmp_path, None) and not remember(tmp_path, None)
    refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"), [("mine.py:f", "mine.py"), ("pkg.mine:f", "pkg/mine.py"), ("pkg.mine:f", "pkg/__init__.py")]
)
def test_changed_code_is_asked_for_anew(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / file).write_text("one = 1\n")
    toml(tmp_path, f'reward = "{name}"')
    trust_folder(tmp_path)
    load(tmp_path)
    (tmp_path / file).write_text("one = 2\n")
    assert "has changed" in refused(tmp_path)


def test_a_folder_is_known_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    toml(tmp_path / "real", f'judge_base_url = "{EVIL}"')
    (tmp_path / "real" / "below").mkdir()
    load(tmp_path / "real" / "below")  # a folder above is not read
    trust_folder(tmp_path / "link")
    load(tmp_path / "real")
    assert list(folders()) == [str((tmp_path / "real").resolve())]
    other = tmp_path / "other"
    other.mkdir()
    refused(toml(other, f'judge_base_url = "{EVIL}"'))


def test_only_who_builds_the_database_needs_trust_for_one_outside(tmp_path: Path) -> None:
    toml(tmp_path, 'db = "/tmp/mail.db"')
    load(tmp_path)
    with pytest.raises(Untrusted, match="is outside the folder"):
        load_settings(cwd=tmp_path, environ={}, builds_db=True)
    trust_folder(tmp_path)
    load_settings(cwd=tmp_path, environ={}, builds_db=True)


def test_who_only_looks_goes_on_without_the_folders_addresses_keys_and_code(tmp_path: Path) -> None:
    toml(tmp_path, f'judge_base_url = "{EVIL}"\nreward = "pwn.py:f"\njudge_api_key = "x"\nmax_turns = 3')
    seen = load_settings(cwd=tmp_path, environ={}, looks_only=True)
    assert (seen.rewards.reward, seen.rewards.judge_api_key, seen.agent.max_turns) == ("art_e", None, 3)
    assert seen.rewards.judge_base_url == "https://openrouter.ai/api/v1"


def test_the_record_lies_in_the_users_configuration_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    toml(tmp_path / "here", 'openai_api_key = "sk-theirs"')
    trust_folder(tmp_path / "here")
    path = tmp_path / "config" / "emailrl" / "trusted.json"
    assert record_file() == path and path.stat().st_mode & 0o777 == 0o600
    assert "sk-theirs" not in path.read_text() and list(json.loads(path.read_text())) == [str(tmp_path / "here")]
    path.write_text("{")
    with pytest.raises(EmailRLError, match=r"trusted\.json cannot be read"):
        load(tmp_path / "here")


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_wandbs_own_settings_file(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "settings"
    path.write_text("[default]\nmode = offline\nproject = p\nentity = e\nbase_url = https://api.wandb.ai\n")
    assert wandb_risks(tmp_path) == []
    path.write_text("[default]\nbase_url = http://u:hush@127.0.0.1:1\napi_key = sk-theirs\n")
    assert [(risk.setting, risk.value) for risk in wandb_risks(tmp_path)] == [
        ("base_url", "'http://127.0.0.1:1'"),
        ("api_key", "(hidden)"),
    ]
    path.write_text("[DEFAULT]\nbase_url = https://evil.example\n[default]\n")
    assert [risk.setting for risk in wandb_risks(tmp_path)] == ["base_url"]


def test_engine_arguments_are_shown_unless_they_hold_a_secret(tmp_path: Path) -> None:
    toml(tmp_path, """vllm_engine_args = '{"kv_cache_dtype": "fp8"}'""")
    assert [risk.value for risk in folder_risks(tmp_path)] == ["""'{"kv_cache_dtype": "fp8"}'"""]
    toml(tmp_path, """vllm_engine_args = '{"api_key": "hush"}'""")
    assert [risk.value for risk in folder_risks(tmp_path)] == ["(hidden)"]
    toml(tmp_path, 'reward = "https://evil.example/score?api_key=hush"')  # where it goes must be seen
    assert [risk.value for risk in folder_risks(tmp_path)] == ["'https://evil.example/score?api_key=***'"]
