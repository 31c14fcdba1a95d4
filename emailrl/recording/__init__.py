"""Trajectories and metrics on disk: JSON lines that survive a crash, and an index of where each trajectory lies."""

from emailrl.recording.index import Entry, TrajectoryIndex
from emailrl.recording.lines import (
    JsonlWriter,
    MetricsWriter,
    Record,
    encode,
    finite,
    keep_records,
    mend,
    numbered_records,
    read_records,
    write_records,
)
from emailrl.recording.trajectories import (
    TrajectoryWriter,
    read_trajectories,
    trajectory_from_dict,
    trajectory_in_line,
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
    "encode",
    "finite",
    "keep_records",
    "mend",
    "numbered_records",
    "read_records",
    "read_trajectories",
    "trajectory_from_dict",
    "trajectory_in_line",
    "trajectory_to_dict",
    "write_records",
    "write_trajectories",
]
