"""Measuring: evaluations, benchmarks, exports and the check of an installation."""
