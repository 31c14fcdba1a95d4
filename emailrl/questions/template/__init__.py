"""Generates questions with exact answers from any mailbox database, without a model.

Each ``*_kinds`` module defines a family of question kinds; each kind searches an email for one provable answer.
``generate`` balances and splits their findings.
"""

from emailrl.questions.template.generate import DEFAULT_LIMIT, HARD_KINDS, KINDS, generate

__all__ = ["DEFAULT_LIMIT", "HARD_KINDS", "KINDS", "generate"]
