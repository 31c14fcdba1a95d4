"""The processes that train one policy together: what each knows of the others, and how they start and end.

Everything is passed one object, ``Ranks``. In a process alone its methods return what they are given; among several
they are collectives, which every rank calls in the same order. Rank 0 plays, rates and records; between updates the
others wait in ``RankGroup.follow``.
"""

from emailrl.ranks.alone import ALONE, Ranks
from emailrl.ranks.group import LostRank, RankGroup
from emailrl.ranks.joining import joined
from emailrl.ranks.place import Place

__all__ = ["ALONE", "LostRank", "Place", "RankGroup", "Ranks", "joined"]
