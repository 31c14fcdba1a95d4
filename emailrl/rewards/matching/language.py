"""Patterns of English for denying, doubting, retracting, hedging, giving up, and framing an answer."""

from __future__ import annotations

import re

from emailrl.facts.reading import MASK


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_MAILS = r"(?:e-?mails?|mails?|messages?|notes?|memo|thread|inbox|mailbox|records?|sources?|information|documents?)\b"

DENIAL = _any(
    r"\b(?:not|never|nobody|no one|none|neither|nor|cannot|no|nothing|nowhere|hardly|without|yet to|refus\w+ to)\b",
    r"\bfail(?:ed|s)? to\b|n't\b|\b(?:do|does|did|is|are|was|were|has|have|had|wo|ca|could|would|should)nt\b",
)
NO_DENIAL = _any(  # Phrases that look like a denial but are not.
    r"\bnot only\b|\b(?:no|not) (?:later|earlier|more|less|fewer) than\b|\b(?:no|without|beyond)(?: a| any)? doubt\b",
    rf"\bwhy not\b|\bno\.? (?={MASK})",
)
NOT_UNTIL = _any(r"(?:\bnot\b|n't\b)(?=.*\buntil\b)")
"""Names the time at which something begins, unless the reference names one until which something lasts."""
REFUSAL = _any(  # Verbs that negate what they refer to, unless the question asks about them.
    r"\b(?:reject\w*|refus\w*|declin\w*|den(?:y|ied|ies)|cancel\w*|dismiss\w*|turn(?:ed|ing)? (?:\w+ )?down|called off"
    r"|dropped(?! (?:to|from|by)\b)|postpon\w*|forbid\w*|prohibited|abandon\w*|withdr[ae]w\w*|oppos(?:e|es|ed|ing)"
    r"|object\w* to|reluctan\w*|unwilling\w*|veto\w*|discourag\w*|rul(?:ed|es|ing) out)\b",
    r"(?:(?m:^)|(?:\b(?:am|is|are|was|were|be|been|st(?:oo|an)ds?|(?:vot|advis|argu|warn|decid|recommend|counsel)\w*"
    r"|spoke|speaks?|c[ao]mes? out)|'(?:m|s|re))(?: \w+ly)? )against\b(?! (?-i:[A-Z]))",
)
SUPERSEDED = _any(  # States that what it refers to no longer counts, unless question or reference state it too.
    r"\b(?:superseded|overturned|overruled|revoked|rescinded|withdrawn|out of the question"
    r"|(?:is|was|were|been|being|got) replaced(?! by))\b",
    rf"\bwas (?:the|an?|my|our|their) (?:{MASK}+|original|initial|old|earlier|previous|former) (?:plan|idea|theory"
    r"|choice|guess|answer|reply|estimate|date|figure|count|number|price|candidate|version|proposal|explanation)\b",
    r"(?m:^)\s*(?:ignore|disregard|forget|skip|discard)\b",
)
FORWARD = (  # Denies what follows it, not what precedes it.
    r"\b(?:instead of|rather than|except(?: for)?|other than|apart from|as opposed to|(?<=moved )away from|in place of"
    r"|with no|without(?! (?:a |any )?doubt)|outside of|anything but|unlike"
    rf"|(?:any|every|all|no)\s?\w* but|(?-i:not)(?= (?-i:[A-Z{MASK}])))\b"
)
NEGATIVE = _any(  # Makes a question one about what is not, so that an answer that repeats it may deny too.
    DENIAL.pattern,
    REFUSAL.pattern,
    r"\b(?:except|besides|without|skip\w*|miss\w*|lack\w*|left out|omit\w*"
    r"|stop\w*|fail\w*|unable|prevent\w*"
    r"|avoid\w*|exclud\w*|lost|trouble"
    r"|leave|instead|rather|doubt\w*|un\w{5,}ed|wrong|away|before|until|only|other than|else)\b",
)
MOVED = _any(  # Names an old value next to the new one.
    r"\b(?:mov|chang|switch|shift|postpon|push|brought|bring|reschedul|renam|transfer|relocat|rais|rose|went|extend)"
    r"\w*\b[^,;]{0,40}?\bfrom\s(?P<old>[^,;]{1,40}?)\s(?:to|until|till)\b",
    r"^(?P<gone>.+?\b(?:is|was|were|been|got) )(?:(?:replaced|superseded|succeeded) (?:by|with)|corrected to)\b",
    r"(?:^\s*(?:previously|formerly|originally|initially|(?:extended|moved|changed|up|down) from)|\bused to be)\b"
    r"(?P<former>.*)",
)
DOUBT = _any(  # Nothing from here to the end of the sentence is asserted.
    r"(?<!no )(?<!without )(?<!beyond )(?<!without a )(?<!without any )\bdoubt(?!less)\w*",
    r"\b(?:a lie|lies? that|lying|implausible|untrue|false(?:ly|hood)?|myth|hoax|rumou?r\w*|deny|denies|denied that"
    r"|disput\w+|disagree\w*|unlikely|contrary to|no way|far from|hardly|pretend\w*|allegedly|supposedly|if only"
    r"|(?:nobody|no one)\s(?:\w+\s)?(?:said|says|thinks|thought|claim\w*|believe\w*)"
    r"|(?:wrong|incorrect|mistaken|inaccurate|misleading|impossible|nonsense|absurd|fiction)(?:ly)?"
    r"|(?:not|n't|never|no longer)\s(?:\w+\s){0,2}(?:true|correct|right|accurate|the case|believe|think|say))\b",
)
RETRACTION = _any(  # Takes back what an answer said.
    r"\b(?:scratch|ignore|disregard|forget|strike|drop|retract|withdraw|take (?:that|it|this) back|scrap|cancel)\s"
    r"(?:that|this|it|what|my|the above|all)\b",
    r"\bi (?:made (?:that|this|it) up|take (?:that|it|this) back|(?:was|am) (?:joking|kidding|wrong|lying)|mis\w+|mean"
    r"|mixed)\b",
    r"\b(?:strike that|on (?:reflection|closer look)|(?:first|initially|originally),? (?:i|we|it) \w+"
    r"|(?:i|everyone|everybody|people|we|they) (?:first |once |often |mistakenly )*"
    r"(?:thought|believed|assumed|claimed|answer)"
    r"|(?:someone|somebody|rumou?rs?) \w+s?\b|turns? out to be"
    r"|(?:my|the) previous (?:answer|guess)"
    r"|edit:|it is no longer"
    r"|(?:is|was) the (?:old|former|previous|wrong)"
    r" (?:value|answer|figure|one|number|date)"
    r"|(?:was|were) (?:later|since|subsequently) (?:withdrawn|retracted|reversed|corrected|cancell?ed)"
    r"|but the \w+ says)",
    r"\bgrader\b|\b(?:mark|grade|accept|treat|count) (?:this|it|both|my|the)\b|\bthe reference (?:says?|answer|is)\b"
    r"|[{}]",
    r"\b(?:just kidding|only joking|on second thoughts?|correction|never ?mind|or rather|oops|not really)\b",
    r"\b(?:this|that|which|it|the above|all of (?:this|that))\s(?:\w+\s){0,2}?(?:is|was|isn't|wasn't|are|be|seems)\s"
    r"(?:\w+\s){0,2}?(?:false|wrong|incorrect|untrue|mistake\w*|error|inaccurate|nonsense|made up)\b",
    r"\b(?:isn't|wasn't|not) (?:true|right|correct|the case|so|it)\b(?=\s*(?:$|[.,;!)]))",
    r"[-\u2013\u2014,.(]\s*(?:no|nope|wait|not|wrong|false|incorrect|untrue|sorry)\b[\s,.!)]*"
    r"(?:$|(?:no|wait|sorry|actually|it|that)\b)",
)
EXCLUDES = _any(  # Names what is not the answer.
    r"\b(?:everything|anything|everyone|anyone|all of (?:them|these)|whatever|any (?:other )?answer)\b[^.;]{0,20}?"
    r"(?:\b(?:except|but|other than|apart from|besides|save|is not|are not)\b|n't\b)",
    r"\b(?:complement|opposite|converse|inverse|negation) of\b|\b(?:not one|none|neither) of (?:these|those|the)\b",
)
HEDGE = _any(
    r"\b(?:maybe|perhaps|possibly|may(?= (?:be|have)\b)|could (?:be|have)|either|unclear|uncertain|unsure"
    r"|not sure|guess\w*|one of|conceivabl[ey]|backup|fallback|runner-up|short ?list|probability|plan b"
    r"|(?:first|second|main|spare|alternative) (?:answer|choice|pick))\b"
)
CONDITION = _any(r"\b(?:might|supposed\w*|among|candidates?|options?|potential\w*|possible|if|unless|whether)\b")
"""Hedges an answer that repeats nothing of the question; a sentence about it may say so of something else."""
ALTERNATIVE = _any(  # Offers another answer besides, or only supposes its own.
    r"(?:(?m:^)|[.!?]\s)\s*(?:perhaps|maybe|possibly|potentially)\b"
    r"|\b(?:i|we)(?:'m| am| are)?\s(?:not sure|guess|unsure)\b",
    r"\((?=or\b)|\b(?:otherwise|unless|assuming|in (?:some|other|most) cases|(?:just )?as likely"
    r"|hard to (?:tell|say)|according to (?:some|others)"
    rf"|{_MAILS} (?:disagree|differ|conflict)\w*"
    rf"|(?:one|another|the other) {_MAILS} (?:says?|names?|states?|gives?))\b",
    r"(?m:^)\s*(?:should|if)\b[^.;]{1,200}\b(?:be|is|was|are)\b[^,.;]{0,60},"
    r"|\b(?:answer|option|choice|candidate|guess) (?-i:[A-D1-4])\b",
    r"\b(?:thinks?|says?|claims?|believes?)\b[^.]{1,200};[^.]{1,200}\b(?:thinks?|says?|claims?|believes?)\b",
    r"\b(?:alternatively|failing that|or else|and/or|(?:but|whereas|while|though) the (?:\w+ )?answer is"
    r"|(?:some(?:one|body)?|others) (?:says?|claims?|wrote|writes?))\b",
    r"\bif (?:not\b|(?:it|that)(?:(?: is|'s) not| isn't)\b)[^;]{1,200},\s*(?:then|it is|it's)\b",
    rf"\b(?:in|from) one {_MAILS}.*\b(?:another|the other|elsewhere)\b|(?-i:\bA\)\s.*\sB\))\s",
)
GIVES_UP = _any(  # States that something is missing; the answer gives up if that is what the question asked for.
    r"\b(?:(?:do|did|does|could) not|(?:don|didn|doesn|couldn|can)'t|cannot|unable to|not able to)\s(?:\w+\s)?"
    r"(?:know|find|tell|determine|say|confirm|locate|answer|recall|remember|specify|mention|state|give|provide)\b",
    r"\b(?:unknown|no idea|unclear|unsure|uncertain|not sure|not certain|not clear|idk|no clue|who knows)\b",
    r"(?:\bnot|n't)(?:\s\w+)?\s(?:mentioned|specified|stated|found|available|provided|given|known|disclosed|said)\b",
    r"\bno (?:\w+\s)?(?:mention|information|info|emails?|answer|record|details?|reason|evidence|indication|data)\b",
)
COPIED = _any(  # Marks of a copied email.
    r"-{4,}|\bforwarded by\b|\boriginal message\b|\b(?:cc|subject|sent|fw|fwd|re):\s|\w/\w+/\w+@\w|\bplease see\b"
    r"|\bfyi\b"
)
COURTESY = _any(  # Openings of sentences without relevant content.
    r"\s*(?:please )?(?:let me know|feel free|(?:i )?(?:really )?hope\b|(?:i am |i'm )?(?:happy|glad) to|thanks"
    r"|thank you|you(?:'re| are) welcome|is there anything|do you (?:need|want)|would you like"
    r"|if you (?:need|have|want|would)|have a (?:great|nice|good)|(?:(?:best|kind|warm) )?regards|hello|hi\b"
    r"|hey\b|dear\b|cheers|(?:just )?ask (?:me )?if"
    r"|do(?:n't| not) hesitate|i (?:checked|searched|looked)|(?:certainly|sure|of course|absolutely)\W*$"
    r"|here(?:'s| is| are)\b[^:]*:?$|no problem|my pleasure|good luck|any(?:thing else| other)|always happy|enjoy\b)"
)
FRAME = _any(  # Introductions of an answer or its source.
    r"(?:^|(?<=[.!?\n]))\s*(?:(?:well|sure(?: thing)?|certainly|of course|absolutely|ok|okay|hi|hello|hey"
    r"|(?:great|good) question)\b[^\w\n]{1,3}"
    r"|(?:according to|based on|per|as (?:\w+)(?: in| by)?|in|from)\s(?:\w+\s){0,2}?(?:\w+'s? )?"
    rf"{_MAILS}[^,\n]{{0,100}}(?:, (?:19|20)\d\d)?,\s|(?:according to|based on) [^,\n]{{1,60}}(?:, (?:19|20)\d\d)?,\s"
    r"|(?:i (?:found|see|can see|read|believe|think|understand)(?: that)?|(?:the )?(?:(?:short|correct|final) )?answer"
    r"(?: to (?:your|the) question)?(?: is)?|in short|in summary|to answer your question|it (?:says|states) that)"
    r"[:,]?\s)",
    r",? (?:according to|based on|per (?:the|your|his|her|an?|(?-i:[A-Z])\w+'s?) (?:e-?mail|mail|message|note|memo)"
    r"|as (?:stated|mentioned|noted|written|described)(?: in| by)?)\s[^.\n]{1,120}(?=\.?\s*$|\.?\n|\.\s)",
    r"\(?\b(?:sources?|references?|citations?|cited|message[- ]?ids?|see(?: also)?(?: the)? (?:e-?mail|mail|message))"
    r"\s?(?:#\s?\d+|id|number)?\s?[:=]\s*[^\n]*",
    r"<[^<>\s]*\d{6}[^<>\s]*@[^<>\s]*>",
    r"\b(?:i )?hope (?:this|that|it) helps?\b[.!]*\s*$",
    r"\[[^\[\]\n]{0,80}\]\([^()\n]*\)",
    r"\[(?:\s*\d{1,2}\s*|[^\[\]\n]{0,80}@[^\[\]\n]{0,80}|(?:see|source|ref|from|mail|e-?mail|message|id|cit)\b[^\[\]\n]{0,80})\]",
    r"\((?:see|source|ref|from|mail|e-?mail|message|id)\b[^()\n]*\)",
)
