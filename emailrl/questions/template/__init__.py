"""Generates questions with exact answers from any mailbox database, without a model.

Each kind of question searches an email for one provable answer; ``generate`` balances and splits what they find.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random

from emailrl.base.errors import EmailRLError
from emailrl.mail.database import opened
from emailrl.questions.inbox import Inbox, Mail, MailReader, choose_inboxes, open_inbox
from emailrl.questions.splits import MANY, in_order, split_of_mail
from emailrl.questions.template.hard import HARD_KINDS
from emailrl.questions.template.usual import KINDS, Kind
from emailrl.records.trajectory import Scenario

__all__ = ["DEFAULT_LIMIT", "HARD_KINDS", "KINDS", "generate"]

DEFAULT_LIMIT = 6000
MAX_PER_MAIL = 2  # Maximum questions per email.
EARLIEST = "1990"  # Earlier emails are not used: their sender's clock was not set.
SPARE = 6  # Candidates to find per question, so that there is a choice.

_Candidate = tuple[Scenario, str]  # A question, and the thread of its email.


def generate(
    db: Path,
    *,
    inboxes: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 42,
    allow_shared: bool = False,
    max_source_mails: int | None = None,
    kinds: Sequence[Kind] = KINDS,
    names: bool = False,
    machine_mail: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Scenario]:
    """Generate questions with one provable answer each, deterministic by ``seed``. At most ``limit`` (default
    ``DEFAULT_LIMIT``), on ``inboxes`` (default: the ``MAX_INBOXES`` largest); kinds and inboxes get equal shares as far
    as their emails allow. Splits share no source email and no inbox; with ``allow_shared`` and fewer than three
    inboxes, subjects are split instead. A question with more than ``max_source_mails`` sources is left out unless its
    kind needs all of them. ``names`` calls people as emails write them, for agents that are shown names;
    ``machine_mail`` asks also about what programs sent. ``progress(done, total)`` is called after each mailbox. Raises
    ``UsageError`` for a file that is not a mail database or an inbox without mail, ``EmailRLError`` if no question is
    found."""
    limit = DEFAULT_LIMIT if limit is None else limit
    found: defaultdict[str, list[list[_Candidate]]] = defaultdict(list)
    with opened(Path(db)) as connection:
        reader = MailReader(connection, names=names)
        chosen = choose_inboxes(reader, inboxes)
        # If sizes determine the splits, a smaller limit must find as much, or its questions would be split differently.
        wanted = limit if len(chosen) >= MANY else max(limit, DEFAULT_LIMIT)
        most = max(10, SPARE * wanted // (len(chosen) * len(kinds)))
        for done, inbox in enumerate(chosen, 1):
            box = open_inbox(reader, inbox)
            for kind in kinds:
                found[kind.name].append([*islice(_candidates(box, kind, seed, max_source_mails, machine_mail), most)])
            if progress is not None:
                progress(done, len(chosen))
    everything = list(chain.from_iterable(chain.from_iterable(found.values())))
    asked = {scenario.id for scenario in _balanced(found, wanted)}  # as if everything were one split
    sizes: dict[str, Counter[str]] = {inbox: Counter() for inbox in chosen}
    for scenario, thread in everything:
        sizes[scenario.inbox_address][thread] += scenario.id in asked
    split_of = split_of_mail(sizes, allow_shared=allow_shared)
    for scenario, thread in everything:
        scenario.split = split_of(scenario.inbox_address, thread)
    scenarios = _balanced(found, limit)
    if not scenarios:
        raise EmailRLError("No email yields a question with one provable answer.", "The mailboxes may be too small.")
    return in_order(scenarios)


def _candidates(
    box: Inbox, kind: Kind, seed: int, max_source_mails: int | None, machine_mail: bool
) -> Iterator[_Candidate]:
    """Yield questions of a kind about one mailbox, from its emails in random order. None gives its answer away."""
    datable = [mail for mail in box.mails if mail.sent_at >= EARLIEST and (machine_mail or not mail.machine)]
    rng = Random(f"{seed}/{box.me}/{kind.name}")
    for mail in rng.sample(datable, len(datable)):
        finding = kind.find(box, mail, rng)
        if finding is None or (max_source_mails and not kind.needs_all and len(finding.sources) > max_source_mails):
            continue
        wording = rng.choice(kind.wordings)
        slots = {"topic": mail.topic.text, "person": box.called(mail.sender)} | finding.slots
        shown = " ".join(text for name, text in slots.items() if f"{{{name}}}" in wording)
        if _words(finding.answer) & _words(shown):
            continue
        named = sorted(source.message_id for source in finding.sources or [mail])
        identity = "/".join((box.me, kind.name, *named))
        scenario = Scenario(
            id=f"{kind.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
            question=wording.format(**slots),
            answer=finding.answer,
            message_ids=named if kind.answerable else [],
            inbox_address=box.me,
            query_date=finding.ask_day.isoformat(),
            how_realistic=realism_of(box, kind, mail),
            kind=kind.name,
            answerable=kind.answerable,
            needs_all=kind.needs_all,
        )
        yield scenario, mail.thread_key


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) >= 4}


def realism_of(box: Inbox, kind: Kind, mail: Mail) -> float:
    """Estimate how realistic a question is, 0.1 to 1: people ask about emails from people with readable subjects."""
    letters = [c for c in mail.topic.text if not c.isspace()]
    against = (
        (0.2, box.received(mail) and box.called(mail.sender) == mail.sender),
        (0.2, sum(c.isalpha() for c in letters) < 0.75 * len(letters)),
        (0.2, box.is_serial(mail)),
        (0.4, "unsubscribe" in mail.body.lower()),
        (0.1, mail.topic.text.isupper()),
        (0.1, len(mail.topic.words) > 8),
    )
    realism = kind.realism
    for less, applies in against:
        realism -= less * applies
    return round(min(max(realism, 0.1), 1.0), 1)


def _balanced(found: dict[str, list[list[_Candidate]]], limit: int) -> list[Scenario]:
    """Take questions in turn from each kind, and within a kind from each mailbox, up to ``limit``. Stops once only a
    quarter of the kinds have any left, as more would unbalance the set. Leaves out repeated wordings and questions on
    an email that is used by another split or has ``MAX_PER_MAIL`` questions."""
    queues = {
        kind: deque(scenario for turn in zip_longest(*lists, fillvalue=(None, "")) for scenario, _ in turn if scenario)
        for kind, lists in found.items()
        if any(lists)
    }
    too_few = len(queues) // 4
    split_of: dict[str, str] = {}
    uses: Counter[str] = Counter()
    asked: set[tuple[str, str]] = set()
    scenarios: list[Scenario] = []
    while len(queues) > too_few and len(scenarios) < limit:
        for kind, queue in list(queues.items()):
            while queue and len(scenarios) < limit:
                scenario = queue.popleft()
                question, split = (scenario.inbox_address, scenario.question), scenario.split or "test"
                if question in asked or any(
                    split_of.get(source, split) != split or uses[source] >= MAX_PER_MAIL
                    for source in scenario.message_ids
                ):
                    continue
                asked.add(question)
                uses.update(scenario.message_ids)
                split_of.update(dict.fromkeys(scenario.message_ids, split))
                scenarios.append(scenario)
                break
            if not queue:
                del queues[kind]
    return scenarios
