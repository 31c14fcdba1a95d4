"""Generates questions with exact answers from any mailbox database, without a model.

Each kind of question searches an email for one provable answer; ``generate`` balances and splits what they find.
"""

from emailrl.questions.template.generate import DEFAULT_LIMIT, generate
from emailrl.questions.template.hard import HARD_KINDS
from emailrl.questions.template.usual import KINDS

__all__ = ["DEFAULT_LIMIT", "HARD_KINDS", "KINDS", "generate"]
