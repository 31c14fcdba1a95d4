"""Questions on mailboxes: loaded, split by inbox, checked against a database, or made from one."""

from emailrl.questions.load import (
    Coverage,
    ScenarioSet,
    Split,
    coverage_notes,
    fingerprint,
    load_scenario_set,
    load_scenarios,
    missing_ids,
    read_questions,
)
from emailrl.questions.rows import read_jsonl, write_scenarios

__all__ = [
    "Coverage",
    "ScenarioSet",
    "Split",
    "coverage_notes",
    "fingerprint",
    "load_scenario_set",
    "load_scenarios",
    "missing_ids",
    "read_jsonl",
    "read_questions",
    "write_scenarios",
]
