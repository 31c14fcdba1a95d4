"""Token ids back to text, one piece per id, without torch: only ``tokenizers`` and the ``tokenizer.json`` that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import list_checkpoints
from emailrl.model.resolve import resolve_model
from emailrl.page.place import benchmark_record, read_object
from emailrl.records.trajectory import Trajectory

_PARTIAL = "\ufffd"


class TokenTexts:
    """Decodes ids with one tokenizer file."""

    def __init__(self, folder: Path) -> None:
        """Read ``folder/tokenizer.json``; raises ``EmailRLError`` where it is absent or unreadable."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the Rust side raises bare Exception for a malformed file
            raise EmailRLError(f"{file}: {error}") from error
        self._alone: dict[int, str] = {}

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
            text = self.text(pending) if len(pending) > 1 else self._alone.get(token_id)
            if text is None:  # decoded once: a page decodes millions
                text = self._alone[token_id] = self.text([token_id])
            if text.endswith(_PARTIAL) and len(pending) < 4:
                pieces.append("")
                continue
            pieces.append("".join(f"⟨{i}⟩" for i in pending) if _PARTIAL in text else text)
            pending = []
        if pending:
            pieces[-1] = "".join(f"⟨{i}⟩" for i in pending)
        return pieces

    def fits(self, trajectory: Trajectory) -> bool:
        """Whether this tokenizer made the trajectory: its decoded completions contain the recorded assistant texts."""
        texts = [message.content for message in trajectory.messages if message.role == "assistant"]
        sampled = [turn.completion_ids for turn in trajectory.turns]
        pairs = [(ids, text) for ids, text in zip(sampled, texts, strict=False) if ids]
        return bool(pairs) and all(text.strip() in self.text(ids) for ids, text in pairs)


def fitting_tokenizer(folders: Iterable[Path], trajectory: Trajectory) -> TokenTexts | None:
    """Return the first tokenizer that decodes the recorded ids to the recorded texts, or None."""
    found = (TokenTexts(folder) for folder in folders if (folder / "tokenizer.json").is_file())
    return next((tokens for tokens in found if tokens.fits(trajectory)), None)


def tokenizer_folders(file: Path, model_name: str) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer of ``file``, likeliest first: the run's or benchmark's checkpoints,
    then the base models that these and a rollout's conditions name, then ``model_name``."""
    run_dir = file.parent.parent if file.parent.name == "trajectories" else file.parent
    checkpoints = list_checkpoints(run_dir)
    yield from (checkpoint.path for checkpoint in checkpoints)
    measured = benchmark_record(file)
    if measured.get("checkpoint"):
        yield Path(str(measured["checkpoint"]))
    rolled_out = read_object(file.with_suffix(".conditions.json"))
    bases = [checkpoint.metadata.base_model for checkpoint in checkpoints]
    for name in dict.fromkeys([*bases, measured.get("base_model"), rolled_out.get("model"), model_name]):
        if name and (folder := _model_folder(str(name))) is not None:
            yield folder


def _model_folder(name: str) -> Path | None:
    """A model's local files (packaged, local or in the hub's cache); does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = resolve_model(name)
    except EmailRLError:
        return None  # the folder is gone: the view shows ids instead of text, with a note
    if isinstance(found, Path):
        return found
    cached = try_to_load_from_cache(found, "tokenizer.json")
    return Path(cached).parent if isinstance(cached, str) else None
