"""What prompts have in common at their beginning, so that it is read once."""

from __future__ import annotations

from collections.abc import Mapping

SHORTEST = 16
"""Beginnings of fewer tokens are not worth a place of their own."""


def common_length(one: list[int], other: list[int]) -> int:
    """Number of leading tokens that two prompts share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


def shared_beginnings(prompts: Mapping[int, list[int]]) -> list[tuple[list[int], int]]:
    """Sets of at least two prompts (by their keys) that begin alike, and how many tokens they share.

    Sorted prompts with a common beginning are neighbours. A set takes in its next neighbour while that makes the tokens
    saved, (members - 1) · length, no fewer; each prompt is in at most one set.
    """
    keys = sorted(prompts, key=lambda key: prompts[key])
    found: list[tuple[list[int], int]] = []
    members, length = keys[:1], 0
    for key in keys[1:]:
        common = common_length(prompts[members[0]], prompts[key])
        if common >= SHORTEST and len(members) * common >= (len(members) - 1) * length:
            members, length = [*members, key], common
            continue
        if len(members) > 1:
            found.append((members, length))
        members, length = [key], 0
    if len(members) > 1:
        found.append((members, length))
    return found
