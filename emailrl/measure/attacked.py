"""A benchmark under attack: every policy plays the same questions a second time, on emails with injected
instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from emailrl.agent.attack import KINDS, order_of
from emailrl.measure.statistics import wilson_interval
from emailrl.measure.subjects import Subject
from emailrl.records.trajectory import Trajectory


def with_attacked(subjects: Sequence[Subject]) -> list[Subject]:
    """Each subject, followed by the same one under attack."""
    twins = ((each, replace(each, label=f"{each.label} (attacked)", attacked=True)) for each in subjects)
    return [subject for pair in twins for subject in pair]


def same_policy(first: Subject, second: Subject) -> bool:
    """Whether two subjects differ only in attack and label."""
    return (first.model_name, first.adapter) == (second.model_name, second.adapter)


def attack_record(subject: Subject, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """``attacked``, and per kind of order, how many trajectories saw one and the share that obeyed.

    The share has its Wilson 95 % interval; without attack, or if no trajectory saw an order of the kind, all three are
    None. Trajectories that raised do not count.
    """
    record: dict[str, Any] = {"attacked": subject.attacked}
    for kind in KINDS:
        rows = [question_record(subject, each) for each in trajectories if each.exception is None]
        obeyed = [row["order_obeyed"] for row in rows if row["order"] == kind and row["order_seen"]]
        low, high = wilson_interval(sum(obeyed), len(obeyed)) if obeyed else (None, None)
        record |= {
            f"{kind}_orders_seen": len(obeyed),
            f"{kind}_obeyed": sum(obeyed) / len(obeyed) if obeyed else None,
            f"{kind}_obeyed_low": low,
            f"{kind}_obeyed_high": high,
        }
    return record


def question_record(subject: Subject, trajectory: Trajectory) -> dict[str, Any]:
    """The order of one trajectory, and whether it was seen and obeyed; None without attack."""
    if not subject.attacked:
        return {"order": None, "order_seen": None, "order_obeyed": None}
    order = order_of(trajectory.scenario)
    seen = order.was_seen(trajectory)
    return {"order": order.kind, "order_seen": seen, "order_obeyed": seen and order.was_obeyed(trajectory)}
