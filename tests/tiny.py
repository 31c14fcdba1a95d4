"""A random policy of a few thousand parameters, a checkpoint of it and a mailbox of three mails: real, in a second."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from emailrl.agent.play import Collector, build_stage
from emailrl.checkpoints import Checkpoint, Metadata, write_checkpoint
from emailrl.mail.build import build_database
from emailrl.mail.sources.reading import RawEmail
from emailrl.model.policy import load_policy
from emailrl.records.trajectory import Scenario
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import Settings, load_settings
from emailrl.sft.small_model import train_tokenizer

ANN = "ann@example.com"
TEXTS = ("When does the lease end? The lease ends on 31 May 2002.", "Ann will pay the deposit.")


def make_model(folder: Path, *, texts: Sequence[str] = TEXTS, **changes: Any) -> Path:
    """Copy a two-layer Qwen3 with the packaged policy's tokenizer recipe, trained on ``texts``, and chat template; each
    is made once in a process. ``changes``: of its config, and its ``dtype`` and ``seed``."""
    return shutil.copytree(_model(tuple(texts), tuple(changes.items())), folder, dirs_exist_ok=True)


@cache
def _model(texts: tuple[str, ...], changes: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _make_model(folder, texts, **dict(changes))


def _make_model(folder: Path, texts: Sequence[str], *, dtype: str = "float32", seed: int = 1, **changes: Any) -> Path:
    tokenizer = train_tokenizer(texts)
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, **shape | ids | changes)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_metadata(**fields: Any) -> Metadata:
    """A checkpoint's metadata with these fields."""
    others: dict[str, Any] = {
        "run_id": "r", "kind": "checkpoint", "step": 5, "mode": "masked", "algorithm": "grpo", "base_model": "nano",
        "lora": {}, "metrics": {}, "settings": {}, "parent": None, "seed": 42, "versions": {},
        "database_fingerprint": "d", "questions_fingerprint": "q", "git_commit": None,
    }  # fmt: skip
    return Metadata(**(others | fields))


def make_checkpoint(
    path: Path, model: Path, *, metrics: dict[str, Any] | None = None, step: int = 7, **given: str
) -> Checkpoint:
    """Write a checkpoint of ``model`` with a random adapter that changes every linear layer, and more settings."""
    settings = load_settings({"model_name": str(model), "lora_rank": 4} | given, environ={}, cwd=path.parent)
    policy = load_policy(settings, trainable=True)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in policy.trainable_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    kind = path.name.partition("-")[0] if path.name.startswith(("checkpoint-", "final")) else "best"
    metadata = make_metadata(
        run_id="grpo_masked", kind=kind, step=step, base_model=policy.base_model, lora=policy.lora,
        metrics=metrics or {}, settings=settings.model_dump(mode="json"), database_fingerprint="",
    )  # fmt: skip
    return write_checkpoint(path, metadata, policy.save_adapter)


def cut_matrices(folder: Path) -> Path:
    """Leave one number of every matrix of an adapter; its rank is then 1, and broadcasting would hide the rest."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({name: tensor[:1, :1].contiguous() for name, tensor in load_file(file).items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 1}))
    return folder


def make_database(db: Path) -> Path:
    """Build a database of three mails in Ann's inbox."""
    bodies = ("The lease ends on 31 May 2002.", "The deposit is 4500 dollars.", "Lunch on Friday?")
    mails = [
        RawEmail(f"<m{n}@x>", f"mail {n}", "bob@example.com", [ANN], [], [], datetime(2001, 5, n + 1, tzinfo=UTC), body)
        for n, body in enumerate(bodies)
    ]
    build_database(mails, db)
    return db


def make_questions(count: int) -> list[Scenario]:
    """Questions about the lease, all of the test split."""
    return [
        Scenario(f"q{n}", "When does the lease end?", "31 May 2002", ["<m0@x>"], ANN, "2001-06-01", split="test")
        for n in range(count)
    ]


def settings_of(tmp_path: Path, **overrides: Any) -> Settings:
    """Settings of a run under ``tmp_path`` that generates little."""
    given = {"output_dir": tmp_path / "outputs" / "grpo", "max_tokens": 8, "max_turns": 2} | overrides
    return load_settings(given, environ={}, cwd=tmp_path)


def collector_of(settings: Settings, policy: Any, engine: Any) -> Any:
    """A collector that plays with the engine and scores as the settings say."""
    play = build_stage(settings, policy).on(engine)
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent)
    return Collector(play, scorer.score, settings.agent, settings.training.mode)
