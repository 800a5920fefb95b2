"""Data that the client reads and sends with the functions: Parquet, databases, generators, sequences."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from coordinator.data.source import IN_ORDER, Source, digest_of, shuffled_here, without_autotuning

_logger = logging.getLogger("coordinator")

# How often the counting of examples is reported, in seconds.
_REPORT_INTERVAL = 30.0
# The digest covers this many examples, and this many values of each array of them.
_SAMPLE = 16
_VALUES = 1024
# At most this many bytes are in flight.
_MOST_BYTES = 2**28


def client(data: Any, size: int | None = None) -> Source:
    """Returns a source of data that the client reads in Python because servers cannot.

    `epochs.on` gives a tuple of the range and its examples; pass it to the function unchanged. There,
    `x, y = source.read(positions)` returns the examples, and `positions[0]` is the range.

    Args:
      data: a sequence, with `__len__` and `__getitem__` (and perhaps `__getitems__`, which takes a list of indices, as
        PyTorch's datasets have), or an iterable that gives the same examples in the same order each time: an object
        such as a `tf.data.Dataset`, or a function that returns an iterator, such as a generator function. An iterable
        is read in order: it cannot be shuffled, and it is iterated from the beginning when an earlier example is needed
        again. An example is an array, or a tuple, list or dict of arrays.
      size: the number of examples in an epoch of an iterable; None counts them, by `len` or in a first pass. The log
        reports the count every 30 s, since data may have no end.

    Raises:
      TypeError: `data` can be iterated only once, or not at all.
      ValueError: there are no examples, or infinitely many; or `size` was given for a sequence.
    """
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if size is not None:
            raise ValueError("client takes a size for data that is iterated only; a sequence has its own.")
        return _Sequence(data)
    if isinstance(data, Iterator):
        raise TypeError(
            f"client was given {data!r}, which can be iterated once, so its examples cannot be read again after a "
            "failure. Give it the function that makes it, such as client(lambda: read(path))."
        )
    if not callable(data) and not hasattr(data, "__iter__"):
        raise TypeError(f"client takes a sequence, or what can be iterated, got {data!r}.")
    if size is None and isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"client was given a dataset without an end, {data!r}. Leave its repeat() out, since Epochs(epochs=...) "
            "reads it again; or give the number of examples of an epoch as size=."
        )
    return _Iterable(data, size)


class _ClientSource(Source):
    """A source whose `read` returns the examples that came with the range."""

    is_on_client = True

    def __init__(self, size: int, sample: list[Any]) -> None:
        if not sample:
            raise ValueError("client was given data without examples.")
        self.size = size
        self.digest = _digest(sample)
        self._spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), _stacked(sample[:1])
        )
        example = sum(np.asarray(part).nbytes for part in tf.nest.flatten(sample)) / len(sample)
        self.most_out = max(1, int(_MOST_BYTES / max(example, 1)))

    def element_spec(self) -> Any:
        """See `Source.element_spec`."""
        return self._spec

    def read_range(self, positions: Any) -> NoReturn:
        """Raises TypeError: the examples come with the range."""
        raise TypeError(
            "The data of this source comes with the ranges of epochs.on(strategy): pass source.read what the loop "
            f"gave, a tuple of a range and its examples, got {positions!r}."
        )


class _Sequence(_ClientSource):
    mixes_all = True

    def __init__(self, data: Any) -> None:
        self._data = data
        super().__init__(len(data), self._at(np.linspace(0, len(data) - 1, _SAMPLE).astype(int)) if len(data) else [])

    def reader(self) -> Callable[[Any], Any]:
        """See `Source.reader`."""

        def with_examples(positions: Any) -> Any:
            epoch, start, count, _, seed = map(int, positions)
            indices = np.arange(start, start + count)
            if seed != IN_ORDER:
                indices = shuffled_here(indices, seed, epoch, self.size)
            return positions, _stacked(self._at(indices))

        return with_examples

    def _at(self, indices: Any) -> list[Any]:
        if hasattr(self._data, "__getitems__"):
            return list(self._data.__getitems__(indices.tolist()))
        return [self._data[index] for index in indices.tolist()]

    def __repr__(self) -> str:
        return f"<coordinator.data.client: {self.size} examples of a {type(self._data).__name__}>"


class _Iterable(_ClientSource):
    mixes_all = False
    is_sequential = True

    def __init__(self, data: Any, size: int | None) -> None:
        repeated = without_autotuning(data) if isinstance(data, tf.data.Dataset) else data
        self._iterate: Callable[[], Any] = repeated if callable(repeated) else repeated.__iter__
        self._name = getattr(data, "__name__", type(data).__name__)
        if size is None:
            # It may have no length, or one that TensorFlow does not know.
            with contextlib.suppress(TypeError):
                size = len(data)
        examples = iter(self._iterate())
        sample = list(itertools.islice(examples, _SAMPLE))
        super().__init__(len(sample) + _count(examples, self._name) if size is None else size, sample)

    def reader(self) -> Callable[[Any], Any]:
        """See `Source.reader`."""
        examples: Iterator[Any] = iter(())
        # The epoch and the number of the next example. Epoch -1, so that the first range begins one.
        at_epoch, at = -1, 0

        def read() -> Any:
            nonlocal at
            try:
                example = next(examples)
            except StopIteration:
                raise ValueError(
                    f"The data ended after {at} examples in epoch {at_epoch}; it had {self.size} before, or by "
                    "size=. Epochs need the same examples each time."
                ) from None
            at += 1
            return example

        def with_examples(positions: Any) -> Any:
            nonlocal examples, at_epoch, at
            epoch, start, count, _, _ = map(int, positions)
            if epoch != at_epoch or start < at:
                examples, at_epoch, at = self._begun(), epoch, 0
            while at < start:
                read()
            return positions, _stacked([read() for _ in range(count)])

        return with_examples

    def _begun(self) -> Iterator[Any]:
        """Begins again; raises ValueError if the first examples differ from the first time."""
        examples = iter(self._iterate())
        sample = list(itertools.islice(examples, _SAMPLE))
        if not sample or _digest(sample) != self.digest:
            raise ValueError(
                f"{self!r} gave other examples when it was iterated again. Epochs need the same ones in the same order "
                "each time: without randomness, or with a seed that is set at the beginning of each pass."
            )
        yield from sample
        yield from examples

    def __repr__(self) -> str:
        return f"<coordinator.data.client: {self.size} examples of {self._name}, in order>"


def _count(examples: Iterator[Any], name: str) -> int:
    """Counts the remaining examples, with reports in the log, since they may have no end."""
    count, began, reports = 0, time.monotonic(), 1
    for count, _ in enumerate(examples, 1):
        if time.monotonic() - began >= reports * _REPORT_INTERVAL:
            reports += 1
            _logger.warning(
                "coordinator.data.client has counted %d examples of %s in %.0f s, and goes on. If they have no end, or "
                "their number is known, give it: client(..., size=...).",
                count,
                name,
                time.monotonic() - began,
            )
    return count


def _digest(sample: list[Any]) -> str:
    parts = [np.ravel(part)[:_VALUES] for part in tf.nest.flatten(sample)]
    return digest_of(repr(part.tolist()).encode() if part.dtype.hasobject else part.tobytes() for part in parts)


def _stacked(examples: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *parts: _array(parts), *examples)


def _array(parts: Any) -> Any:
    # NumPy's own type of strings drops NULs at the end.
    array = np.stack([np.asarray(part, object if isinstance(part, bytes | str) else None) for part in parts])
    if array.dtype.kind in "USO":
        return tf.constant(array)
    if isinstance(parts[0], float):
        # TensorFlow's dtype for a Python number.
        return array.astype(np.float32)
    return array
