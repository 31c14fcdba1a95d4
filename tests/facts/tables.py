"""Texts and what the grammar reads in them, by the test that they belong to: a row for each call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
