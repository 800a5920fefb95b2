"""Tests of the page about messages: its quotes are in the sources, and it has every warning that these log."""

import ast
import re
from collections.abc import Iterator

from tests import ROOT
from tests.repository.parsing import parse

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = PAGE.partition("\n## Messages of TensorFlow")[0]
SOURCES = [parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "coordinator").rglob("*.py"))]
HOLE = "\0"  # replaces a variable part of a message


def text_of(node: ast.AST) -> str | None:
    """Returns a string literal with a hole for each variable part; None if the node is no such literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[a-z]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    return None


def quoted_messages() -> list[str]:
    cells = re.findall(r"^\| (`[^|]+`) \|", OURS, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def logged_warnings() -> Iterator[str]:
    """Yields each message that is logged as a warning or error, with holes."""
    for node in (node for tree in SOURCES for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            logger, text = ast.unparse(node.func.value), text_of(node.args[0])
            if logger in ("_logger", "_LOG") and node.func.attr in ("warning", "error", "exception") and text:
                yield text


def matches(message: str, text: str) -> bool:
    """Returns True if a quoted message, in which `...` varies, occurs in a text."""
    return re.search(".*".join(re.escape(part.strip()) for part in message.split("...")), text, re.DOTALL) is not None


def test_the_sources_contain_every_message_on_the_page() -> None:
    texts = [text for tree in SOURCES for node in ast.walk(tree) if (text := text_of(node))]
    assert len(quoted_messages()) > 60
    stale = [message for message in quoted_messages() if not any(matches(message, text) for text in texts)]
    assert not stale, "Quote these messages in docs/troubleshooting.md as the sources have them now."


def test_the_page_has_every_warning_that_is_logged() -> None:
    with_text = [text for text in logged_warnings() if len(text.replace(HOLE, "").strip()) > 10]
    assert len(with_text) > 20
    missing = [text for text in with_text if not any(matches(message, text) for message in quoted_messages())]
    assert not missing, "Explain these messages in docs/troubleshooting.md."
