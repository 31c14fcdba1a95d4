"""Trajectories and metrics on disk: crash-safe JSON lines, and an index of each trajectory's position."""

from emailrl.records.entry import Entry
from emailrl.records.fields import check_metrics, trajectory_from_dict, trajectory_in_line
from emailrl.records.index import TrajectoryIndex
from emailrl.records.lines import (
    JsonlWriter,
    MetricsWriter,
    Record,
    encode,
    finite,
    keep_records,
    mend,
    numbered_records,
    parse_line,
    read_records,
    write_records,
)
from emailrl.records.notes import brief_notes, notes_path, training_notes
from emailrl.records.trajectories import (
    TrajectoryWriter,
    read_trajectories,
    trajectory_to_dict,
    write_trajectories,
)

__all__ = [
    "Entry",
    "JsonlWriter",
    "MetricsWriter",
    "Record",
    "TrajectoryIndex",
    "TrajectoryWriter",
    "brief_notes",
    "check_metrics",
    "encode",
    "finite",
    "keep_records",
    "mend",
    "notes_path",
    "numbered_records",
    "parse_line",
    "read_records",
    "read_trajectories",
    "training_notes",
    "trajectory_from_dict",
    "trajectory_in_line",
    "trajectory_to_dict",
    "write_records",
    "write_trajectories",
]
