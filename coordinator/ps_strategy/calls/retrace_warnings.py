"""Warns about functions that are retraced often, and says which argument is the cause.

Arguments are recorded once for each trace, so a call without a new trace costs nothing. Neither functions nor their
arguments are kept alive.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_logger = logging.getLogger("coordinator")

# A trace takes tens of milliseconds or more; a function that is called in several ways has fewer traces than this.
_MANY = 20

_MOST_CAUSES = 3
_EXAMPLES = 3
_LONGEST_EXAMPLE = 60

_LITERALS = (bool, int, float, complex, str, bytes, type(None))


class _Trait(NamedTuple):
    """A property of one argument that a trace depends on. Traits of equal text and identity are the same."""

    place: str
    what: str
    advice: str
    text: str
    identity: int = 0


class RetraceWarnings:
    """Counts the traces of each function, and warns once about one that has many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: weakref.WeakKeyDictionary[Any, list[list[_Trait]]] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget(self) -> None:
        """Counts from 0 again, because all functions will be retraced."""
        with self._lock:
            self._traces.clear()

    def note(self, function: Any, name: str, arguments: Mapping[str, Any]) -> None:
        """Records a new trace, and logs a warning at the twentieth of a function.

        Args:
          function: the `tf.function`.
          name: the name of the Python function.
          arguments: the arguments that it was traced with, by parameter.
        """
        with self._lock:
            if function in self._warned:
                return
        traits = [trait for key, value in arguments.items() for trait in _traits(key, value)]
        with self._lock:
            traces = self._traces.setdefault(function, [])
            traces.append(traits)
            if len(traces) != _MANY:
                return
            self._warned.add(function)
            del self._traces[function]
        _logger.warning(
            "The function %r was traced %d times, and a trace takes longer than many calls.%s",
            name,
            _MANY,
            _causes(traces),
        )


def _traits(place: str, value: Any) -> Iterator[_Trait]:
    """Yields all traits of an argument, each with its place as Python would write it."""
    if isinstance(value, list | tuple | dict):
        advice = "Pass one of the same structure each time."
        yield _Trait(place, "structure", advice, f"{type(value).__name__} of {len(value)}")
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _traits(f"{place}[{key!r}]", part)
    elif isinstance(value, _LITERALS):
        instead = "" if isinstance(value, str | bytes) else " or a NumPy value"
        advice = f"Pass tf.constant({place}){instead}: one trace serves all values of a tensor."
        yield _Trait(place, "Python value", advice, _short(repr(value)), hash(value))
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        advice = "Give the tf.function an input_signature or reduce_retracing=True, or pad the argument."
        yield _Trait(place, "shape", advice, str(value.shape))
        dtype = getattr(value.dtype, "name", str(value.dtype))
        yield _Trait(place, "dtype", "Convert it to one dtype.", dtype)
    elif hasattr(value, "element_spec"):
        advice = "Give the elements of all datasets the same shapes and dtypes."
        yield _Trait(place, "element_spec", advice, _short(str(value.element_spec)), hash(str(value.element_spec)))
    else:
        yield _Trait(place, "identity", "Pass the same object each time.", type(value).__name__, id(value))


def _causes(traces: list[list[_Trait]]) -> str:
    """Describes what differs most from trace to trace; empty if nothing does."""
    found: dict[tuple[str, str], dict[tuple[str, int], _Trait]] = {}
    for traits in traces:
        for trait in traits:
            found.setdefault((trait.place, trait.what), {})[trait.text, trait.identity] = trait
    most = max(map(len, found.values()), default=1)
    differing = [list(each.values()) for each in found.values() if len(each) == most > 1]
    text = ""
    for place_traits in differing[:_MOST_CAUSES]:
        place, what, advice, *_ = place_traits[0]
        examples = ", ".join(trait.text for trait in place_traits[:_EXAMPLES])
        text += f" The {what} of its argument {place!r} differs ({examples}, ...). {advice}"
    return text


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_EXAMPLE else text[: _LONGEST_EXAMPLE - 3] + "..."
