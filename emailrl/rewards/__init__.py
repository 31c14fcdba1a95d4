"""Rewards: the answer check, the named rewards, and the scorer made of one of each.

Only ``match`` is imported here: it compares texts and needs no other library. The scorer reads settings, and may ask a
server.
"""

from emailrl.rewards.matching import match

__all__ = ["match"]
