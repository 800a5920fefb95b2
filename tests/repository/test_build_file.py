"""BUILD is what its script writes from the sources."""

from tests import ROOT
from tests.repository.build_file import build_file


def test_the_build_file_is_written_from_the_sources() -> None:
    expected = build_file()
    assert (ROOT / "BUILD").read_text(encoding="utf-8") == expected, "python -m tests.repository.build_file"
    # A library for each folder of the package, the root included, and a test for each folder of tests.
    assert expected.count("py_library(") > 20
    assert 'name = "ps_strategy_test"' in expected
