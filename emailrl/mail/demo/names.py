"""Invented names and values that no two splits share.

The checksum of a text assigns it to exactly one split, so training and test worlds have no person, project or value in
common, whatever their seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from zlib import crc32

SPLITS = ("train", "val", "test")

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "dr", "gr", "kr", "pr", "qu", "st", "tr")
_VOWELS = ("a", "a", "e", "e", "i", "i", "o", "o", "u", "ai", "ea", "io", "ou")
_CODAS = ["", "", "", "l", "n", "r", "s", "x", "nd", "rk", "lt"]
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def split_of(text: str) -> str:
    """Return the only split in which a name or value may be drawn."""
    return SPLITS[crc32(text.encode()) % len(SPLITS)]


class Pool:
    """Draws names and values of one split, each at most once."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self._used: set[str] = set()

    def draw(self, make: Callable[[], str]) -> str:
        """Return the first text from ``make`` that belongs to this split and was not drawn before."""
        while True:
            text = make()
            if text not in self._used and split_of(text) == self.split:
                self._used.add(text)
                return text

    def word(self, syllables: int) -> str:
        """Return an invented capitalized word."""
        rng = self.rng
        parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
        return ("".join(parts) + rng.choice(_CODAS)).capitalize()

    def name(self, syllables: int = 2) -> str:
        return self.draw(lambda: self.word(syllables))

    def amount(self) -> str:
        return self.draw(lambda: f"${self.rng.randrange(1_000, 99_999):,}")

    def volume(self) -> str:
        unit = self.rng.choice(("barrels", "tonnes", "pallets", "crates"))
        return self.draw(lambda: f"{self.rng.randrange(1_000, 99_999):,} {unit}")

    def date(self) -> str:
        return self.draw(lambda: f"{self.rng.choice(_MONTHS)} {self.rng.randrange(1, 29)}")

    def time(self) -> str:
        return self.draw(lambda: f"{self.rng.randrange(7, 20)}:{self.rng.randrange(0, 60):02d}")

    def room(self) -> str:
        return self.draw(lambda: f"{self.rng.choice('ABCDEFGHJK')}{self.rng.randrange(100, 999)}")

    def flight(self) -> str:
        letters = "ABDEFKLMQRSTVXZ"
        return self.draw(
            lambda: f"{self.rng.choice(letters)}{self.rng.choice(letters)} {self.rng.randrange(100, 9999)}"
        )

    def phone(self) -> str:
        return self.draw(lambda: f"555-{self.rng.randrange(1000, 9999)}")
