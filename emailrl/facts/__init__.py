"""One grammar of what English text states: dates and times, quantities, literals, names and words.

Template questions are made with it (``mentions``), questions written by a model are checked with it
(``emailrl.questions.llm.replies``), and answers are compared with it (``emailrl.rewards.matching``).
"""
