"""Writes the table of docs/versions.md from the results that `.ci/matrix` has left as junit XML.

Without arguments the results are those in .ci/environments; arguments are other files. A combination that was not run
again keeps its row.
"""

import pathlib
import sys
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
HEAD = ["| Python | TensorFlow | Keras | Others | Passed | Failed | Date |", "|---|---|---|---|---|---|---|"]


def row(file: pathlib.Path) -> str:
    """Returns the row of one result; the name of its suite has the versions."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    python, tensorflow, keras, others = [*suite.get("name").split(), "newest"][:4]
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    passed = int(suite.get("tests")) - failed - int(suite.get("skipped"))
    date = suite.get("timestamp").partition("T")[0]
    cells = (python, tensorflow, keras, others.strip("-"), passed, failed, date)
    return f"| {' | '.join(map(str, cells))} |"


def combination(line: str) -> list[tuple[int | str, ...]]:
    """Returns what a row is about, to sort by: a nightly build replaces an older one."""
    python, tensorflow, keras, others = (cell.strip() for cell in line.split("|")[1:5])
    releases = (version.partition(".dev")[0].partition("-dev")[0] for version in (tensorflow, keras, python))
    return [*(tuple(int(part) for part in release.split(".")) for release in releases), (others,)]


def main() -> None:
    """Writes the page again."""
    files = [*map(pathlib.Path, sys.argv[1:])] or sorted((ROOT / ".ci" / "environments").glob("*/default.xml"))
    text = PAGE.read_text()
    before, _, after = text.partition("\n".join(HEAD) + "\n")
    lines = after.splitlines()
    known = [line for line in lines if line.startswith("|")]
    rows = {str(combination(line)): line for line in (*known, *map(row, files))}
    rest = [line for line in lines if not line.startswith("|")]
    table = [*HEAD, *sorted(rows.values(), key=combination)]
    PAGE.write_text("\n".join([before.rstrip("\n"), "", *table, *rest, ""]).rstrip("\n") + "\n")


main()
