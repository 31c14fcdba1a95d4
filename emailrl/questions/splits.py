"""Splits by mailbox: train, val and test share no inbox, and samples keep the mix of their set.

A split is a set of inboxes, so that nothing read in training helps on the test. Val is taken from the train inboxes if
a set has none. Cut and assignment depend on sizes and a hash of the address, not on the order of a file or a run's
seed, so runs with different seeds are compared on the same questions.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.records.trajectory import Scenario

SPLITS = ("train", "val", "test")
_PURPOSES = {"train": "training", "val": "validation", "test": "testing"}
FEW = ("val", "test", "train")  # The splits of three inboxes, the smallest first; of two, the last two.
MANY = 10  # Number of inboxes from which their sizes do not matter.
TEST_SHARE, VAL_SHARE = 0.25, 0.15  # Shares of the inboxes that are asked about.
FEWEST = 10  # Number of questions per split below which a note says so.
CUT_SHARE = 0.2  # Maximum share of a training set used for val.


def in_order(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Return questions in the order of a file: by split, inbox and id."""
    return sorted(scenarios, key=lambda s: (SPLITS.index(s.split or "test"), s.inbox_address, s.id))


def check_disjoint(scenarios: Iterable[Scenario], source: str, *, allow_shared: bool) -> str | None:
    """Reject a set whose splits share an inbox with a UsageError, or, if allowed, return the note for its tables."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for scenario in scenarios:
        if scenario.split is not None:
            seen[scenario.inbox_address].add(scenario.split)
    shared = sorted(inbox for inbox, splits in seen.items() if len(splits) > 1)
    if not shared:
        return None
    *others, last = (split for split in SPLITS if split in seen[shared[0]])
    one, are = ("an inbox", "is") if len(shared) == 1 else ("inboxes", "are")
    inbox = shared[0] + (f" and {len(shared) - 1} more" if len(shared) > 1 else "")
    if allow_shared:
        return f"splits share {one} ({inbox}): not a test on unseen mailboxes"
    raise UsageError(
        f"{source}: {one.removeprefix('an ')} {inbox} {are} in the splits {', '.join(others)} and {last}.",
        "Splits must not share an inbox. --allow-shared-inbox permits it; results then hold for these mailboxes only.",
    )


def cut_val(train: Sequence[Scenario], size: int, source: str, *, allow_shared: bool) -> tuple[set[str], str | None]:
    """Choose the training questions that serve as val, complete inboxes at a time: their ids, and a note for tables. By
    hash, inboxes with over a third of the questions last, until val holds ``size`` questions or a fifth of the set; one
    inbox always stays. A single inbox is cut by question if ``allow_shared``, else UsageError is raised."""
    goal = min(size, max(1, int(len(train) * CUT_SHARE)))
    counts = Counter(scenario.inbox_address for scenario in train)
    if len(counts) < 2:
        inbox = train[0].inbox_address if train else "none"
        if not allow_shared:
            what = f"{source}: training needs a val split on other inboxes, but there is only one inbox ({inbox})."
            raise UsageError(what, "--allow-shared-inbox takes val from the same inbox (noted in every table).")
        if len(train) < 2:
            raise UsageError(f"{source}: one training question cannot be split into train and val.")
        chosen = sorted(train, key=lambda s: _hash(s.id))[:goal]
        note = f"val is taken from the only train inbox ({inbox}): not a test on unseen mailboxes"
        return {s.id for s in chosen}, note
    chosen_inboxes, taken = set(), 0
    for inbox in sorted(counts, key=lambda inbox: (counts[inbox] * 3 > len(train), _hash(inbox)))[:-1]:
        if taken < goal:
            chosen_inboxes.add(inbox)
            taken += counts[inbox]
    return {s.id for s in train if s.inbox_address in chosen_inboxes}, None


def assign_inboxes(sizes: Mapping[str, int]) -> dict[str, str]:
    """Assign a split to every inbox by its hash; ``sizes`` is the number of questions per inbox. Of two or three, the
    largest is train, the next test and the third val; a single one is test. Of fewer than ``MANY``, an inbox with over
    a third of the questions is train, since the others would leave little to learn from."""
    if len(sizes) <= len(FEW):
        order = sorted(sizes, key=lambda inbox: (sizes[inbox], _hash(inbox)))
        return dict(zip(order, FEW[-len(order) :] if len(order) > 1 else ["test"], strict=True))
    total = sum(sizes.values())
    large = {inbox for inbox, size in sizes.items() if size * 3 > total and len(sizes) < MANY}
    order = sorted(sizes, key=lambda inbox: (inbox in large, _hash(inbox)))
    num_test, num_val = (max(1, round(len(order) * share)) for share in (TEST_SHARE, VAL_SHARE))
    splits = ["test"] * num_test + ["val"] * num_val
    splits += ["train"] * (len(order) - len(splits))
    return dict(zip(order, splits, strict=True))


def split_of_mail(sizes: Mapping[str, Mapping[str, int]], *, allow_shared: bool) -> Callable[[str, str], str]:
    """Return a function from the inbox and subject of a question's email to its split, which is the inbox's. ``sizes``
    is the number of questions per inbox and subject. With ``allow_shared`` and too few inboxes for every split to have
    one, the subject determines the split instead, so that a thread stays in one."""
    if allow_shared and len(sizes) < len(FEW):
        subjects: Counter[str] = Counter()
        for counts in sizes.values():
            subjects.update(counts)
        by_subject = assign_subjects(subjects)
        return lambda inbox, subject: by_subject[subject]
    splits = assign_inboxes({inbox: sum(counts.values()) for inbox, counts in sizes.items()})
    return lambda inbox, subject: splits[inbox]


def assign_subjects(sizes: Mapping[str, int]) -> dict[str, str]:
    """Assign a split to every subject of a shared inbox, so that the questions have the shares of inboxes. ``sizes`` is
    the number of questions per subject; those with over a third of the questions go to train."""
    total = max(sum(sizes.values()), 1)
    splits, before = {}, 0
    for subject in sorted(sizes, key=lambda subject: (sizes[subject] * 3 > total, _hash(subject))):
        middle = (before + sizes[subject] / 2) / total
        splits[subject] = "test" if middle < TEST_SHARE else "val" if middle < TEST_SHARE + VAL_SHARE else "train"
        before += sizes[subject]
    return splits


def split_notes(
    scenarios: Sequence[Scenario], num_inboxes: int, *, is_limited: bool = False, allow_shared: bool = False
) -> list[str]:
    """Return notes, with reasons, if generated questions share inboxes, or leave a split empty or with few questions.
    ``num_inboxes`` were asked about; ``is_limited``: more questions could have been generated."""
    by_subject = allow_shared and num_inboxes < len(FEW)
    counts, expected, notes = Counter(scenario.split for scenario in scenarios), set(SPLITS), []
    if by_subject:
        notes.append("Split by subject: every split has the same mailboxes (noted in every table).")
    elif num_inboxes == 1:
        expected = {"test"}
        notes.append(
            "One mailbox: all questions are for testing. To train as well, name three mailboxes or more, or split "
            "this one by subject (--allow-shared-inbox)."
        )
    elif num_inboxes == 2 and counts["train"] and counts["test"]:
        expected = {"train", "test"}
        notes.append(
            "Two mailboxes: one for training, one for testing. No mailbox is left for choosing the best model. Name a "
            "third, or split them by subject (--allow-shared-inbox)."
        )
    more = "Index more mail of the mailbox, or try other --kinds." if by_subject else "Add mailboxes with --inbox."
    more = "Raise --limit." if is_limited else more
    if empty := [_PURPOSES[split] for split in SPLITS if split in expected and not counts[split]]:
        part = "subjects" if by_subject else "mailboxes"
        reason = f"no question was found in the {part} of that split"
        reason = f"{counted(len(scenarios), 'question')} did not reach every split" if is_limited else reason
        notes.append(f"No questions for {' and '.join(empty)}: {reason}. {more}")
    if few := [f"{counts[split]} for {_PURPOSES[split]}" for split in SPLITS if 0 < counts[split] < FEWEST]:
        notes.append(f"Few questions: {' and '.join(few)}. An accuracy on fewer than {FEWEST} says little. {more}")
    return notes


def mixed_order(scenarios: Sequence[Scenario], seed: int) -> list[Scenario]:
    """Return a seeded order in which every prefix keeps the set's mix of kinds and, within a kind, of inboxes.
    Systematic sampling: item i of a stratum of n gets the key (i + u) / n with u uniform in [0, 1). A limit of 50 is
    therefore a subset of a limit of 100, and the mean over a prefix estimates the mean over the set."""
    rng = random.Random(seed)

    def interleaved(part: Sequence[Scenario], *strata: Callable[[Scenario], str]) -> list[Scenario]:
        if not strata:
            return rng.sample(part, len(part))
        groups: defaultdict[str, list[Scenario]] = defaultdict(list)
        for scenario in part:
            groups[strata[0](scenario)].append(scenario)
        keyed: list[tuple[float, Scenario]] = []
        for _, group in sorted(groups.items(), key=lambda item: item[0]):
            order = enumerate(interleaved(group, *strata[1:]))
            keyed += [((rank + rng.random()) / len(group), scenario) for rank, scenario in order]
        return [scenario for _, scenario in sorted(keyed, key=lambda pair: pair[0])]

    return interleaved(scenarios, lambda s: s.kind or "", lambda s: s.inbox_address)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
