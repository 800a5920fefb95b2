"""The targets of a BUILD file, parsed as Python: calls with literal arguments."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

from tests import ROOT


@dataclasses.dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
      rule: the called function, such as `py_library`.
      name: the name of the target.
      attributes: the other arguments, with globs replaced by the matching files.
    """

    rule: str
    name: str
    attributes: dict[str, Any]

    @property
    def files(self) -> set[str]:
        """The source files, relative to the root."""
        return set(self.attributes.get("srcs", ()))

    @property
    def inner_deps(self) -> set[str]:
        """The names of the targets in this file that it depends on."""
        return {label.removeprefix(":") for label in self.attributes.get("deps", ()) if label.startswith(":")}

    @property
    def distributions(self) -> set[str]:
        """The names of the installed distributions that it depends on."""
        prefix = "@pypi//"
        return {label.removeprefix(prefix) for label in self.attributes.get("deps", ()) if label.startswith(prefix)}


class BuildFile:
    """A BUILD file.

    Args:
      path: the file; its globs are taken relative to its folder.
    """

    def __init__(self, path: Path = ROOT / "BUILD"):
        self._folder = path.parent
        self.targets: dict[str, Target] = {}
        for statement in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._add(statement.value)

    def of_rule(self, rule: str) -> list[Target]:
        """Returns the targets of one rule, in the order of the file."""
        return [target for target in self.targets.values() if target.rule == rule]

    def _add(self, call: ast.Call) -> None:
        attributes = {keyword.arg: self._value(keyword.value) for keyword in call.keywords if keyword.arg}
        if name := attributes.pop("name", None):
            assert name not in self.targets, f"BUILD has two targets called {name}."
            self.targets[name] = Target(ast.unparse(call.func), name, attributes)

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return self._value(node.left) + self._value(node.right)
        if isinstance(node, ast.Call):
            return self._matches(node)
        return ast.literal_eval(node)

    def _matches(self, call: ast.Call) -> list[str]:
        assert ast.unparse(call.func) == "glob", f"BUILD calls {ast.unparse(call.func)}, which is not understood here."
        excluded = {name for keyword in call.keywords for name in self._expand(ast.literal_eval(keyword.value))}
        return sorted(self._expand(ast.literal_eval(call.args[0])) - excluded)

    def _expand(self, patterns: list[str]) -> set[str]:
        paths = {path for pattern in patterns for path in self._folder.glob(pattern) if path.is_file()}
        return {str(path.relative_to(self._folder)) for path in paths}
