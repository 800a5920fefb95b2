"""The versions of TensorFlow and Keras that the tests have passed with, and what is off with some of them.

The table of all tested combinations is in docs/versions.md.
"""

import ast
import contextlib
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

# Takes a tenth of a second.
_distributions = functools.cache(importlib.metadata.packages_distributions)
# The newest minor versions with which the tests have passed.
NEWEST = {"tensorflow": (2, 23), "keras": (3, 16)}
# What is off before a minor version.
_OFF_BEFORE = (
    (
        "tensorflow",
        (2, 21),
        "cannot be silenced while it runs, so its C++ code logs the loss of a server too; TF_CPP_MIN_LOG_LEVEL=3 in "
        "the program's environment silences it",
    ),
)


def unknown(versions: Mapping[str, str]) -> list[str]:
    """Returns a text for each version of "tensorflow" or "keras" that is a newer minor version than the tests know."""
    return [
        f"{package} {version} is newer than {'.'.join(map(str, NEWEST[package]))}, the newest that was tested"
        for package, version in versions.items()
        if _minor(version) > NEWEST[package]
    ]


def off(versions: Mapping[str, str]) -> list[str]:
    """Returns a text for each feature that is off with these versions."""
    return [
        f"{package} {versions[package]} {text}"
        for package, since, text in _OFF_BEFORE
        if package in versions and _minor(versions[package]) < since
    ]


@contextlib.contextmanager
def private_names_needed() -> Iterator[None]:
    """A scope of imports that raises ImportError with a sentence of advice if a version lacks a private name."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        owner = error.name if isinstance(error, ImportError) else _module_of(error.obj)
        package = (owner or "").partition(".")[0]
        if package not in NEWEST:
            raise
        newest, installed = ".".join(map(str, NEWEST[package])), version_of(package) or "of an unknown version"
        raise ImportError(
            f"{package} {installed} lacks a private name that coordinator needs ({error}): install a version "
            f"that docs/versions.md names, such as {package} {newest}, or a newer version of coordinator."
        ) from error


def missing_names(modules: Iterable[ModuleType]) -> list[str]:
    """Returns a sentence for each absent attribute of TensorFlow's or Keras' modules and classes that modules use.

    The function reads the source of the modules, in about a tenth of a second. It cannot see attributes of objects.
    """
    absent = set()
    for module in modules:
        purpose = (module.__doc__ or "").partition("\n")[0]
        for expression in ast.walk(ast.parse(inspect.getsource(module))):
            root, path = _names(expression)
            owner = vars(module).get(root)
            for name in path:
                package = (_module_of(owner) or "").partition(".")[0]
                if package not in NEWEST or not (inspect.ismodule(owner) or inspect.isclass(owner)):
                    break
                if not hasattr(owner, name):
                    lack = f"{package} {version_of(package)} lacks {_module_of(owner)}.{name}"
                    absent.add(f"{lack}, without which this fails: {purpose}")
                    break
                owner = getattr(owner, name)
    return sorted(absent)


def _names(expression: ast.AST) -> tuple[str, list[str]]:
    """Returns the variable of an expression such as `variable.first.second`, and the names of the attributes."""
    path: list[str] = []
    while isinstance(expression, ast.Attribute):
        path, expression = [expression.attr, *path], expression.value
    return (expression.id, path) if isinstance(expression, ast.Name) else ("", [])


def _module_of(owner: object) -> str | None:
    module = getattr(owner, "__module__", None) or getattr(owner, "__name__", None)
    return module if isinstance(module, str) else None


def version_of(package: str) -> str | None:
    """Returns the installed version of a package or distribution; None if there is none.

    Any distribution may have the package, such as `tf-nightly`.
    """
    for name in _distributions().get(package, [package]):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
