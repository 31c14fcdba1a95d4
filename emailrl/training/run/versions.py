"""The policy after each step, in ``policy/v-N`` for samplers, with the hashes of its files in ``versions.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from emailrl.checkpoints import remove_checkpoints, sha256_of
from emailrl.disk import naming, replace_bytes
from emailrl.errors import EmailRLError
from emailrl.policy.load import Policy

Hashes = dict[str, str]
"""SHA-256 by file name."""

_RECORD: Final = TypeAdapter(dict[str, Hashes])


def version_of(step: int) -> str:
    """The name of the policy after ``step``, as trajectories record it."""
    return f"v-{step:06d}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one run."""

    run_dir: Path

    def at(self, step: int) -> Path:
        """The directory of the policy after ``step``."""
        return self.run_dir / "policy" / version_of(step)

    def save(self, step: int, policy: Policy) -> None:
        """Write the policy after ``step``, whose directory is then never written again."""
        version = self.at(step)
        beside = version.with_name(f".{version.name}")
        beside.mkdir(parents=True, exist_ok=True)
        with naming(version):
            policy.save_adapter(beside, with_tokenizer=False)  # samplers get ids
        kept = {path.name for path in self._all()}
        record = {name: hashes for name, hashes in self._recorded().items() if name in kept}
        record[version.name] = _hashes(beside)
        replace_bytes(self.run_dir / "versions.json", (json.dumps(record, indent=2) + "\n").encode())
        beside.rename(version)

    def remove_outdated(self, *, newest: int, needed: range) -> None:
        """Remove all but the last ``newest`` versions and those after the ``needed`` steps.

        Atomically, like checkpoints: a killed process must not leave a partial version that looks complete.
        """
        kept = {self.at(step) for step in needed}
        remove_checkpoints(path for path in self._all()[:-newest] if path not in kept)

    def check(self) -> None:
        """Raise EmailRLError for a version that is not what the run wrote, before it is sampled from."""
        recorded = self._recorded()
        for version in self._all():
            if _hashes(version) != recorded.get(version.name):
                raise EmailRLError(
                    f"{version} is not what the run wrote.", "Delete it: the checkpoint's policy samples in its place."
                )

    def _all(self) -> list[Path]:
        return sorted((self.run_dir / "policy").glob("v-*"))

    def _recorded(self) -> dict[str, Hashes]:
        """What the run wrote, by version; nothing if the file is damaged."""
        file = self.run_dir / "versions.json"
        try:
            return _RECORD.validate_json(file.read_bytes()) if file.exists() else {}
        except ValidationError:
            return {}


def _hashes(folder: Path) -> Hashes:
    """Of all files; empty if one cannot be read."""
    try:
        return {name: sha256_of(folder / name) for name in sorted(path.name for path in folder.iterdir())}
    except OSError:
        return {}
