"""One grammar of what English text states: dates and times, quantities, literals, names and words.

Questions are made with it (``mentions``), what models write is checked with it (``stated``), and answers are compared
with it (``emailrl.rewards.matching``).
"""
