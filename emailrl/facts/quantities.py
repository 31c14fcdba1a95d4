"""Numbers in text: digits with separators, scales and units of measurement or money, and numbers spelled out.

Quantities are compared by value in their base unit: "2 hours" equals "120 minutes", "$2.3M" equals "2,300,000
dollars", "15%" is not "$15". A number without a unit takes the unit of the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from emailrl.facts.words import CARDINALS, ORDINALS, TENS

_UNIT_WORDS: dict[tuple[str, float], str] = {
    ("usd", 1): "$ usd us$ dollar dollars bucks",
    ("usd", 0.01): "cent cents",
    ("cad", 1): "c$ cad",
    ("aud", 1): "a$ aud",
    ("eur", 1): "\u20ac eur euro euros",
    ("gbp", 1): "\u00a3 gbp",
    ("jpy", 1): "\u00a5 jpy yen",
    ("percent", 1): "% percent pct",
    ("point", 1): "pp",
    ("basis", 1): "bp bps",
    ("minute", 1 / 60_000): "millisecond milliseconds ms msec",
    ("minute", 1 / 60): "second seconds sec secs",
    ("minute", 1): "minute minutes min mins",
    ("minute", 60): "hour hours hr hrs",
    ("minute", 1440): "day days",
    ("minute", 10080): "week weeks wk wks",
    ("minute", 20160): "fortnight fortnights",
    ("month", 1): "month months",
    ("month", 12): "year years yr yrs",
    ("month", 120): "decade decades",
    ("gram", 1e-3): "mg milligram milligrams",
    ("gram", 1): "g gram grams",
    ("gram", 28.349523125): "oz ounce ounces",
    ("gram", 453.59237): "lb lbs",
    ("gram", 1e3): "kg kilogram kilograms kilo kilos",
    ("gram", 1e6): "t ton tons tonne tonnes",
    ("gram", 1e9): "kt kiloton kilotons",
    ("pound", 1): "pound pounds",
    ("metre", 1e-3): "millimeter millimeters millimetre millimetres",
    ("metre", 0.01): "cm centimeter centimeters centimetre centimetres",
    ("metre", 0.0254): "inch inches",
    ("metre", 0.3048): "ft feet foot",
    ("metre", 0.9144): "yard yards",
    ("metre", 1): "m metre metres meter meters",
    ("metre", 1e3): "km kilometer kilometers kilometre kilometres",
    ("metre", 1609.344): "mile miles",
    ("area", 0.09290304): "sqft",
    ("area", 1): "sqm",
    ("area", 4046.8564224): "acre acres",
    ("area", 1e4): "hectare hectares ha",
    ("area", 1e6): "sqkm",
    ("area", 2589988.110336): "sqmi",
    ("litre", 1e-3): "ml milliliter milliliters millilitre millilitres",
    ("litre", 1): "litre litres liter liters",
    ("litre", 1e3): "cbm",
    ("gallon", 1): "gallon gallons",
    ("barrel", 1): "barrel barrels bbl bbls",
    ("speed", 1.609344): "mph",
    ("speed", 1): "km/h kmh kph",
    ("celsius", 1): "degc",
    ("fahrenheit", 1): "degf",
    ("degree", 1): "\u00b0 degree degrees",
    ("psi", 1): "psi",
    ("bar", 1): "bar",
    ("byte", 1): "byte bytes",
    ("byte", 1e3): "kb kilobyte kilobytes",
    ("byte", 1e6): "mb megabyte megabytes",
    ("byte", 1e9): "gb gigabyte gigabytes",
    ("byte", 1e12): "tb terabyte terabytes",
    ("times", 1): "times",
    ("box", 1): "box boxes",
    **{(name, 1): f"{name} {name}s" for name in ("pallet", "drum", "crate", "bag", "container")},
    ("mmbtu", 1e-6): "btu btus",
    ("mmbtu", 1): "mmbtu mmbtus dth dekatherm dekatherms",
    ("mcf", 1e-3): "cf",
    ("mcf", 1): "mcf",
    ("mcf", 1e3): "mmcf",
    ("mcf", 1e6): "bcf",
    ("watt", 1): "watt watts",
    ("watt", 1e3): "kw kilowatt kilowatts",
    ("watt", 1e6): "mw megawatt megawatts",
    ("watt", 1e9): "gw gigawatt gigawatts",
    ("watthour", 1e3): "kwh",
    ("watthour", 1e6): "mwh",
    ("watthour", 1e9): "gwh",
}
UNITS = {word: unit for unit, words in _UNIT_WORDS.items() for word in words.split()}
"""Base unit and factor of each unit, by its lowercase name after ``words.clean``."""
SENSES: dict[str, tuple[tuple[str | None, float], ...]] = {
    "pound": (("gbp", 1), ("gram", 453.59237)),
    "degree": (("celsius", 1), ("fahrenheit", 1)),
    "basis": (("percent", 0.01), ("point", 0.01)),
}
"""Units with several meanings: a basis point is a hundredth of a percent or of a percentage point."""
KINDS = {  # Groups of units that cannot be converted into each other but answer the same question.
    **dict.fromkeys(("usd", "cad", "aud", "eur", "gbp", "jpy"), "money"),
    **dict.fromkeys(("percent", "point"), "share"),
    **dict.fromkeys(("minute", "month"), "span"),
    **dict.fromkeys(("celsius", "fahrenheit"), "temperature"),
    **dict.fromkeys(("psi", "bar"), "pressure"),
    **dict.fromkeys(("gram", "barrel", "gallon", "litre", "mmbtu", "mcf", "watt", "watthour"), "stuff"),
    **dict.fromkeys(("pallet", "drum", "crate", "box", "bag", "container"), "stuff"),
}
SPANS = ("hour", "day", "week", "fortnight", "month", "year", "decade")  # Time spans that "a" counts as one.
_RATES = {"d": "day", "h": "hour", "y": "year", "s": "second", "mo": "month", "pound": "lb"}
_ADVERBS = {"hourly": "hour", "daily": "day", "weekly": "week", "monthly": "month", "quarterly": "quarter"}
_ADVERBS |= {"yearly": "year", "annually": "year"}

SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "dozen": 12.0}
SHORT_SCALES = {"k": 1e3, "m": 1e6, "mn": 1e6, "mm": 1e6, "bn": 1e9, "b": 1e9, "mil": 1e6}
FRACTIONS = {"half": 0.5, "third": 1 / 3, "quarter": 0.25, "fourth": 0.25, "fifth": 0.2, "tenth": 0.1}


def _alternatives(words: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


_CURRENCY = r"(?:\b(?:US|C|A)\$|[$\u20ac\u00a3\u00a5]|\b(?:USD|CAD|AUD|EUR|GBP|JPY)\s?)"
_WORD_UNITS = _alternatives(word for word in UNITS if word[0].isalpha())
_UNIT = rf"(?:\s?%|[\s-]?per\s?cent\b|\s?[$\u20ac\u00a3\u00a5\u00b0]|[\s-]?(?:metric\s)?(?:{_WORD_UNITS})\b)"
_RATE = (
    r"(?:(?:\s?/\s?|\s?\bper\s(?!cent\b))(?P<per>[a-z]+)|\s?\b(?:for\s)?(?:an?|each|every)\s(?P<each>hour|day|week|month|year|share|head"
    r"|person|barrel|gallon|pound|ton)s?\b|\s(?P<adverb>hourly|daily|weekly|monthly|quarterly|yearly|annually)\b)"
)
_DIGITS = r"\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_SPELLED = _alternatives([*CARDINALS, *TENS])
_SCALE = _alternatives(SCALES)
_FRACTION = _alternatives(FRACTIONS)

NUMBER = re.compile(
    rf"(?P<currency>{_CURRENCY})?\s?(?<![\w.])(?P<sign>[-\u2212](?=\d)|(?:minus|negative)\s)?(?:"
    rf"(?P<ratio>(?:(?P<full>\d+)[\s-])?(?P<above>\d{{1,2}})/(?P<below>\d{{1,2}}))(?![\d/])"
    rf"|(?P<ordinal>\d+)(?:st|nd|rd|th)\b"
    rf"|(?P<digits>{_DIGITS})(?:(?P<short>\s?(?!m\b)(?:{_alternatives(SHORT_SCALES)})|m)\b|[\s-]?(?P<scale>{_SCALE})s?\b)?"
    rf"|(?P<share>(?:(?:{_SPELLED}|an?)[\s-](?:{_FRACTION})s?|half)\b(?:\s(?:an?|of\san?)\s(?:{_SCALE})\b"
    rf"|\san?(?=\s(?:{_WORD_UNITS}|per\scent)\b))?)"
    rf"|(?P<spelled>(?:an?\s(?=(?:{_SCALE})\b))?(?:{_SPELLED}|{_SCALE})\b"
    rf"(?:[\s-](?:and\s(?=(?:{_SPELLED})\b))?(?:{_SPELLED}|{_SCALE})\b)*"
    rf"(?:[\s-]and[\s-]a[\s-](?:half|quarter)\b(?:\s(?:{_SCALE})\b)?)?)"
    rf"|(?P<single>an?)(?=\s(?:{'|'.join(SPANS)})\b)"
    rf"|(?P<position>{_alternatives(ORDINALS)})\b"
    rf")(?P<unit>{_UNIT})?{_RATE}?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in a text; ``weak`` ones (years, "one", positions) are never rivals."""

    value: float
    base: str | None = None
    factor: float = 1.0
    rate: str | None = None
    weak: bool = False

    def agrees(self, other: Quantity) -> bool:
        """Whether the values are equal, after conversion to the base unit; a missing unit agrees with any."""
        if self.rate and other.rate and self.rate != other.rate:
            return False
        if self.base is None or other.base is None:
            return self._agrees_bare(other)
        return any(
            base == other_base and _close(self.value * factor, other.value * other_factor)
            for base, factor in self._senses
            for other_base, other_factor in other._senses
        )

    def _agrees_bare(self, other: Quantity) -> bool:
        bases = (self.base, other.base)
        if (self.rate or other.rate) and "minute" in bases:  # twice a week, every two weeks
            return False
        if "percent" in bases:
            bare, share = (self.value, other.value) if self.base is None else (other.value, self.value)
            if abs(bare) < 1 and _close(100 * bare, share):  # 0.5 and 50%
                return True
        if self.base is other.base and self.value != other.value and self.value % 1 == other.value % 1 == 0:
            return False  # codes, which may differ in the last digit alone
        # "40%" is no answer to a bare "40", but 40 may do for 40%: the question can say that it is a share.
        is_share = self.base is None and other.base in ("percent", "point", "basis")
        return _close(self.value, other.value) and not is_share

    def contradicts(self, other: Quantity) -> bool:
        """Whether the other is a different amount of the same kind."""
        if self.base is None or other.base is None:
            return not self.agrees(other)
        kinds, other_kinds = ({KINDS.get(base or "", base) for base, _ in one._senses} for one in (self, other))
        return bool(kinds & other_kinds) and (self.rate is None) == (other.rate is None) and not self.agrees(other)

    @property
    def _senses(self) -> tuple[tuple[str | None, float], ...]:
        return SENSES.get(self.base or "", ((self.base, self.factor),))


def read_quantity(found: re.Match[str]) -> Quantity:
    """Return the quantity of one match of ``NUMBER``: "$5 CAD" is in Canadian dollars, "$5 barrels" in US dollars."""
    value, weak = _value(found)
    currency = found["currency"]
    unit = re.sub(r"^[\s-]|metric\s", "", (found["unit"] or "").lower()).strip()
    base, factor = UNITS.get("percent" if unit.startswith("per") else unit, (None, 1.0))
    if currency and KINDS.get(base or "") != "money":
        base, factor = UNITS[currency.lower().strip()]
    rate = rate_of(found["per"] or found["each"] or found["adverb"] or "")
    if not found["single"]:
        weak = base is None and (weak or (1000 <= value <= 2099 and "," not in found[0]))
    if base is None and (found["ratio"] or found["share"]) and value < 1:
        value, base = 100 * value, "percent"
    return Quantity(-value if found["sign"] else value, base, factor, rate or None, weak)


def rate_of(word: str) -> str:
    """Return the unit after "per" in one spelling: "day" for "d", "days" and "daily"."""
    word = word.lower()
    word = _ADVERBS.get(word, word)
    word = _RATES.get(word, word.removesuffix("s"))
    return _UNIT_WORDS[UNITS[word]].split()[0] if word in UNITS else word


def _value(found: re.Match[str]) -> tuple[float, bool]:
    """The bare number, and whether it is weak."""
    if found["ratio"]:
        below = int(found["below"])
        return int(found["full"] or 0) + (int(found["above"]) / below if below else math.inf), False
    if found["ordinal"] or found["position"]:
        return float(found["ordinal"] or ORDINALS[found["position"].lower()]), True
    if found["digits"]:
        digits = found["digits"]
        if re.search(r"\.\d{3},", digits):  # 1.200,50 as written on the European continent
            digits = digits.replace(".", "").replace(",", ".")
        short, scale = ((found[group] or "").lower().strip() for group in ("short", "scale"))
        return float(digits.replace(",", "")) * (SHORT_SCALES.get(short) or SCALES.get(scale, 1.0)), False
    if found["single"]:
        return 1.0, True
    if found["share"]:  # "a third", "three quarters", "half a million"
        words = re.split(r"[\s-]", found["share"].lower())
        count = CARDINALS.get(words[0], TENS.get(words[0], 1))
        part = next(FRACTIONS[word.rstrip("s")] for word in words if word.rstrip("s") in FRACTIONS)
        return count * part * next((SCALES[word] for word in words if word in SCALES), 1.0), False
    words = re.split(r"[\s-]", found["spelled"].lower())
    total, current = 0.0, 0.0
    for word in words:  # "twenty-three", "sixteen hundred", "two and a half million"
        if word in SCALES:
            current = max(current, 1.0) * SCALES[word]
            if SCALES[word] >= 1000:
                total, current = total + current, 0.0
        else:
            current += CARDINALS.get(word, 0) + TENS.get(word, 0) + FRACTIONS.get(word, 0)
    return total + current, words in (["one"], ["once"])


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-5, abs_tol=1e-9)
