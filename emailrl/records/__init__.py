"""Trajectories, metrics and training's notes on disk: crash-safe JSON lines, and an index of each trajectory file."""

from emailrl.records.index import Entry, TrajectoryIndex, TrajectoryWriter, write_trajectories
from emailrl.records.lines import JsonlWriter, Record, encode, finite, read_records, write_records
from emailrl.records.trajectory import TrainingNote, read_metrics, read_trajectories, training_notes, trajectory_to_dict

__all__ = ["Entry", "JsonlWriter", "Record", "TrainingNote", "TrajectoryIndex", "TrajectoryWriter"]
__all__ += ["encode", "finite", "read_metrics", "read_records", "read_trajectories", "training_notes"]
__all__ += ["trajectory_to_dict", "write_records", "write_trajectories"]
