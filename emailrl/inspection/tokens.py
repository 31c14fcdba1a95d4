"""Token ids back to text, one piece per id, without torch: only the ``tokenizers`` library and a ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.errors import EmailRLError
from emailrl.records.trajectory import Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PARTIAL = "\ufffd"


class TokenTexts:
    """Decodes ids with one tokenizer file."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path) -> TokenTexts:
        """Read ``folder/tokenizer.json``; raises ``EmailRLError`` where it is absent or unreadable."""
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
        except Exception as error:  # the Rust side raises bare Exception for a malformed file
            raise EmailRLError(f"{folder / 'tokenizer.json'}: {error}") from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` as one string, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return one text per id, joined equal to ``text(ids)`` up to what the decoder normalizes.

        A character split over several ids is shown at the last of them; the earlier ones are ``""``. Bytes that never
        become a character are shown as ``⟨id⟩``.
        """
        pieces: list[str] = []
        pending: list[int] = []
        for token_id in ids:
            pending.append(token_id)
            text = self.text(pending) if len(pending) > 1 else self._text_alone(token_id)
            if text.endswith(_PARTIAL) and len(pending) < 4:
                pieces.append("")
                continue
            pieces.append("".join(f"⟨{i}⟩" for i in pending) if _PARTIAL in text else text)
            pending = []
        if pending:
            pieces[-1] = "".join(f"⟨{i}⟩" for i in pending)
        return pieces

    def _text_alone(self, token_id: int) -> str:
        """The text of one id, decoded once: a page decodes millions."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self.text([token_id])
        return text

    def fits(self, trajectory: Trajectory) -> bool:
        """Whether this tokenizer made the trajectory: its decoded completions contain the recorded assistant texts."""
        texts = [message.content for message in trajectory.messages if message.role == "assistant"]
        sampled = [turn.completion_ids for turn in trajectory.turns]
        pairs = [(ids, text) for ids, text in zip(sampled, texts, strict=False) if ids]
        return bool(pairs) and all(text.strip() in self.text(ids) for ids, text in pairs)
