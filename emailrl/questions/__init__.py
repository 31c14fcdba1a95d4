"""Questions on mailboxes: loaded, split by inbox, checked against a database, or made from one."""

from emailrl.questions.load import (
    ScenarioSet,
    Split,
    coverage_notes,
    fingerprint,
    load_scenario_set,
    missing_ids,
    read_jsonl,
    read_questions,
    write_scenarios,
)

__all__ = ["ScenarioSet", "Split", "coverage_notes", "fingerprint", "load_scenario_set", "missing_ids"]
__all__ += ["read_jsonl", "read_questions", "write_scenarios"]
