"""The topics of demo emails: a keyword, sentences and question wordings for each.

``[a|b]`` chooses one alternative; choices multiply, so that wordings cannot be memorized. An email that states a
topic's value always contains the topic's keyword; questions often do not.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(pattern: str, rng: random.Random) -> str:
    """Replace every ``[a|b|c]`` by one of its alternatives, the innermost first."""
    while match := _CHOICE.search(pattern):
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return pattern


@dataclass(frozen=True, slots=True)
class ProjectTopic:
    """One kind of fact about a project."""

    name: str
    value: str
    """The ``Pool`` method that draws a value, or ``person``."""
    keyword: str
    statements: tuple[str, ...]
    corrections: tuple[str, ...]
    questions: tuple[str, ...]


TOPICS = (
    ProjectTopic(
        "quote",
        "amount",
        "quote",
        (
            "[Our|The|Their] [final |latest |signed ||]quote for {project} [is|stands at|came in at|comes to] {value}.",
            "[We have|I now have|They sent] a quote of {value} for {project}.",
            "For {project} the quote [we got|in front of us|on the table] is {value}[ all in| before tax|].",
        ),
        (
            "[Correction|One correction|Please note]: the {project} quote is [now |]{value}, not {old}.",
            "The quote for {project} [changed|moved] from {old} to {value}.",
        ),
        (
            "[What|Which] price [was|were we] quoted for {project}?",
            "How much [is|was] the {project} quote?",
            "What [does|will] {project} cost[ us|] according to the quote?",
            "[Can you find|Please look up] the quote for {project}[.|?]",
            "How much money did they ask for {project}?",
        ),
    ),
    ProjectTopic(
        "deadline",
        "date",
        "deadline",
        (
            "The deadline for {project} is {value}[ this year|, no later|].",
            "[Remember|Note|Please plan for it]: {value} is the {project} deadline.",
            "[The client|Legal|The board] set {value} as the deadline for {project}.",
        ),
        (
            "The {project} deadline [moved|slipped|was shifted] from {old} to {value}.",
            "[Correction|Update]: {value}, not {old}, is the deadline for {project}.",
        ),
        (
            "[When|By when] [is {project} due|must {project} be done|do we have to finish {project}]?",
            "What is the deadline for {project}?",
            "On which date is {project} due?",
            "By what date [does|must] the {project} work have to be finished?",
        ),
    ),
    ProjectTopic(
        "room",
        "room",
        "room",
        (
            "[We meet|The team meets|Everyone meets] about {project} in room {value}.",
            "The {project} [review|workshop|kick-off] is in room {value}[ on the usual day|].",
            "I [booked|reserved|got us] room {value} for the {project} [meeting|session].",
        ),
        (
            "Room {old} is taken, so {project} moves to room {value}.",
            "[Correction|Change of plan]: {project} meets in room {value}, not {old}.",
        ),
        (
            "[Where|In which room] [do we meet about|is the meeting on|will we discuss] {project}?",
            "Which room [was booked|did we get|is reserved] for {project}?",
            "What room is the {project} meeting in?",
        ),
    ),
    ProjectTopic(
        "flight",
        "flight",
        "flight",
        (
            "[I am|We are|You are] on flight {value} for the {project} visit.",
            "[The|My|Your] flight to the {project} site is {value}[, window seat|, as usual|].",
            "For the {project} trip [travel|the agency|the desk] booked flight {value}.",
        ),
        (
            "Flight {old} was cancelled; the {project} trip is now on {value}.",
            "[Correction|New booking]: the {project} flight is {value}, not {old}.",
        ),
        (
            "[Which|What] flight [goes|do I take|was booked] for the {project} [visit|trip]?",
            "What is the flight number for {project}?",
            "How do we fly to the {project} site: which number?",
        ),
    ),
    ProjectTopic(
        "volume",
        "volume",
        "volume",
        (
            "The [agreed |monthly |planned |]volume for {project} is {value}.",
            "[They|The plant|Operations] [asked for|confirmed] a volume of {value} on {project}.",
            "{project}: volume [fixed|set|planned] at {value}.",
        ),
        (
            "[Correction|Revised]: volume for {project} is {value}, not {old}.",
            "The {project} volume [went|changed] from {old} to {value}.",
        ),
        (
            "[How much|What quantity] [will|does] {project} [need|deliver|move]?",
            "What is the volume for {project}?",
            "What volume was [agreed|planned] on {project}?",
        ),
    ),
    ProjectTopic(
        "approval",
        "person",
        "approved",
        (
            "{value} [has |]approved {project}[ this morning| yesterday| at last|].",
            "{project} was approved by {value}.",
            "Good news: {value} approved the {project} [budget|plan|request].",
        ),
        (
            "It was {value}, not {old}, who approved {project}.",
            "[Correction|To be exact]: {project} was approved by {value}, not {old}.",
        ),
        (
            "Who [approved|signed off] [|on ]{project}?",
            "Who gave the go-ahead for {project}?",
            "Whose approval did {project} get?",
        ),
    ),
    ProjectTopic(
        "phone",
        "phone",
        "phone",
        (
            "The phone [number |]for the {project} [desk|team|hotline] is {value}.",
            "[Call|Reach|Ring] the {project} [desk|people] by phone at {value}.",
            "{project} has a [new |direct |]phone line: {value}.",
        ),
        (
            "The {project} phone changed from {old} to {value}.",
            "[Correction|Wrong number]: the phone for {project} is {value}, not {old}.",
        ),
        (
            "[What|Which] number [do I call|should I ring|reaches the team] for {project}?",
            "What is the phone number for {project}?",
            "How can I call the {project} desk?",
        ),
    ),
    ProjectTopic(
        "call",
        "time",
        "call",
        (
            "The {project} call [starts|begins|is] at {value}.",
            "[Join|Please join|Dial in to] the call on {project} at {value}.",
            "[We|They] set the [weekly |first |]call for {project} at {value}.",
        ),
        (
            "The call about {project} [moves|moved] from {old} to {value}.",
            "[Correction|New time]: the {project} call is at {value}, not {old}.",
        ),
        (
            "[When|At what time] [does|will] the {project} call [start|begin]?",
            "What time is the call about {project}?",
            "At what time do we talk about {project}?",
        ),
    ),
)

CHATTER = (
    "[Nothing new|No news|All quiet] on {project} [today|this week|so far].",
    "{project} [keeps|kept] [me|us|everyone] [busy|up late|on our toes].",
    "[Thanks for|I liked|Good work on] the {project} [slides|notes|summary].",
    "[Let us|We should|Can we] talk about {project} [soon|next week|over lunch].",
)

PROMISES = (
    "I will send the {project} {keyword} [tomorrow|later|as soon as I can].",
    "[Does anyone have|Who has|I am looking for] the {keyword} for {project}?",
    "[Still waiting|We wait] for the {project} {keyword}.",
)
"""Sentences with a project and a topic's keyword but no value."""

FILLERS = (
    "Hope [you are well|the week is good|all is fine].",
    "[Let me know|Tell me|Write back] if [anything|something] is unclear.",
    "[Please|Do] [file|keep|forward] this.",
    "The weather here is [awful|lovely|grey].",
    "[Coffee|Lunch|A drink] is on me [next time|on Friday].",
    "[More|Details] [soon|later|by Monday].",
    "[Sorry|Apologies] for the [short|late] note.",
    "I am [out|travelling|away] [tomorrow|on Thursday].",
)

GREETINGS = ("Hi {first},", "Hello {first},", "{first},", "Dear {first},", "All,", "Team,", "")
CLOSINGS = ("Best, {sender}", "Thanks, {sender}", "{sender}", "Regards, {sender}", "Cheers, {sender}")
