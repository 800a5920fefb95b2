"""The fenced blocks of code on the pages of the documentation."""

import re
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

_BLOCK = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: the language that it names, and its text without the indentation that it has in a list."""

    language: str
    text: str


def blocks(page: str | Path) -> list[Block]:
    """Returns the blocks of a page, named relative to the checkout, that name a language."""
    return [block for block in _fenced(page) if block.language.isidentifier()]


def unnamed(page: str | Path) -> list[str]:
    """Returns the blocks of a page that name no language: pictures, and what programs print."""
    return [block.text for block in _fenced(page) if not block.language]


def snippets(page: str | Path) -> list[str]:
    """Returns the blocks of Python on a page."""
    return [block.text for block in blocks(page) if block.language == "python"]


def _fenced(page: str | Path) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(language, re.sub(f"^{indent}", "", body, flags=re.M)) for indent, language, body in _BLOCK.findall(text)
    ]
