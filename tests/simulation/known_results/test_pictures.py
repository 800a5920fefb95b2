"""All known results in one command, as a reader runs it."""

from pathlib import Path

import pytest

from coordinator.simulation.known_results.__main__ import RESULTS, main
from tests.simulation.known_results.measured_once import measured_once


def test_each_is_said_in_a_line_and_drawn_with_named_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["known_results", str(tmp_path / "pictures")])
    figures = []
    for known in RESULTS.values():
        draw, measured = known.draw, measured_once(known)
        monkeypatch.setattr(known, "measure", lambda measured=measured: measured)
        monkeypatch.setattr(known, "draw", lambda measured, draw=draw: figures.append(draw(measured)) or figures[-1])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(RESULTS)
    assert sorted(path.stem for path in (tmp_path / "pictures").glob("*.png")) == sorted(RESULTS)
    for axes in (axes for figure in figures for axes in figure.axes):
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
