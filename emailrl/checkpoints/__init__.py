"""The checkpoint registry: plain directories, found by scanning them.

A run directory (``outputs/grpo_masked``, ``outputs/grpo_masked-2``, …) holds ``best_model/``, ``final/`` and
``checkpoint-N/``. Each is filled under a hidden name next to its own, gets ``metadata.json`` last, and is then renamed,
so a directory with its final name is complete. Replacing one takes two renames, with both copies complete in between:

    .best_model.incoming  filled, metadata.json written
    best_model            → .best_model.outgoing
    .best_model.incoming  → best_model
    .best_model.outgoing  removed

``recover`` completes or undoes what a crash left; readers need not wait for it, since they check all three names.
"""

from emailrl.checkpoints.confirmed import CONFIRMED, Confirmed, confirmed_of
from emailrl.checkpoints.finding import (
    MODES,
    SFT,
    checkpoint_of,
    created_after,
    find_checkpoint,
    find_runs,
    newest_run,
    number_of,
    run_folders,
    runs_without_best,
)
from emailrl.checkpoints.reading import (
    METADATA,
    Checkpoint,
    Metadata,
    damage_of,
    incomplete_checkpoints,
    list_checkpoints,
    read_checkpoint,
    sha256_of,
    verify,
)
from emailrl.checkpoints.writing import prunable, prune, recover, remove_checkpoints, write_checkpoint

__all__ = [
    "CONFIRMED",
    "METADATA",
    "MODES",
    "SFT",
    "Checkpoint",
    "Confirmed",
    "Metadata",
    "checkpoint_of",
    "confirmed_of",
    "created_after",
    "damage_of",
    "find_checkpoint",
    "find_runs",
    "incomplete_checkpoints",
    "list_checkpoints",
    "newest_run",
    "number_of",
    "prunable",
    "prune",
    "read_checkpoint",
    "recover",
    "remove_checkpoints",
    "run_folders",
    "runs_without_best",
    "sha256_of",
    "verify",
    "write_checkpoint",
]
