"""The words with which English denies, doubts, retracts, hedges, gives up, and frames an answer."""

from __future__ import annotations

import re

from emailrl.facts.reading import MASK


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


DENIAL = _any(
    r"\b(?:not|never|nobody|no one|none|neither|nor|cannot|no longer|no|nothing|nowhere|hardly|without|yet to"
    r"|refus\w+ to"
    r"|fail(?:ed|s)? to)\b",
    r"n't\b",
    r"\b(?:do|does|did|is|are|was|were|has|have|had|wo|ca|could|would|should)nt\b",
)
NO_DENIAL = _any(
    r"\bnot only\b|\bno (?:later|earlier|more|less|fewer) than\b|\bnot (?:later|more|less) than\b|\bno doubt\b"
    r"|\bwhy not\b",
    rf"\bno\.? (?={MASK})|(?:\bnot\b|n't\b)(?=.*\buntil\b)",
)
"""What looks like a denial and is none."""
FORWARD = _any(
    r"\b(?:instead of|rather than|except(?: for)?|other than|apart from|as opposed to|away from|in place of"
    rf"|anything but|(?:any|every|all|no)\s?\w* but|not(?= (?-i:[A-Z{MASK}])))\b"
)
"""Denies what follows it, not what stands before."""
MOVED = _any(
    r"\b(?:mov|chang|switch|shift|postpon|push|brought|bring|reschedul|renam|transfer|relocat|rais|rose|went"
    r"|extend)\w*\b"
    r"[^,;]{0,40}?\bfrom\s(?P<old>[^,;]{1,40}?)\s(?:to|until|till)\b"
)
FORMER = _any(r"\s*(?:previously|formerly|originally|initially|(?:extended|moved|changed|up|down) from)\b")
DOUBT = _any(
    r"\b(?:doubt(?!less)\w*|a lie|lies? that|lying|implausible|untrue|false(?:ly|hood)?|myth|hoax|rumou?r\w*"
    r"|deny|denies|denied that|disput\w+"
    r"|disagree\w*|unlikely|contrary to|no way|far from|hardly|pretend\w*|allegedly|supposedly|if only"
    r"|(?:not|n't|never|no longer)\s(?:\w+\s){0,2}(?:true|correct|right|accurate|the case|believe|think|say)"
    r"|(?:wrong|incorrect|mistaken|inaccurate|misleading|impossible|nonsense|absurd|fiction)(?:ly)?)\b"
)
"""From here to the end of its sentence nothing is asserted."""
RETRACTION = _any(
    r"\b(?:scratch|ignore|disregard|forget|strike|drop|retract|withdraw|take (?:that|it|this) back|scrap)\s"
    r"(?:that|this|it|what|my|the above|all)\b",
    r"\bi (?:made (?:that|this|it) up|take (?:that|it|this) back|was (?:joking|kidding|wrong|mistaken|lying)"
    r"|am (?:joking|kidding)"
    r"|misread|misspoke|mis\w+)\b",
    r"\b(?:just kidding|only joking|on second thoughts?|i mean\b|correction\b)",
    r"\b(?:this|that|which|it|the above|all of (?:this|that))\s(?:\w+\s){0,2}?(?:is|was|isn't|wasn't|are|be"
    r"|seems)\s(?:\w+\s){0,2}?"
    r"(?:false|wrong|incorrect|untrue|a lie|(?:a |an )?mistake\w*|(?:an )?error|inaccurate|nonsense|made up"
    r"|not (?:true|right|correct|so))\b",
    r"\b(?:isn't|wasn't|not) (?:true|right|correct|the case|so|it)\b(?=\s*(?:$|[.,;!)]))",
    r"\b(?:never ?mind|cancel that|or rather|i mixed|strike that|oops|mixed (?:things|it|them) up|not really)\b",
    r"[-\u2013\u2014,.(]\s*(?:no|nope|wait|not|wrong|false|incorrect|untrue|sorry)\b[\s,.!)]*(?:$|(?:no|wait"
    r"|sorry|actually|it|that)\b)",
)
"""Takes back what an answer said."""
HEDGE = _any(
    r"\b(?:maybe|perhaps|possibly|might|may(?= (?:be|have)\b)|could be|could have|either|unclear|uncertain"
    r"|unsure|not sure"
    r"|guess\w*|supposed\w*|one of|among|candidates?|options?|potential\w*|possible|conceivabl[ey]|if|unless"
    r"|whether)\b"
)
GIVES_UP = _any(
    r"\b(?:do not|don't|did not|didn't|does not|doesn't|cannot|can't|could not|couldn't|unable to"
    r"|was not able to|not able to)\s"
    r"(?:\w+\s)?(?:know|find|tell|determine|say|confirm|locate|answer|recall|remember|specify|mention|state"
    r"|give|provide)\b",
    r"\b(?:unknown|no idea|unclear|unsure|uncertain|not sure|not certain|not clear|idk|no clue|who knows)\b",
    r"(?:\bnot|n't)(?:\s\w+)?\s(?:mentioned|specified|stated|found|available|provided|given|known|disclosed"
    r"|included|said|listed)\b",
    r"\bno (?:\w+\s)?(?:mention|information|info|emails?|answer|record|details?|reason|evidence|indication|data)\b",
)
"""Says that something is missing; an answer gives up where what is missing is what was asked for."""
COURTESY = _any(
    r"\s*(?:[-*\u2022]\s*)?(?:please )?(?:let me know|feel free|(?:i )?(?:really )?hope\b|happy to help"
    r"|(?:i am |i'm |i'd be )?(?:happy|glad) to"
    r"|thanks|thank you|you(?:'re| are) welcome|is there anything|do you (?:need|want)|would you like"
    r"|if you (?:need|have|want|would|'d|require)"
    r"|(?:good|great|nice|excellent) question|have a (?:great|nice|good|wonderful)|(?:best|kind|warm)? ?regards"
    r"|hello|hi\b|hey\b|dear\b|cheers"
    r"|sincerely|(?:just )?ask (?:me )?if|don't hesitate|do not hesitate|please (?:contact me|reach out|note"
    r"|ask|do not|don't|tell me)"
    r"|i checked|i searched|i looked|i went through|certainly\W*$|sure\W*$|of course\W*$|absolutely\W*$"
    r"|here(?:'s| is| are)\b[^:]*:?$|no problem|my pleasure"
    r"|good luck|anything else|any other|always happy|enjoy\b)"
)
"""How a clause begins that says nothing on the matter."""
LEAD = _any(
    r"(?:^|(?<=[.!?\n]))\s*(?:(?:well|sure(?: thing)?|certainly|of course|absolutely|ok|okay|hi|hello|hey"
    r"|indeed|great question|good question)\b[^\w\n]{1,3}"
    r"|(?:according to|based on|per|as (?:stated|mentioned|noted|written|per|described)(?: in| by)?|in|from"
    r"|going by|judging from)\s"
    r"(?:the |an? |your |my |this |that |his |her |their )?(?:\w+'s? )?(?:above |provided |following "
    r"|\w+ )?(?:e-?mails?|mails?|messages?|notes?|memo|thread|inbox|mailbox|records?|sources?|information"
    r"|search results?|document\w*|wikipedia)\b"
    r"[^,\n]{0,100}(?:, (?:19|20)\d\d)?,\s"
    r"|(?:according to|based on) [^,\n]{1,60}(?:, (?:19|20)\d\d)?,\s"
    r"|(?:i (?:found|see|can see|read|believe|think|understand|would say)(?: that)?|the (?:short "
    r"|correct )?answer(?: to (?:your|the) question)?(?: is)?|answer|final answer|in short|in summary"
    r"|to answer your question|it (?:says|states) that)(?::|,)?\s)"
)
TAIL = _any(
    r",? (?:according to|based on|per (?:the|your|his|her|an?|[A-Z]\w+'s?) (?:e-?mail|mail|message|note|memo)"
    r"|as (?:stated|mentioned|noted|written|per|described)(?: in| by)?|going by"
    r"|judging from)\s[^.\n]{1,120}(?=\.?\s*$|\.?\n|\.\s)"
)
SOURCE = _any(
    r"\(?\b(?:sources?|references?|citations?|cited|message[- ]?ids?|see(?: also)?(?: the)? (?:e-?mail|mail"
    r"|message))\s?(?:#\s?\d+|id|number)?\s?[:=]\s*[^\n]*",
    r"<[^<>\s]*\d{6}[^<>\s]*@[^<>\s]*>",
    r"\[[^\[\]\n]{0,80}\](?:\([^()\n]*\))?",
    r"\((?:see|source|ref|from|mail|e-?mail|message|id)\b[^()\n]*\)",
)
"""Where an answer was found."""
DIRECTIONS = {
    **dict.fromkeys(("before", "less than", "under", "below", "fewer than", "at most", "no more than"), "B"),
    **dict.fromkeys(("after", "more than", "over", "above", "at least", "beyond"), "A"),
    **dict.fromkeys(("by", "until", "till", "within", "up to", "not after", "no later than"), "b"),
    **dict.fromkeys(("from", "since", "starting", "not before"), "a"),
}
DIRECTION = re.compile(r"\b(?:" + "|".join(sorted(DIRECTIONS, key=len, reverse=True)) + r")\b")
"""On which side of a fact something lies: (B)efore or (A)fter it, in small letters where the fact itself counts."""
MAIL = _any(
    r"-{4,}|\bforwarded by\b|\boriginal message\b|\b(?:cc|subject|sent|fw|fwd|re):\s|\w/\w+/\w+@\w"
    r"|\b\d\d:\d\d (?:AM|PM) to:"
    r"|\bplease see\b|\bfyi\b"
)
"""What only a copied mail has."""
LIMITS = {
    "B": re.compile(r"\b(?:maximum|most|limit|cap|latest|highest)\b"),
    "A": re.compile(r"\b(?:minimum|least|earliest|lowest)\b"),
}
"""What in a question asks for an upper or a lower bound."""
REFUSAL = _any(
    r"\b(?:reject\w*|refus\w*|declin\w*|den(?:y|ied|ies)|cancel\w*|dismiss\w*|turned (?:it |this |that |him "
    r"|her |them )?down"
    r"|turning down|turn down|called off|drop(?:ped|s)?|postpon\w*|forbid\w*|prohibited|abandon\w*|withdr[ae]w\w*)\b"
)
"""Words that deny what they speak of, unless the question asks for it."""
