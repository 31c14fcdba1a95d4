"""Inspect trajectories: locate their files, read training's notes on them, decode their tokens."""
