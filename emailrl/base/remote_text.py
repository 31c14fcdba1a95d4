"""Text that can be sent, to any model without being taken for control tokens."""

from __future__ import annotations

import re

_TAGS = (
    r"s|cls|sep|mask|unk|pad|[be]o[a-z]|sop|think|tools?|toolcall|escape|unused\d{1,4}|image|audio|video|seed:[a-z]{1,32}|"
    r"img|ref|box|quad|filename|reponame|2mass|"
    r"(?:function|parameter|invoke)(?:[= ][^<>\n]{0,64})?"
)
_BRACKETED = (
    "INST|IMG|AUDIO|PREFIX|SUFFIX|MIDDLE|THINK|ARGS|REF|BBOX|STEP|CLS|SEP|MASK|PAD|UNK|BOS|EOS|EOT|[gs]MASK|TRANSCRIBE|"
    "multimodal|@BOS@"
)
_PART = (
    "(?:available|system|prompt|model|settings|arg|key|value|tool|call|result|response|function|content|token|special|"
    "bos|eos|pad|unk|sep|cls|mask|start|end|begin|of|turn|header|id|img|image|im|patch|newline|break|context|audio|video|"
    "vision|text|ref|smiles|amino|dna|think|thought|reasoning|fim|prefix|middle|suffix|extra|repo|gh|stars|issue|comment|"
    "closed|jupyter|code|script|output|empty|commit|before|after)s?"
)
_COMPOUND = (
    rf"(?:{_PART}(?:_{_PART}){{1,5}}|(?:special|control|reserved|extra_id|(?:unused|special|reserved)_token)_\d{{1,4}}|"
    "(?:repo_name|file_sep|commit_msg))"
)
"""Words that tokenizers use in control tokens; other words with an underscore are ids and placeholders in emails."""
_CONTROL = re.compile(
    r"[<\[](?=[|｜])|<(?=[^\s<>|｜][^<>|｜\n]{0,64}[|｜]>"  # <|im_end|>, <｜User｜>, [|user|], <|turn>, <turn|>
    rf"|(?i:/?(?:[a-z]{{1,32}}:)?{_COMPOUND}>"  # <start_of_turn>, </tool_call>, <minimax:tool_call>
    rf"|/?(?:{_TAGS})>)|</?SYS>>)"
    rf"|\[(?=/?(?:{_BRACKETED}|(?i:{_COMPOUND}))\])|\](?=~!?b[\[\]])|\[(?=e~\[)"  # [INST], [TOOL_CALLS], ]~b]
)
"""The start of any string that is a control token, or has a meaning in chat templates, in any model family."""


def sendable(text: str) -> str:
    """The text without lone surrogates, which JSON may contain but which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def harmless(text: str) -> str:
    """Insert a space after the first character of each string that looks like a control token."""
    return _CONTROL.sub(r"\g<0> ", text)  # one pass suffices: an inserted space cannot create a new match
