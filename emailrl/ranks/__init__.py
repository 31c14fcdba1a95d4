"""The processes that train one policy together: how they start, communicate and end. Everything goes through one
object, ``Ranks``. In a single process its methods return their arguments; with several ranks they are collectives,
which every rank calls in the same order. Rank 0 samples, scores and records; between updates the others wait in
``RankGroup.follow``."""

from emailrl.ranks.alone import ALONE, Activity, Place, Ranks
from emailrl.ranks.group import LostRank, RankGroup, joined

__all__ = ["ALONE", "Activity", "LostRank", "Place", "RankGroup", "Ranks", "joined"]
