"""Fetches the replies to a plan's prompts, within a budget, and builds questions of what the database confirms in them.

An unanswered prompt ends the run with an error, once requests in flight are saved. Rerunning sends only the rest.
A reply may be wrong, or controlled by the author of an email in the prompt: see ``check_item``. Unlike a template
question, one that passes cannot be proven to have only one answer in the mailbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from sqlalchemy import select

from emailrl.base import http
from emailrl.base.cache import ReplyCache
from emailrl.base.credentials import check_key, names_openrouter, redacted, secrets_in, without_credentials
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Bill, CostReached, Failed, run, sendable, tell
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Literal, agree, read
from emailrl.facts.words import STOPWORDS, clean
from emailrl.mail.database import emails, opened
from emailrl.questions.inbox import MAX_DAYS_LATER, Mail, spell_day
from emailrl.questions.llm.plan import SYSTEM_PROMPT, TOKENS_A_REPLY, Batch, QuestionPlan, cost_of
from emailrl.questions.splits import in_order
from emailrl.records.trajectory import Scenario
from emailrl.settings import GenerationSettings

if TYPE_CHECKING:
    from emailrl.base.chat import ChatClient, ChatReply

MAX_UNREADABLE = 2  # Maximum attempts at a readable reply; the last reply is kept as is.
MAX_REFUSED = 3  # Number of initial refusals, without an answer, after which the request itself is considered faulty.
_REFUSED: Final = (400, 413, 422)  # Statuses of a rejected prompt: too long for the model, or filtered.


class GenerationError(EmailRLError):
    """The server gave no reply, or the budget is spent."""


@dataclass(slots=True)
class Spending:
    """What a run has spent so far."""

    tokens_in: int = 0
    tokens_out: int = 0
    cost: float | None = None  # Dollars; None if prices are unknown.
    num_answered: int = 0  # Prompts answered by the server in this run.
    num_refused: int = 0


class QuestionWriter:
    """Sends the prompts of a plan to a model."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        openrouter_api_key: SecretStr | None = None,
        timeout: float = 60,
        max_cost: float | None = None,
    ) -> None:
        """``timeout`` is the limit per complete reply in seconds, ``max_cost`` the limit in dollars. The
        OpenRouter key is sent only there. UsageError for a missing key, and for ``max_cost`` without prices."""
        self._settings = settings
        at_openrouter = names_openrouter("GENERATOR_BASE_URL", settings.generator_base_url)
        secret = settings.generator_api_key or (openrouter_api_key if at_openrouter else None)
        self._key = secret.get_secret_value() if secret else ""
        if at_openrouter and not self._key:
            hint = "Set OPENROUTER_API_KEY, or GENERATOR_BASE_URL to another server; --generator template needs none."
            raise UsageError("Generating questions with a model at OpenRouter needs a key.", hint)
        check_key("GENERATOR_API_KEY" if settings.generator_api_key else "OPENROUTER_API_KEY", self._key)
        self._cache = ReplyCache(settings.generator_cache, "GENERATOR_CACHE")
        self._timeout = timeout
        self._bill = Bill(max_cost, "The replies are saved: rerun with a higher --max-cost to continue.")
        no_cost = cost_of(settings, 0, 0)
        if max_cost is not None and no_cost is None:
            raise UsageError("--max-cost needs prices.", "Set GENERATOR_INPUT_PRICE and GENERATOR_OUTPUT_PRICE.")
        tell(settings.generator_base_url, "questions", with_key=bool(self._key))
        self._spending = Spending(cost=no_cost)
        self._failure: EmailRLError | None = None

    def ask(self, plan: QuestionPlan, progress: Callable[[Spending], None] | None = None) -> Spending:
        """Send every prompt that the cache does not answer, and store the replies there. ``progress`` is called after
        each. Raises GenerationError if a prompt stays unanswered, CostReached if the next one may exceed ``max_cost``.
        """
        self._cache.prepare()
        own, spending = self._settings, self._spending
        pending = (batch for batch in plan.batches if self._cache.get(batch.cache_key(own.generator_model)) is None)

        async def work(client: ChatClient) -> None:
            while self._failure is None and (batch := next(pending, None)) is not None:
                try:
                    with self._bill.request(cost_of(own, batch.tokens, TOKENS_A_REPLY) or 0.0):
                        await self._answer(batch, client)
                except EmailRLError as error:
                    self._failure = self._failure or error
                    if isinstance(error, CostReached):
                        return
                if progress is not None:
                    progress(spending)

        async def work_together() -> None:
            from emailrl.base.chat import connect

            async with connect(own.generator_base_url, self._key, timeout=self._timeout) as client:
                await asyncio.gather(*(work(client) for _ in range(own.generator_concurrency)))

        run(work_together())
        if self._failure is not None:
            raise self._failure
        return spending

    async def _answer(self, batch: Batch, client: ChatClient) -> None:
        """Get a readable reply into the cache, or the last unreadable one; count a refused prompt. Raises
        GenerationError when the tries are used up or the server refuses everything."""
        from emailrl.base.chat import ask

        def read(reply: ChatReply) -> tuple[str, int, int]:
            text = sendable(reply.choice.message.text)
            tokens_in, tokens_out = reply.count("prompt_tokens"), reply.count("completion_tokens")
            tokens_in = batch.tokens if tokens_in is None else tokens_in
            return text, tokens_in, len(text) // 3 if tokens_out is None else tokens_out

        async def wait(seconds: float) -> None:
            await http.sleep(seconds)
            if self._failure is not None:
                raise self._failure

        own, spending = self._settings, self._spending
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": batch.prompt}]
        model, limit, retries = own.generator_model, own.generator_max_tokens, own.generator_retries
        for _ in range(MAX_UNREADABLE):
            request = ask(client, read, retries=retries, wait=wait, model=model, messages=messages, max_tokens=limit)
            reply = await request
            if isinstance(reply, Failed):
                if reply.status in _REFUSED:
                    spending.num_refused += 1
                    if spending.num_answered or spending.num_refused < MAX_REFUSED:
                        return
                failure = redacted(reply.why, self._key, *secrets_in(own.generator_base_url)).rstrip(".")
                raise GenerationError(
                    f"{model} at {without_credentials(own.generator_base_url)} returned no reply: {failure}.",
                    "Check GENERATOR_BASE_URL, GENERATOR_MODEL and the key (OPENROUTER_API_KEY, GENERATOR_API_KEY); "
                    "rerun the same command to continue.",
                )
            text, tokens_in, tokens_out = reply
            spending.tokens_in += tokens_in
            spending.tokens_out += tokens_out
            spending.cost = cost_of(own, spending.tokens_in, spending.tokens_out)
            self._bill.pay(cost_of(own, tokens_in, tokens_out), own.generator_base_url)
            if read_reply(text) is not None:
                break
        self._cache.put(batch.cache_key(model), model, text)
        spending.num_answered += 1


MAX_QUESTION_CHARS = 400
MAX_ANSWER_CHARS = 300
MAX_REPLY_CHARS = 100_000  # Maximum characters read from a reply.
MAX_ITEMS = 100  # Maximum questions read per prompt.
MAX_TRIES = 200  # Maximum unreadable brackets in a reply, as each may take time proportional to its nesting.

_DECODER = json.JSONDecoder()
_BEGINNING = re.compile(r'\[\s*[{\]]|\{\s*["}]')
MIN_FOUND: Final = 0.5  # Share of an answer's words that its emails must contain; they must contain all of its facts.

_WORD: Final = re.compile(r"[^\W\d_]+")
_COMMON: Final = STOPWORDS | frozenset(  # Words in nearly every email, so that finding one proves nothing.
    re.findall(
        r"[\w']+",
        "after all am asap attached before best day days different else emails ever everything few first further give "
        "going good hello hi however i'm immediately know last later let like look mail mails many meeting messages "
        "more most much new next none now off ok on once one only or other out over own people person question "
        "questions re regards same see send sent several she since something soon sure thank thanks thing things this "
        "those time today together tomorrow too under until up very was way week well whether while work would year "
        "yesterday yet",
    )
)


@dataclass(slots=True)
class Harvest:
    """The questions kept, and the number left out by reason."""

    scenarios: list[Scenario]
    dropped: dict[str, int]
    """Items by reason: those of ``check_item``, ``too_many_sources``, ``repeated``, ``over_limit``.

    Prompts by reason: ``unreadable_reply``, ``refused``.
    """


def harvest(
    plan: QuestionPlan, db: Path, settings: GenerationSettings, *, seed: int, max_source_mails: int | None = None
) -> Harvest:
    """Check every cached reply to the plan's prompts. A question with more than ``max_source_mails`` sources is left
    out, as loading would leave it out too. Raises EmailRLError if no question is left."""
    cache = ReplyCache(settings.generator_cache, "GENERATOR_CACHE")
    dropped: Counter[str] = Counter()
    found: list[list[Scenario]] = []
    with opened(Path(db)) as connection:

        def is_stored(message_id: str) -> bool:
            return connection.scalar(select(emails.c.id).where(emails.c.message_id == message_id)) is not None

        for batch in plan.batches:
            reply = cache.get(batch.cache_key(settings.generator_model))
            items = None if reply is None else read_reply(reply)
            if items is None:
                dropped["refused" if reply is None else "unreadable_reply"] += 1
                continue
            checked = (check_item(item, batch, is_stored=is_stored, seed=seed, dropped=dropped) for item in items)
            found.append([scenario for scenario in checked if scenario is not None])
    asked: dict[tuple[str, str], Scenario] = {}
    # The first question of every prompt, then the second, and so on up to the limit.
    for scenario in (scenario for turn in zip_longest(*found) for scenario in turn if scenario is not None):
        wording = (scenario.inbox_address, scenario.question.lower())
        if max_source_mails is not None and len(scenario.message_ids) > max_source_mails:
            dropped["too_many_sources"] += 1
        elif wording in asked:
            dropped["repeated"] += 1
        elif len(asked) == plan.limit:
            dropped["over_limit"] += 1
        else:
            asked[wording] = scenario
    if not asked:
        counts = ", ".join(f"{reason} {number}" for reason, number in dropped.most_common())
        raise EmailRLError(f"No question of the model is usable ({counts or 'it wrote none'}).", "Try another model.")
    return Harvest(in_order(asked.values()), dict(dropped.most_common()))


def read_reply(text: str) -> list[Any] | None:
    """Return the unchecked objects of a reply, or None if it contains no readable JSON. A reply may be a plain list of
    objects, fenced, wrapped or inside text; a truncated one yields its complete objects."""
    text = re.sub(r"(?s)^.*</think>", "", text)[:MAX_REPLY_CHARS]
    items: list[Any] | None = None
    failed = at = 0
    while (begun := _BEGINNING.search(text, at)) and len(items or ()) < MAX_ITEMS and failed < MAX_TRIES:
        try:
            value, at = _DECODER.raw_decode(text, begun.start())
        except (ValueError, RecursionError):
            failed += 1
            at = begun.start() + 1
            continue
        if isinstance(value, dict):  # an object may wrap the list, or be the only item
            lists = [i for i in value.values() if isinstance(i, list) and all(isinstance(one, dict) for one in i)]
            value = lists[0] if "question" not in value and lists else [value] if value else []
        items = [*(items or ()), *value]
    return None if items is None else items[:MAX_ITEMS]


def _printable(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("not printable")
    return text


_ONE_LINE = BeforeValidator(lambda value: " ".join(value.split()) if isinstance(value, str) else value)
Line = Annotated[str, _ONE_LINE, AfterValidator(_printable)]


class _Item(BaseModel):
    """One question as a model writes it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    question: Annotated[Line, Field(max_length=MAX_QUESTION_CHARS)]
    answer: Annotated[Line, Field(max_length=MAX_ANSWER_CHARS)]
    message_ids: Annotated[
        list[Annotated[str, AfterValidator(_printable)]],
        BeforeValidator(lambda ids: [ids] if isinstance(ids, str) else ids),
        Field(min_length=1),
    ]
    how_realistic: Annotated[float, Field(ge=0, le=1)]


def check_item(
    item: Any, batch: Batch, *, is_stored: Callable[[str], bool], seed: int, dropped: Counter[str]
) -> Scenario | None:
    """Return the question in an item of a reply, or None with the reason counted in ``dropped``. ``is_stored``: whether
    the database has a message id. Reasons: ``malformed``, ``confabulated_id`` (once per id; the item keeps its others),
    ``no_source`` (no id left), ``outside_prompt`` (an email that was not shown), ``yes_or_no``, ``answer_in_question``,
    ``answer_not_found``, ``answer_too_common`` (in nearly every email)."""
    try:
        written = _Item.model_validate(item)
    except ValidationError:
        dropped["malformed"] += 1
        return None
    question, answer = written.question, written.answer
    shown = {mail.message_id.strip("<> "): mail for mail in batch.mails}
    named = {message_id.strip("<> "): message_id.strip() for message_id in written.message_ids}
    sources = [shown[bare] for bare in named if bare in shown]
    strangers = [message_id for bare, message_id in named.items() if bare not in shown]
    if confabulated := sum(not is_stored(message_id) for message_id in strangers):
        dropped["confabulated_id"] += confabulated
    objections = (
        ("outside_prompt", lambda: len(strangers) > confabulated),
        ("no_source", lambda: not sources),
        ("yes_or_no", lambda: re.match(r"(?:yes|no)\b(?!\.?\s*\d)", answer, re.IGNORECASE) is not None),
        ("answer_in_question", lambda: f" {plain(answer)} " in f" {plain(question)} "),
        ("answer_not_found", lambda: not is_stated(answer, sources)),
        ("answer_too_common", lambda: not is_specific(answer, sources)),
    )
    for reason, applies in objections:
        if applies():
            dropped[reason] += 1
            return None
    ids = sorted(mail.message_id for mail in sources)
    identity = hashlib.sha256("\0".join((batch.inbox, question, *ids)).encode()).hexdigest()
    newest = batch.mails[-1]  # all emails of the prompt are to be visible on the day of the question
    days_later = Random(f"{seed}/{batch.inbox}/{newest.message_id}").randint(1, MAX_DAYS_LATER)
    return Scenario(
        id=f"llm-{identity[:12]}",
        question=question,
        answer=answer,
        message_ids=ids,
        inbox_address=batch.inbox,
        query_date=(newest.day + timedelta(days=days_later)).isoformat(),
        how_realistic=written.how_realistic,
        split=batch.split,
        kind="llm",
    )


def is_stated(answer: str, mails: list[Mail]) -> bool:
    """Whether emails contain every fact of an answer and at least half of its words; False if it has neither."""
    days = [f"{mail.day:%A}, {spell_day(mail.day)}, {mail.day.month}/{mail.day.day}, {mail.sent_at}" for mail in mails]
    text = "\n".join(
        "\n".join((mail.subject, mail.body, day, mail.sender, *mail.to, *mail.cc, *mail.bcc))
        for mail, day in zip(mails, days, strict=True)
    )
    if _WORD.search(answer) and plain(answer) in plain(text):  # also where words are not set apart by spaces
        return True
    asked = read(clean(answer))
    known = read(clean(text), literals=[fact for fact in asked.facts if isinstance(fact, Literal)])
    if not all(any(agree(fact, other) for other in known.facts) for fact in asked.facts):
        return False
    telling = {word for word in asked.stems if len(word) > 3}
    if not telling and not asked.facts:
        telling = {word for word in asked.stems if len(word) > 1}
    stems = {word[:5] for word in known.stems}
    found = sum(word[:5] in stems for word in telling)
    return found >= MIN_FOUND * len(telling) if telling else bool(asked.facts)


def is_specific(answer: str, mails: list[Mail]) -> bool:
    """Whether an answer contains a fact, a name, or two content words. A single digit is not a fact, because every date
    has one. A name is a word that the emails never write in lower case, or part of one of their addresses; in a script
    without lower case, any word may be one."""
    reading = read(clean(answer))
    words = {unit.text.lower() for unit in reading.units if unit.fact is None}
    telling = {word for word in words if len(word) > 1 and word not in _COMMON}
    if any(not isinstance(fact, Quantity) or fact.base is not None or fact.value >= 10 for fact in reading.facts):
        return True
    if len(telling) > 1 or (telling and reading.facts):
        return True
    written = {word for mail in mails for word in _WORD.findall(f"{mail.subject}\n{mail.body}")}
    addresses = {word for mail in mails for address in mail.addresses for word in _WORD.findall(address.lower())}
    names = {word.lower() for word in written if not word.islower()} - written | addresses
    return any(word in names or word.upper() == word for word in telling)


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
