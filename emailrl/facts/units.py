"""Units of measurement and money, each with its base unit and factor; amounts are compared in the base unit."""

from __future__ import annotations

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
    ("pallet", 1): "pallet pallets",
    ("drum", 1): "drum drums",
    ("crate", 1): "crate crates",
    ("box", 1): "box boxes",
    ("bag", 1): "bag bags",
    ("container", 1): "container containers",
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
KINDS = {
    **dict.fromkeys(("usd", "cad", "aud", "eur", "gbp", "jpy"), "money"),
    **dict.fromkeys(("percent", "point"), "share"),
    **dict.fromkeys(("minute", "month"), "span"),
    **dict.fromkeys(("celsius", "fahrenheit"), "temperature"),
    **dict.fromkeys(("psi", "bar"), "pressure"),
    **dict.fromkeys(("gram", "barrel", "gallon", "litre", "mmbtu", "mcf", "watt", "watthour"), "stuff"),
    **dict.fromkeys(("pallet", "drum", "crate", "box", "bag", "container"), "stuff"),
}
"""Groups of units that cannot be converted into each other but answer the same question."""
SPANS = ("hour", "day", "week", "fortnight", "month", "year", "decade")
"""Time spans that "a" counts as one."""
_RATES = {"d": "day", "h": "hour", "y": "year", "s": "second", "mo": "month", "pound": "lb"}
_ADVERBS = {"hourly": "hour", "daily": "day", "weekly": "week", "monthly": "month", "quarterly": "quarter"}
_ADVERBS |= {"yearly": "year", "annually": "year"}


def rate_of(word: str) -> str:
    """Return the unit after "per" in one spelling: "day" for "d", "days" and "daily"."""
    word = word.lower()
    word = _ADVERBS.get(word, word)
    word = _RATES.get(word, word.removesuffix("s"))
    return _UNIT_WORDS[UNITS[word]].split()[0] if word in UNITS else word
