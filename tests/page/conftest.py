"""Fixtures of trajectories to look inside."""

from two_turns import tokenizer_folder, trajectory

__all__ = ["tokenizer_folder", "trajectory"]
