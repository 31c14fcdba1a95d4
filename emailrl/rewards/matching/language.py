"""The English a matcher needs: words that say nothing, stems, opposites, denials, and clauses they reach over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

STOPWORDS = frozenset(
    """a an the this that these those there here it its itself he him his she her hers they them their theirs we us our
    ours you your yours i me my mine who whom whose which what when where why how and or but nor so as at by for from in
    into of off on onto out over per than then to up through upon via with within about after all also any around be been being
    am is are was were do does did done has have had having can could may might must shall should will would not no yes
    both each either every some such very just only even still already ever if because since due while until though
    please according said say says saying told tell tells mention mentions mentioned ask asks asked asking suggest
    suggests suggested suggesting recommend recommends recommended recommending state states stated note noted inform
    informed indicate indicates indicated think thinks thought want wants wanted need needs needed go going get gets got
    make makes made take takes took cannot never nobody none nothing neither currently now approximately roughly nearly almost exactly sharp total called named
    answer know known follow follows following it's he's she's they're i'm you're we're that's there's email emails mail
    message user however moreover therefore thus specifically apparently based find found new""".split()
) - {"new", "after", "before", "out", "over", "up", "off", "all", "without"}

_IRREGULAR = {
    "lost": "lose", "sent": "send", "met": "meet", "held": "hold", "paid": "pay", "bought": "buy", "sold": "sell",
    "left": "leave", "led": "lead", "kept": "keep", "built": "build", "spent": "spend", "chose": "choose",
    "chosen": "choose", "given": "give", "gave": "give", "began": "begin", "begun": "begin", "wrote": "write",
    "written": "write", "fell": "fall", "fallen": "fall", "rose": "rise", "risen": "rise", "grew": "grow",
    "grown": "grow", "hid": "hide", "brought": "bring", "ran": "run", "came": "come", "went": "go", "gone": "go",
    "people": "person", "children": "child", "men": "man", "women": "woman",
}  # fmt: skip


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """A crude stem, the same for most forms of a word."""
    word = re.sub(r"'s?$", "", word.lower())
    word = _IRREGULAR.get(word, word)
    for suffix, least in (("ations", 5), ("ation", 5), ("ments", 5), ("ment", 5), ("ings", 3), ("ing", 3), ("ions", 5),
                          ("ion", 5), ("ied", 3), ("ies", 3), ("ed", 3), ("ly", 4), ("s", 3)):  # fmt: skip
        if word.endswith(suffix) and len(word) - len(suffix) >= least and not word.endswith("ss"):
            word = word[: -len(suffix)] + ("y" if suffix in ("ied", "ies") else "")
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 4 and word[-1] == "e" else word


def content_stems(text: str) -> list[str]:
    """Stems of the words that say something, in order."""
    words = re.findall(r"[^\W\d_\ue000-\uf8ff]+(?:'[^\W\d_]+)?", text)
    return [stem(word) for word in words if word.lower() not in STOPWORDS and not word.lower().endswith("n't")]


_OPPOSITES = """more/fewer more/less longer/shorter long/short increase/decrease rise/fall up/down before/after early/late
earlier/later approve/reject accept/decline accept/reject agree/refuse open/close buy/sell high/low higher/lower add/remove
start/end begin/end beginning/end include/exclude first/last larger/smaller large/small big/small junior/senior north/south
east/west old/new light/dark left/right delay/advance win/lose gain/lose morning/afternoon morning/evening inside/outside
same/different internal/external permanent/temporary happy/unhappy many/few import/export allow/forbid grant/deny
hire/fire strong/weak good/bad better/worse maximum/minimum buyer/seller debit/credit enter/leave arrive/depart
postpone/accelerate extend/shorten positive/negative success/failure safe/unsafe cheap/expensive enough/insufficient
small/enough full/empty fast/slow quickly/slowly support/oppose confirm/cancel public/private winter/summer"""
OPPOSITES: dict[str, set[str]] = {}
for _pair in _OPPOSITES.split():
    _one, _other = (stem(word) for word in _pair.split("/"))
    OPPOSITES.setdefault(_one, set()).add(_other)
    OPPOSITES.setdefault(_other, set()).add(_one)

_DENIAL = re.compile(
    r"\b(?:not|never|nobody|no one|none|neither|nor|cannot|no longer|no|nothing|nowhere|hardly|false|wrong|incorrect)\b"
    r"|n't\b|\b(?:do|does|did|is|are|was|were|has|have|had|wo|ca|could|would|should)nt\b",
    re.IGNORECASE,
)
_NO_DENIAL = re.compile(
    r"\bnot only\b|\bno (?:later|earlier|more|less|fewer) than\b|\bnot (?:later|more|less) than\b|\bno doubt\b"
    r"|\bwhy not\b|\bno\.? (?=[\ue000-\uf8ff])|(?:\bnot\b|n't\b)(?=.*\buntil\b)",
    re.IGNORECASE,
)
_DENYING_STEMS = frozenset(
    stem(word)
    for word in "rejected refused declined denied cancelled canceled dismissed dropped excluded abandoned refuted "
    "failed forbidden prohibited closed outdated unlike false ruled".split()
)
_FORWARD = re.compile(
    r"\b(?:instead of|rather than|except(?: for)?|other than|apart from|as opposed to|away from|in place of|anything but"
    r"|(?:any|every|all|no)\s?\w* but|(?<=chosen )over|(?<=preferred )over|(?<=picked )over|(?<=selected )over"
    r"|not(?= (?-i:[A-Z\ue000-\uf8ff])))\b",
    re.IGNORECASE,
)
_MOVED = re.compile(
    r"\b(?:mov|chang|switch|shift|postpon|push|brought|bring|reschedul|renam|transfer|relocat|rais|rose|went|extend)\w*\b"
    r"[^,;]{0,40}?\bfrom\s(?P<old>[^,;]{1,40}?)\s(?:to|until|till)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No))(?<!\b(?:Inc|Ltd|etc|e\.g|i\.e))(?<!\bCorp)[.]+(?=\s|$)|[!;\n]+|(?<=\?)\s"
    r"|:\s|\s[-\u2013\u2014]+\s|[()]"
)
_CLAUSE = re.compile(
    r",\s+(?:(?:and|or|but|so|because|although|while|which|who)\s+)?|\s+(?:but|because|although|though|while|whereas)\s+"
    r"|\s+so\s+(?=that\b)|\s+and\s+(?=(?:not|never|will|would|should|is|are|was|were|has|have|can|could|must|he|she|it"
    r"|they|we|you|i|then|also|to)\b)",
    re.IGNORECASE,
)
_TRAILING = re.compile(r"^(?:which|who|whose|where|\w{2,}ing|hence|although|while)\b", re.IGNORECASE)


def clauses(text: str, known: frozenset[str] = frozenset()) -> Iterator[tuple[str, bool | None, bool]]:
    """Cut a text into ``(piece, asserted, main)``.

    ``asserted`` is False where a denial reaches over the piece, None where nothing is said of it: it is asked back
    ("Friday? No, Monday") or the old value of a change ("from Friday to Monday"). Words that deny by meaning
    ("rejected") count unless their stem is ``known`` from the question or the reference. ``main`` is False for what
    only trails a sentence.
    """
    for sentence in _SENTENCE.split(text):
        position, number = 0, 0
        for cut in [*_CLAUSE.finditer(sentence), None]:
            piece = sentence[position : cut.start() if cut else len(sentence)]
            if piece.strip():
                trailing = number > 0 and (_TRAILING.match(piece) or _opens_trailing(sentence[:position]))
                for part, asserted in _signed(piece, known):
                    yield part, asserted, not trailing
                number += 1
            position = cut.end() if cut else position


def denies(text: str, known: frozenset[str] = frozenset()) -> bool:
    """Whether a clause holds a denial."""
    if _DENIAL.search(_NO_DENIAL.sub(" ", text)):
        return True
    return any(word in _DENYING_STEMS and word not in known for word in content_stems(text))


def _signed(piece: str, known: frozenset[str]) -> Iterator[tuple[str, bool | None]]:
    if piece.rstrip().endswith("?"):
        yield piece, None
        return
    moved = _MOVED.search(piece)
    if moved:
        yield moved["old"], None
        piece = piece[: moved.start("old")] + piece[moved.end("old") :]
    head, *tail = _FORWARD.split(piece, maxsplit=1)
    asserted = not denies(head, known)
    yield head, asserted
    for rest in tail:
        yield rest, not asserted


def _opens_trailing(before: str) -> bool:
    return re.search(r",\s+(?:which|who|whose|where)\s+$", before, re.IGNORECASE) is not None
