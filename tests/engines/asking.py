"""Asking a stub of a chat server through its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.openai import OpenAIEngine
from emailrl.records.trajectory import Message
from emailrl.settings import Settings, load_settings

SEARCH = ("search_emails", '{"keywords": ["lease"]}')


ANSWER = ("return_final_answer", '{"answer": "31 May 2002", "sources": ["<m0@x>"]}')


def settings_for(url: str, tmp_path: Path, **overrides: Any) -> Settings:
    given = {"engine": "openai", "openai_base_url": url, "model_name": "org/big", "openai_retries": 2, "max_turns": 3}
    return load_settings(given | overrides, environ={}, cwd=tmp_path)


def ask(engine: OpenAIEngine, *texts: str, max_tokens: int = 9) -> list[Completion]:
    sampling = SamplingParams(max_tokens, temperature=0.5)
    return engine.generate(
        [Request(str(n), sampling, messages=[Message("user", text)], seed=n) for n, text in enumerate(texts)]
    )
