"""A setting that a page names in its text exists under that name in the environment."""

from __future__ import annotations

import re

import pytest
from documents.commands import OTHERS_VARIABLES, SETTINGS
from documents.pages import DOCUMENTS, prose

from emailrl.settings.names import leaves

GENERATED = {"docs/cli.md", "docs/settings.md", "docs/openrlhf.md"}
FIELDS = {leaf.field.upper() for leaf in leaves()}
NO_SETTINGS = OTHERS_VARIABLES | {
    *("BACKUP_BUCKET", "FORCE_COLOR", "GLOO_SOCKET_IFNAME", "HF_ENDPOINT", "NCCL_SOCKET_IFNAME", "NO_COLOR"),
    *("OMP_WAIT_POLICY", "OPENAI_CUSTOM_HEADERS", "OPENAI_ORG_ID", "PIP_FLAGS", "VLLM_ENABLE_V1_MULTIPROCESSING"),
    *("WANDB_BASE_URL", "XDG_CACHE_HOME", "EMAILRL_IMAGE", "NANO_DIR", "TOOL_CALLS", "NAME"),
}
"""Variables of other programs, and names of other things."""


def named(text: str) -> set[str]:
    """Names in capitals in code: those of two or more words, and single words that are a setting's field."""
    codes = " ".join(re.findall(r"`([^`\n]+)`", text))
    words = re.findall(r"(?<![\w<$-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*(?![\w(])", codes)
    return {word for word in words if "_" in word or word in FIELDS}


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page not in GENERATED])
def test_settings_in_the_text_exist(page: str) -> None:
    assert named(prose(page)) - NO_SETTINGS <= SETTINGS


def test_a_wrong_name_is_found() -> None:
    assert named("set `PACKING=off` and `MAX_STEP=3`, not `EMAILRL_PACKING` or GAMMA") - SETTINGS == {
        "PACKING",
        "MAX_STEP",
    }
