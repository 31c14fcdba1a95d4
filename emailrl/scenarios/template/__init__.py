"""Questions with exact answers out of any mailbox database, without a model.

Each ``*_kinds`` module holds a family of kinds, each of which searches a mail for one provable answer; ``generate``
balances and splits what they find.
"""

from emailrl.scenarios.template.generate import DEFAULT_LIMIT, HARD_KINDS, KINDS, generate

__all__ = ["DEFAULT_LIMIT", "HARD_KINDS", "KINDS", "generate"]
