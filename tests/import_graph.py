"""Who imports whom in a package, read from its source.

The source is parsed and never run, so an import inside a function, under `if TYPE_CHECKING:` or by
`importlib.import_module("name")` counts like one at the top of a file. A name that is reached through an imported
module (`tf.__internal__.x` after `import tensorflow as tf`) counts as an import of `tensorflow.__internal__.x`.
"""

import ast
import dataclasses
import graphlib
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Where the name that is imported is not the name that is installed.
_DISTRIBUTION_OF_IMPORT = {"google": "protobuf", "grpc": "grpcio", "sklearn": "scikit-learn"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One module needs one name.

    Attributes:
      importer: the dotted name of the module that needs it.
      imported: the dotted name of what it needs; of a name inside the package, the module that defines it.
      path: the file of the importer.
      line: where in the file.
    """

    importer: str
    imported: str
    path: Path
    line: int

    @property
    def distribution(self) -> str | None:
        """The distribution that must be installed for it; None for the package itself and the standard library."""
        top = self.imported.partition(".")[0]
        if top == self.importer.partition(".")[0] or top in sys.stdlib_module_names:
            return None
        return _DISTRIBUTION_OF_IMPORT.get(top, top)

    def is_within(self, *prefixes: str) -> bool:
        """Is the imported name one of these, or inside one of these?"""
        return any(self.imported == prefix or self.imported.startswith(f"{prefix}.") for prefix in prefixes)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.imported}"


class ImportGraph:
    """The imports of one package.

    Args:
      root: the folder that holds the package's folder.
      package: the package's name.
    """

    def __init__(self, root: Path = ROOT, package: str = "coordinator"):
        self.package = package
        self.paths = {_module_name(path, root): path for path in sorted((root / package).rglob("*.py"))}
        self.imports = tuple(found for module in self.paths for found in self._imports_of(module))

    @cached_property
    def inner(self) -> tuple[Import, ...]:
        """The imports of the package's own modules."""
        return tuple(found for found in self.imports if found.is_within(self.package))

    @cached_property
    def outer(self) -> tuple[Import, ...]:
        """The imports of what must be installed beside the package."""
        return tuple(found for found in self.imports if found.distribution and not found.is_within(self.package))

    def layer_of(self, module: str) -> str:
        """Returns the folder of a module, `core` for files beside the package's root, and the package for its root."""
        parts = module.split(".")
        if parts == [self.package] or parts[1] == "__main__":
            return self.package
        is_folder = len(parts) > 2 or self.paths[module].name == "__init__.py"
        return parts[1] if is_folder else "core"

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """The modules of each layer."""
        layers: dict[str, list[str]] = {}
        for module in self.paths:
            layers.setdefault(self.layer_of(module), []).append(module)
        return layers

    def layer_edges(self, layer: str) -> dict[str, Import]:
        """Returns the other layers that a layer imports, each with one import that shows it."""
        edges: dict[str, Import] = {}
        for found in self.inner:
            target = self.layer_of(found.imported)
            if self.layer_of(found.importer) == layer != target:
                edges.setdefault(target, found)
        return edges

    def cycle(self, layer: str) -> list[str]:
        """Returns modules of a layer that import one another in a circle; an empty list where there are none."""
        modules = set(self.layers.get(layer, ()))
        edges: dict[str, set[str]] = {module: set() for module in modules}
        for found in self.inner:
            if found.importer in modules and found.imported in modules - {found.importer}:
                edges[found.importer].add(found.imported)
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            return list(error.args[1])
        return []

    def _imports_of(self, module: str) -> Iterator[Import]:
        path = self.paths[module]
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        found = {(name, node.lineno) for node, name in _names(tree)}
        for name, line in sorted(found, key=lambda item: (item[1], item[0])):
            yield Import(module, self._own_module(name), path, line)

    def _own_module(self, name: str) -> str:
        """Cuts a name of the package back to the module that holds it: `coordinator.queueing.closure.Closure` to its module."""
        while name.startswith(f"{self.package}.") and name not in self.paths:
            name = name.rpartition(".")[0]
        return name


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every name that a file imports or reaches through an import, with the node that does so."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and _is_import_by_string(node):
            yield node, node.args[0].value  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            if name in aliases and rest.replace(".", "").isidentifier():
                yield node, f"{aliases[name]}.{rest}"


def _is_import_by_string(call: ast.Call) -> bool:
    function = ast.unparse(call.func).rpartition(".")[2]
    is_literal = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return function in {"import_module", "__import__"} and is_literal
