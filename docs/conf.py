"""The documentation as a site: `sphinx-build -W -c docs . docs/_build`, with the packages of the extra `docs`.

The pages are the Markdown files of the repository, which also read well without the site. The table of contents has the
links in the tables of docs/README.md, so a line there adds a page, and those in the README of each folder of docs.
"""

import re
from pathlib import PurePosixPath

from sphinx.application import Sphinx

import coordinator

project = "coordinator"
version = release = coordinator.__version__
root_doc = "docs/README"
include_patterns = ["*.md", "benchmarks/*.md", "docs/**.md", "tests/README.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_argparse_cli"]

html_theme = "furo"
html_title = f"coordinator {release}"
html_extra_path = ["index.html"]  # leads to docs/README.html
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 4  # as GitHub makes them
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = ["ref.python"]  # `bytes` is Python's, although classes have attributes of this name
napoleon_custom_sections = [("Call arguments", "params_style")]
default_role = "code"  # what docstrings have between backticks


def with_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds a hidden table of contents to each section of docs/README.md, and to the README of each folder of docs.

    Links that have the name of a page as their text get its title instead.
    """
    if re.fullmatch(r"docs(/\w+)?/README", name):
        link = r"^\| \[[^]]+\]\(([\w./]+)\.md\)" if name == root_doc else r"\]\((\w+)\.md[)#]"
        sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE) if name == root_doc else [source[0]]
        source[0] = "\n".join(section + _toctree(section, link) for section in sections)
    source[0] = re.sub(r"\[[\w/]+\.md\]\(", "[](", source[0])


def _toctree(section: str, link: str) -> str:
    pages = [str(PurePosixPath(page)) for page in dict.fromkeys(re.findall(link, section, re.MULTILINE))]
    caption = re.match(r"## (.+)", section)
    options = [":hidden:", f":caption: {caption[1]}"] if caption else [":hidden:"]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""]) if pages else ""


def as_meant(app: Sphinx, what: str, name: str, described: object, options: object, lines: list[str]) -> None:
    """Takes docstrings as they are meant: indented paragraphs are pictures and programs, names may have a plural."""
    for number in range(len(lines) - 1, 1, -1):
        before, blank, line = lines[number - 2 : number + 1]
        if line[:1] == " " and not blank and before[:1] not in ("", " "):
            lines[number - 1 : number] = ["", "::", ""]
    lines[:] = [re.sub(r"(`[^`]+`)(\w*)", lambda name: "\\ ".join(filter(None, name.groups())), line) for line in lines]


def setup(app: Sphinx) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", as_meant, priority=1)  # before the sections of docstrings are read
    app.connect("source-read", with_contents)
