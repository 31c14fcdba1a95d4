"""The people of a mailbox by their addresses, and which names are unambiguous."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from emailrl.facts.names import name_of


class People:
    """The addresses of one mailbox, and their names."""

    def __init__(self, addresses: Iterable[str], me: str) -> None:
        self.me = me
        self.addresses = frozenset(addresses)

    def called(self, address: str) -> str:
        """Return the name of the person behind an address, or the address itself if namesakes use other domains."""
        name = name_of(address)
        if name is None or len({namesake.partition("@")[2] for namesake in self._by_name[name]}) > 1:
            return address
        return name

    def is_person(self, address: str) -> bool:
        """Whether the name identifies the address."""
        return self.called(address) != address

    def is_me(self, address: str) -> bool:
        """Whether an address is, or by its last name may be, the owner's own."""
        return address == self.me or self._may_be(self.me, address)

    def is_unmistakable(self, address: str) -> bool:
        """Whether no other address of the mailbox may belong to the same person."""
        return address in self._unmistakable

    @cached_property
    def _by_name(self) -> dict[str, set[str]]:
        named: defaultdict[str, set[str]] = defaultdict(set)
        for address in self.addresses:
            if (name := name_of(address)) is not None:
                named[name].add(address)
        return named

    @cached_property
    def _unmistakable(self) -> frozenset[str]:
        carriers: defaultdict[str, set[str]] = defaultdict(set)
        last_names = {name.split()[-1].lower() for name in self._by_name}
        for address in self.addresses:
            letters = re.sub(r"[^a-z-]", " ", address.partition("@")[0])
            for word in letters.split():
                for start in range(min(3, len(word))):  # farmer, dfarmer, djfarmer
                    if word[start:] in last_names:
                        carriers[word[start:]].add(address)
        return frozenset(
            next(iter(addresses))
            for name, addresses in self._by_name.items()
            if len(addresses) == 1 and len(carriers[name.split()[-1].lower()]) == 1
        )

    @staticmethod
    def _may_be(mine: str, address: str) -> bool:
        last = re.split(r"[._]+", mine.partition("@")[0])[-1]
        return len(last) >= 4 and last in address.partition("@")[0]
