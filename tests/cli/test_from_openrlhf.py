"""``emailrl train --from-openrlhf``: TOML on stdout, nothing trained, and a file that the next command runs with."""

from __future__ import annotations

import re
from pathlib import Path

from emailrl.settings import load_settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference/openrlhf.md").read_text(encoding="utf-8")


def test_the_pages_command_prints_a_file_that_loads(emailrl, tmp_path: Path) -> None:
    [flags] = re.findall(r'^emailrl train --from-openrlhf "(.*)" > emailrl.toml$', PAGE, re.MULTILINE)
    code, out, err = emailrl("train", "--from-openrlhf", flags)
    assert (code, err) == (0, "")
    (tmp_path / "emailrl.toml").write_text(out)
    settings = load_settings(cwd=tmp_path, environ={})
    assert (settings.training.algorithm, settings.training.num_generations) == ("grpo", 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emailrl.toml"]  # no run was begun
    (tmp_path / "emailrl.toml").write_text("no_such_setting = 1\n")  # does not matter
    assert emailrl("train", "--from-openrlhf", "--max_steps 3")[0] == 0
