"""Finds template questions in a mailbox database, balances kinds and inboxes, and splits them by inbox."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from random import Random

from emailrl.base.errors import EmailRLError
from emailrl.mail.connection import opened
from emailrl.questions.inbox.mailbox import Inbox, Mail, MailReader
from emailrl.questions.inbox.owners import choose_inboxes, open_inbox
from emailrl.questions.splits import MANY, SPLITS, split_of_mail
from emailrl.questions.template.usual import KINDS, Finding, Kind
from emailrl.records.trajectory import Scenario

DEFAULT_LIMIT = 6000
MAX_PER_MAIL = 2
"""Maximum questions per email."""
EARLIEST = "1990"
"""Earlier emails are not used: their sender's clock was not set."""
SPARE = 6
"""Candidates to find per question, so that there is a choice."""


@dataclass(slots=True)
class _Candidate:
    scenario: Scenario
    sources: frozenset[str]
    subject: str
    """Identifies the thread of its email."""


def generate(
    db: Path,
    *,
    inboxes: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 42,
    allow_shared: bool = False,
    max_source_mails: int | None = None,
    kinds: Sequence[Kind] = KINDS,
    progress: Callable[[int, int], None] | None = None,
) -> list[Scenario]:
    """Generate questions with one provable answer each, deterministic by ``seed``.

    ``inboxes`` are the mailboxes to ask about (default: the ``MAX_INBOXES`` largest), ``limit`` is the maximum number
    of questions (default ``DEFAULT_LIMIT``), and ``kinds`` is ``KINDS`` or ``HARD_KINDS``. Kinds and inboxes get equal
    shares as far as their emails allow. Splits share no source email and no inbox; with ``allow_shared`` and fewer
    than three inboxes, subjects are split instead. A question with more than ``max_source_mails`` sources is left out
    unless its kind needs all of them. ``progress(done, total)`` is called after each mailbox.

    Raises ``UsageError`` for a file that is not a mail database or an inbox without mail, ``EmailRLError`` for a
    damaged database or if no question is found.
    """
    limit = DEFAULT_LIMIT if limit is None else limit
    found: defaultdict[str, list[list[_Candidate]]] = defaultdict(list)
    with opened(Path(db)) as connection:
        reader = MailReader(connection)
        chosen = choose_inboxes(reader, inboxes)
        # If sizes determine the splits, a smaller limit must find as much, or its questions would be split differently.
        wanted = limit if len(chosen) >= MANY else max(limit, DEFAULT_LIMIT)
        most = max(10, SPARE * wanted // (len(chosen) * len(kinds)))
        for done, inbox in enumerate(chosen, 1):
            box = open_inbox(reader, inbox)
            for kind, candidates in _candidates(box, kinds, most, seed, max_source_mails).items():
                found[kind].append(candidates)
            if progress is not None:
                progress(done, len(chosen))
    everything = list(chain.from_iterable(chain.from_iterable(found.values())))
    asked = {scenario.id for scenario in _balanced(found, wanted)}  # as if everything were one split
    sizes: dict[str, Counter[str]] = {inbox: Counter() for inbox in chosen}
    for candidate in everything:
        sizes[candidate.scenario.inbox_address][candidate.subject] += candidate.scenario.id in asked
    split_of = split_of_mail(sizes, allow_shared=allow_shared)
    for candidate in everything:
        candidate.scenario.split = split_of(candidate.scenario.inbox_address, candidate.subject)
    scenarios = _balanced(found, limit)
    if not scenarios:
        raise EmailRLError("No email yields a question with one provable answer.", "The mailboxes may be too small.")
    return scenarios


def _candidates(
    box: Inbox, kinds: Sequence[Kind], most: int, seed: int, max_source_mails: int | None
) -> dict[str, list[_Candidate]]:
    """At most ``most`` questions per kind about one mailbox, from its emails in random order."""
    found: dict[str, list[_Candidate]] = {}
    datable = [mail for mail in box.mails if mail.sent_at >= EARLIEST]
    for kind in kinds:
        rng = Random(f"{seed}/{box.me}/{kind.name}")
        candidates: list[_Candidate] = []
        for mail in rng.sample(datable, len(datable)):
            if len(candidates) == most:
                break
            finding = kind.find(box, mail, rng)
            if finding is None:
                continue
            if max_source_mails and not kind.needs_all and len(finding.sources) > max_source_mails:
                continue
            if candidate := _candidate(box, kind, mail, finding, rng):
                candidates.append(candidate)
        found[kind.name] = candidates
    return found


def _candidate(box: Inbox, kind: Kind, mail: Mail, finding: Finding, rng: Random) -> _Candidate | None:
    """The question in words, or None if its words give the answer away."""
    wording = rng.choice(kind.wordings)
    slots = {"topic": mail.topic.text, "person": box.people.called(mail.sender)} | finding.slots
    shown = " ".join(text for name, text in slots.items() if f"{{{name}}}" in wording)
    if _words(finding.answer) & _words(shown):
        return None
    named = sorted(source.message_id for source in finding.sources or [mail])
    identity = "/".join((box.me, kind.name, *named))
    sources = named if kind.answerable else []
    scenario = Scenario(
        id=f"{kind.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
        question=wording.format(**slots),
        answer=finding.answer,
        message_ids=sources,
        inbox_address=box.me,
        query_date=finding.ask_day.isoformat(),
        how_realistic=realism_of(box, kind, mail),
        kind=kind.name,
        answerable=kind.answerable,
        needs_all=kind.needs_all,
    )
    return _Candidate(scenario, frozenset(sources), mail.topic.key or mail.message_id)


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) >= 4}


def realism_of(box: Inbox, kind: Kind, mail: Mail) -> float:
    """Estimate how realistic a question is, 0.1 to 1: people ask about emails from people with readable subjects."""
    realism = kind.realism
    if box.received(mail) and not box.people.is_person(mail.sender):
        realism -= 0.2
    letters = [c for c in mail.topic.text if not c.isspace()]
    if sum(c.isalpha() for c in letters) < 0.75 * len(letters):
        realism -= 0.2
    if box.is_serial(mail):
        realism -= 0.2
    if "unsubscribe" in mail.body.lower():
        realism -= 0.4
    if mail.topic.text.isupper():
        realism -= 0.1
    if len(mail.topic.words) > 8:
        realism -= 0.1
    return round(min(max(realism, 0.1), 1.0), 1)


def _balanced(found: dict[str, list[list[_Candidate]]], limit: int) -> list[Scenario]:
    """Take questions in turn from each kind, and within a kind from each mailbox, up to ``limit``.

    Stops once only a quarter of the kinds have any left, as more would unbalance the set. Leaves out repeated wordings
    and questions on an email that is used by another split or has ``MAX_PER_MAIL`` questions.
    """
    queues = {kind: deque(_by_turns(lists)) for kind, lists in found.items() if any(lists)}
    too_few = len(queues) // 4
    split_of: dict[str, str] = {}
    uses: Counter[str] = Counter()
    asked: set[tuple[str, str]] = set()
    scenarios: list[Scenario] = []
    while len(queues) > too_few and len(scenarios) < limit:
        for kind in list(queues):
            queue = queues[kind]
            while queue:
                candidate = queue.popleft()
                if _is_free(candidate, split_of, uses, asked):
                    scenarios.append(candidate.scenario)
                    break
            if not queue:
                del queues[kind]
            if len(scenarios) == limit:
                break
    return sorted(scenarios, key=lambda s: (SPLITS.index(s.split or "test"), s.inbox_address, s.id))


def _by_turns(lists: list[list[_Candidate]]) -> Iterator[_Candidate]:
    """The first of every list, then the second of every list, and so on."""
    for rank in zip_longest(*lists):
        yield from (candidate for candidate in rank if candidate is not None)


def _is_free(candidate: _Candidate, split_of: dict[str, str], uses: Counter[str], asked: set[tuple[str, str]]) -> bool:
    """Claim the candidate's sources and wording unless another split or question has them."""
    scenario = candidate.scenario
    question = (scenario.inbox_address, scenario.question)
    split = scenario.split or "test"
    if question in asked or any(
        split_of.get(source, split) != split or uses[source] >= MAX_PER_MAIL for source in candidate.sources
    ):
        return False
    asked.add(question)
    uses.update(candidate.sources)
    split_of.update(dict.fromkeys(candidate.sources, split))
    return True
