"""Words: lists of stopwords, irregular forms, synonyms, opposites, titles, nicknames and numbers; cleaning, stems."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from functools import lru_cache


def listed(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def _paired(text: str) -> dict[str, str]:
    """ "lost:lose" → {"lost": "lose"}."""
    return dict(pair.split(":") for pair in text.split())


def _numbered(text: str, start: int) -> dict[str, int]:
    """ "one two/pair" → {"one": 1, "two": 2, "pair": 2}."""
    return {word: number for number, words in enumerate(text.split(), start) for word in words.split("/")}


CARDINALS = _numbered(
    """zero one/once two/twice three/thrice four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen""",
    start=0,
)
TENS = {word: 10 * n for word, n in _numbered("twenty thirty forty fifty sixty seventy eighty ninety", start=2).items()}
ORDINALS = _numbered("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth", start=1)
MONTHS = _numbered(
    """january/jan february/feb march/mar april/apr may june/jun july/jul august/aug september/sept/sep october/oct
    november/nov december/dec""",
    start=1,
)
WEEKDAYS = _numbered(
    "monday/mon tuesday/tues/tue wednesday/wed thursday/thurs/thur/thu friday/fri saturday/sat sunday/sun", start=0
)

STOPWORDS = listed(
    """a an the this that these those there here it its itself he him his she her hers they them their theirs we us our
    ours you your yours i me my mine who whom whose which what when where why how and or but nor so as at by for
    from in into of on onto per than then to through upon via with within about also any around be been being am is
    are was were do does did done has have had having can could may might must shall should will would not no yes
    both each either every another some such very just only even still already ever if because since due while until
    though please according said say says saying told tell tells mention mentions mentioned ask asks asked asking
    suggest suggests suggested suggesting recommend recommends recommended recommending state states stated note noted
    inform informed indicate indicates indicated think thinks thought want wants wanted need needs needed go going
    get gets got make makes made take takes took cannot never nobody none nothing neither currently now
    approx approximately roughly nearly almost exactly sharp total called named answer know known follow follows
    following it's he's she's they're i'm you're we're that's there's email emails mail message user however moreover
    therefore thus whether specifically apparently based find found"""
)

_IRREGULAR = _paired(
    """lost:lose sent:send met:meet held:hold paid:pay bought:buy sold:sell left:leave led:lead kept:keep built:build
    spent:spend chose:choose chosen:choose given:give gave:give began:begin begun:begin wrote:write written:write
    fell:fall fallen:fall rose:rise risen:rise grew:grow grown:grow hid:hide brought:bring ran:run came:come went:go
    gone:go people:person children:child men:man women:woman"""
)

_SYNONYMS = _paired(  # Words read as another word of nearly the same meaning.
    """increase:rise grow:rise up:rise higher:rise decrease:fall drop:fall lower:fall down:fall purchase:buy
    commence:begin start:begin finish:end complete:end postpone:delay vp:president cell:mobile phone:call ste:suite
    dept:department mgr:manager approx:about asap:soon big:large photo:picture hq:headquarters usa:us automobile:car
    mt:mount st:saint rd:road dr:drive blvd:boulevard reject:refuse decline:refuse deny:refuse dismiss:refuse
    over:above under:below against:oppose favor:support grey:gray cheque:check programme:program tyre:tire kerb:curb
    plough:plow storey:story mould:mold aluminium:aluminum sceptical:skeptical
    judgement:judgment jewellery:jewelry aeroplane:airplane practise:practice manoeuvre:maneuver"""
)

_OPPOSITES = listed(
    """more/fewer more/less longer/shorter long/short rise/fall before/after early/late earlier/later approve/reject
    accept/decline accept/reject agree/refuse open/close buy/sell high/low add/remove begin/end beginning/end
    include/exclude first/last larger/smaller large/small junior/senior north/south east/west old/new light/dark
    left/right delay/advance delay/accelerate win/lose gain/lose morning/afternoon morning/evening inside/outside
    same/different internal/external permanent/temporary happy/unhappy many/few import/export allow/forbid
    grant/deny hire/fire strong/weak good/bad better/worse maximum/minimum buyer/seller debit/credit enter/leave
    arrive/depart extend/shorten positive/negative success/failure safe/unsafe cheap/expensive enough/insufficient
    small/enough full/empty fast/slow quickly/slowly support/oppose confirm/cancel public/private winter/summer
    overstate/understate overestimate/underestimate paid/unpaid resolved/unresolved above/below over/under
    last/next highest/lowest most/least with/without allow/prohibit least/maximum most/minimum
    earliest/latest earliest/before latest/after ignore/overstate exceed/miss rise/cut rise/reduce raise/cut
    raise/reduce raise/fall"""
)

TITLES = listed(  # Words in or next to a name that are not part of it.
    """vice president director manager chief officer ceo cfo coo cio lead head senior junior analyst associate team
    group research department dept office project professor doctor sir madam inc corp corporation ltd llc co company
    bank university street avenue road building room floor yes no not ok okay i the a an"""
)

STATES = listed(
    """alabama alaska arizona arkansas california colorado connecticut delaware florida georgia hawaii idaho illinois
    indiana iowa kansas kentucky louisiana maine maryland massachusetts michigan minnesota mississippi missouri montana
    nebraska nevada new hampshire jersey mexico york north south carolina dakota ohio oklahoma oregon pennsylvania rhode
    island tennessee texas utah vermont virginia washington west wisconsin wyoming al ak az ar ca co ct de fl ga hi id
    il in ia ks ky la me md ma mi mn ms mo mt ne nv nh nj nm ny nc nd oh ok or pa ri sc sd tn tx ut vt va wa wv wi wy dc
    alberta british columbia manitoba ontario quebec saskatchewan nova scotia ab bc mb ont qc queensland victoria
    bavaria england scotland wales"""
)
COUNTRIES = listed(  # Words of the names of states, provinces and countries, in which a city can be.
    """usa us united states america kingdom uk britain ireland canada mexico brazil argentina chile colombia
    peru venezuela bolivia ecuador france germany belgium netherlands luxembourg switzerland austria italy spain
    portugal denmark norway sweden finland iceland poland czech republic hungary romania bulgaria greece turkey russia
    ukraine croatia india china japan korea south taiwan singapore malaysia indonesia philippines thailand vietnam
    australia new zealand egypt nigeria kenya morocco africa israel saudi arabia emirates uae qatar kuwait iran iraq
    pakistan"""
)

NICKNAMES = _paired(
    """dave:david bob:robert rob:robert bill:william will:william jim:james tom:thomas mike:michael steve:steven
    stephen:steven dan:daniel joe:joseph tony:anthony chris:christopher dick:richard rick:richard ted:edward ed:edward
    ken:kenneth greg:gregory jeff:jeffrey matt:matthew ben:benjamin sam:samuel liz:elizabeth beth:elizabeth
    kate:katherine kathy:katherine sue:susan pat:patricia jen:jennifer debbie:deborah don:donald ron:ronald
    larry:lawrence andy:andrew nick:nicholas pete:peter phil:philip charlie:charles chuck:charles"""
)

ROLES = listed(  # Words of an address that indicate a machine or a list rather than a person.
    """admin administrator alert alerts announcement announcements billing center chairman communications daemon desk
    editor group groups help helpdesk hotline info list mail mailer marketing news newsletter no noreply
    notification notifications office operator participants postmaster reply report reports request sales service
    services shift subscriptions support system team update updates users web webmaster worldwide address"""
)

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_NUMBERED = re.compile(r"(?m)^\s*\d{1,2}[.)]\s+")
_SUFFIXES = (  # Suffixes and the minimum number of letters before them.
    *(("ations", 5), ("ation", 5), ("ments", 5), ("ment", 5), ("ings", 3), ("ing", 3), ("ions", 5), ("ion", 5)),
    *(("ied", 3), ("ies", 3), ("ed", 3), ("ly", 4), ("s", 3)),
)

_WORDINGS = tuple(  # Rewrites phrases into the one form that the grammar reads, if the lowercase text contains the key.
    (key, re.compile(pattern, re.IGNORECASE), instead)
    for key, pattern, instead in (
        ("half", r"\ban? (year|month|week|day|hour|mile) and a half\b", r"one and a half \1s"),
        ("half", r"\b(\w+) (year|month|week|day|hour|mile)s and a half\b", r"\1 and a half \2s"),
        ("every other", r"\bevery other (day|week|month|year)\b", r"every two \1s"),
        ("quarter", r"\b(?:the )?(?:first|1st) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q1 "),
        ("quarter", r"\b(?:the )?(?:second|2nd) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q2 "),
        ("quarter", r"\b(?:the )?(?:third|3rd) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q3 "),
        ("quarter", r"\b(?:the )?(?:fourth|4th) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q4 "),
        ("hour", r"\bmiles (?:per|an) hour\b", "mph"),
        ("hour", r"\b(?:km|kilomet(?:er|re)s) (?:per|an) hour\b", "kmh"),
        ("watt", r"\b(k|m|g)(?:ilo|ega|iga)watt[\s-]hours?\b", r"\1wh"),
        ("cu", r"\bcu(?:bic|\.)? (?:feet|foot|ft)\b", "cf"),
        ("cu", r"\bcu(?:bic|\.)? met(?:er|re)s?\b", "cbm"),
        ("cfd", r"\b((?:mm?|b)?cf)d\b", r"\1/day"),
        ("sq", r"\bsq(?:uare|\.)? (?:feet|foot|ft)\b", "sqft"),
        ("sq", r"\bsq(?:uare|\.)? (?:met(?:er|re)s?|m)\b", "sqm"),
        ("sq", r"\bsq(?:uare|\.)? (?:kilomet(?:er|re)s?|km)\b", "sqkm"),
        ("sq", r"\bsq(?:uare|\.)? (?:miles?|mi)\b", "sqmi"),
        ("basis", r"\bbasis points?\b", "bps"),
        ("point", r"(?:\b(?:percentage|percent)|%) points?\b", "pp"),
        ("", r"(?:\s?\u00b0\s?|\bdegrees? )(?:f|fahrenheit)\b", " degf"),
        ("", r"(?:\s?\u00b0\s?|\bdegrees? )(?:c|celsius|centigrade)\b", " degc"),
        ("dollar", r"\bus\.? dollars?\b", "usd"),
        ("dollar", r"\bcanadian\.? dollars?\b", "cad"),
        ("dollar", r"\baustralian\.? dollars?\b", "aud"),
    )
)


def clean(text: str) -> str:
    """Normalize quotes, dashes, spaces, accents and compatibility letters, and remove emphasis marks."""
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)
    text = unicodedata.normalize("NFKD", text).replace("\u2044", "/")
    text = re.sub(r"[\u0300-\u036f\ue000-\uf8ff\u200b-\u200f\u2060\ufeff]", "", text)
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", text)
    text = re.sub(r"[\u201c\u201d\u00ab\u00bb\"*]|(?<![^\W_])_+|_+(?![^\W_])|''", " ", text)
    text = re.sub(r"[\u2010\u2011\u2012\u2212]", "-", text)
    text = re.sub(r"(?m)^\s*[-\u2022]\s+", "", text)
    if len(_NUMBERED.findall(text)) > 1:
        text = _NUMBERED.sub("", text)
    text = re.sub(r"\b(?:mr|mrs|ms|dr|prof|messrs)\b\.?\s(?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\b([A-Za-z])\.(?:\s?(?=[A-Za-z]\.)|(?=[A-Za-z]\b))", r"\1", text)  # D. C. and P.V are one token
    text = re.sub(r"[^\S\n]+", " ", text).strip()
    lower = text.lower()
    for key, pattern, instead in _WORDINGS:
        if key in lower:
            text = pattern.sub(instead, text)
    return text


_SPELLINGS = tuple(  # Rewrites the British spelling of a stem as the American one.
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"(?<=\w{3})our", "or"),  # favour
        (r"(?<=\w{3}i)s$|(?<=ly)s$", "z"),  # organis(e), analys(e)
        (r"(?<=[tb])r$", "er"),  # centr(e), fibr(e)
        (r"(?<=\wog)u$", ""),  # catalogu(e)
        (r"(?<=\wen)s$", "c"),  # defens(e)
        (r"(?<=\w{4}l)l$", ""),  # travell(ed)
    )
)


def _shorten(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    for suffix, least in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= least and not word.endswith("ss"):
            word = word[: -len(suffix)] + ("y" if suffix in ("ied", "ies") else "")
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lszi":
        word = word[:-1]
    word = word[:-1] if len(word) > 4 and word[-1] == "e" else word
    for pattern, instead in _SPELLINGS:
        word = pattern.sub(instead, word)
    return word


_SAME = {_shorten(word): _shorten(other) for word, other in _SYNONYMS.items()}


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """Return a crude stem, shared by most forms of a word and by a few synonyms."""
    short = _shorten(re.sub(r"'s?$", "", word.lower()))
    return _SAME.get(short, short)


def says_something(word: str) -> bool:
    """Whether a word is a content word, not a stopword."""
    word = word.lower()
    return word not in STOPWORDS and not word.endswith("n't")


def has_word(word: str, stems: Collection[str]) -> bool:
    """Whether a stem, or a longer or shorter form of it, is among ``stems``."""
    if word in stems or len(word) < 5:
        return word in stems
    return any(len(other) >= 5 and (word.startswith(other) or other.startswith(word)) for other in stems)


OPPOSITES: dict[str, set[str]] = {}
for _pair in sorted(_OPPOSITES):
    _one, _other = (stem(word) for word in _pair.split("/"))
    OPPOSITES.setdefault(_one, set()).add(_other)
    OPPOSITES.setdefault(_other, set()).add(_one)

_I_DONT_KNOW = re.compile(
    r"(?:(?:sorry|i am sorry|i'?m sorry|unfortunately),?\s*)?(?:but )?(?:i\s+)?(?:do\s+not|don'?t)\s+know"
    r"(?:\s+(?:the\s+answer|that|this|it))?(?:\s+to\s+(?:that|this|the|your)(?:\s+question)?)?|idk"
)


def is_i_dont_know(answer: str) -> bool:
    """Whether an answer is only "I don't know", ignoring apostrophe style, case and final period."""
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", answer).lower().strip(" \t\r\n.!\"'")
    return _I_DONT_KNOW.fullmatch(text) is not None
