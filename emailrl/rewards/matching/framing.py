"""An answer without its framing: courtesy, sources, and what introduces it."""

from __future__ import annotations

import re

from emailrl.rewards.matching.markers import COURTESY, LEAD, SOURCE, TAIL

_SENTENCE = re.compile(r"[^\s.!?](?:[^\n.!?]|[.!?](?![\s]|$))*[.!?]*")


def without_framing(answer: str, keep: str, question: str = "") -> str:
    """A cleaned answer without courtesy, sources and lead-ins; nothing that holds ``keep`` is cut out."""

    def cut(found: re.Match[str]) -> str:
        return found[0] if len(keep) > 3 and keep in found[0].casefold() else " "

    if len(question) > 8 and answer.casefold().startswith(question.casefold()):
        answer = answer[len(question) :]
    text = SOURCE.sub(cut, answer)
    text = _SENTENCE.sub(lambda found: cut(found) if COURTESY.match(found[0]) else found[0], text)
    text = LEAD.sub(cut, text)
    text = TAIL.sub(cut, text)
    return text.strip()
