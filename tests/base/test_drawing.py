"""Figures as files."""

from __future__ import annotations

from pathlib import Path

from emailrl.base.drawing import new_figure, save


def test_the_same_data_give_the_same_files(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "other"):
        figure = new_figure(2, 1)
        figure.subplots().plot([0, 1], [0.5, 0.25])
        png, svg = save(figure, tmp_path / name / "curve")
        assert (png.name, svg.name) == ("curve.png", "curve.svg")
        contents.append((png.read_bytes(), svg.read_bytes()))
    assert contents[0] == contents[1]
    assert contents[0][0].startswith(b"\x89PNG") and b"</svg>" in contents[0][1]
