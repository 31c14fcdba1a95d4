"""What the tokens of a trajectory say."""

from __future__ import annotations

from pathlib import Path

from emailrl.page.tokens import TokenTexts
from emailrl.records.trajectory import Trajectory


def test_a_character_split_over_tokens_stands_at_its_last_id(tokenizer_folder: Path) -> None:
    tokens = TokenTexts.load(tokenizer_folder)
    assert tokens.pieces([4, 7, 8, 9, 2]) == ["Ann", "", "", "€", " paid"]
    assert tokens.pieces([4, 7, 8]) == ["Ann", "", "⟨7⟩⟨8⟩"]


def test_a_tokenizer_fits_only_its_own_trajectories(trajectory: Trajectory, tokenizer_folder: Path) -> None:
    tokens = TokenTexts.load(tokenizer_folder)
    assert tokens.fits(trajectory)
    trajectory.turns[0].completion_ids = [2, 0]
    assert not tokens.fits(trajectory)
