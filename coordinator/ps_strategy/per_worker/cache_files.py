"""The files in which datasets on the workers cache their elements: `Dataset.cache(file)`.

TensorFlow locks a cache file while an iterator writes to the file, so two workers cannot use one file. If a worker
dies, the lock stays, and no later iterator can use the file. An iterator that is deleted before it has written
everything deletes all files of that name, even files of another iterator. So each dataset that is made on a worker is
cached in a file of its own, unless a complete file exists:

    file.of-2.worker-1.1712345678901234.index, .data-*    complete: later iterators and programs read it on worker 1
    file.of-2.worker-1.1712345678901234_*                 being written, or left by a worker that died
    file.index, file.data-*                               complete, by other programs: all workers read it

If a dataset function reads which share of the data it has, names contain the share: `file.share-0-of-2.worker-1...`.

Guarantee: no iterator opens a file that another iterator is writing, or has left incomplete.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.per_worker.resource import WorkerContext

# The attribute of a dataset with the names of its cache files.
_NAMES = "_coordinator_cache_files"
# The end of a complete file's name. TensorFlow writes the file with this name last.
_COMPLETE = ".index"


def own_file(file: Any, owner: Any) -> Any:
    """Returns the name of a new dataset's cache file: a complete file of the device that runs this, or a new file.

    `file` is the name in the program. `owner` names the worker and its share of the data. Both are string scalars.
    """
    begin = tf.strings.join([file, ".", owner, "."])
    found = tf.io.matching_files([_escaped(file) + _COMPLETE, _escaped(begin) + "*" + _COMPLETE])
    # Leaves out the parts of an incomplete file, whose names end in a second number.
    complete = tf.boolean_mask(found, ~tf.strings.regex_full_match(found, r"(?s).*\.\d+_\d+\.index"))
    # The time is a number that neither this worker nor its former process has used. Random numbers would need a seed.
    number = tf.strings.as_string(tf.cast(1e6 * tf.timestamp(), tf.int64))
    chosen = tf.concat([complete, [tf.strings.join([begin, number, _COMPLETE])]], 0)[0]
    return tf.strings.substr(chosen, 0, tf.strings.length(chosen) - len(_COMPLETE))


class TracedCaches:
    """The files of the datasets of one dataset function; made while the function is traced. `owner`: see `own_file`."""

    def __init__(self, owner: Callable[[], Any]) -> None:
        self._owner = owner
        self._graph = tf.compat.v1.get_default_graph()
        self._names: list[Any] = []

    def own_file(self, file: Any) -> Any:
        """Returns the name of the file that replaces the program's `file`."""
        name = own_file(file, self._owner())
        # Does not list files that a function of the dataset chooses: the function chooses a file at each call.
        if tf.compat.v1.get_default_graph() is self._graph:
            self._names.append(name)
        return name

    def names(self) -> Any:
        """Returns the names of all files, a string vector, for the function to return."""
        return tf.stack(self._names) if self._names else tf.zeros([0], tf.string)


class CachesInGraph:
    """A dataset as a graph of `tf.raw_ops.DatasetToGraphV2`; each copy is cached in files of its own."""

    def __init__(self, graph: bytes) -> None:
        self._graph = graph
        self._files = {_value(node) for node in _file_nodes(tf.compat.v1.GraphDef.FromString(graph))}

    def copy_on(self, context: WorkerContext) -> tuple[bytes, Sequence[bytes]]:
        """Returns the graph for a worker, and the names of the files. Call it in the worker's device scope."""
        if not self._files:
            return self._graph, ()
        chosen = {file: own_file(tf.constant(file), f"worker-{context.index}").numpy() for file in self._files}
        definition = tf.compat.v1.GraphDef.FromString(self._graph)
        for node in _file_nodes(definition):
            node.attr["value"].tensor.string_val[:] = [chosen[_value(node)]]
        return definition.SerializeToString(), tuple(chosen.values())


class CacheFiles:
    """The cache files of one dataset's copies on the workers."""

    def __init__(self) -> None:
        # By worker: the connection on which its latest copy was made, and the copy's files.
        self._latest: dict[int, tuple[int, Sequence[bytes]]] = {}

    def note(self, dataset: Any, names: Sequence[bytes], context: WorkerContext) -> Any:
        """Adds the names of cache files to a worker's dataset, for `is_cache_begun`; returns the dataset.

        Deletes files that the worker's former process had begun, if the client can reach these files.
        """
        if not len(names):
            return dataset
        connection, former = self._latest.get(context.index, (context.connection_number, ()))
        if connection != context.connection_number:
            _remove_begun(former)
        self._latest[context.index] = context.connection_number, names
        setattr(dataset, _NAMES, tuple(names))
        return dataset


def is_cache_begun(dataset: Any) -> bool:
    """Returns whether a cache file of a dataset is incomplete. Call it in the device scope of its worker.

    A new iterator would find such a file locked, and could not continue at the position of another iterator.
    """
    patterns = [_escaped(name) + _COMPLETE for name in getattr(dataset, _NAMES, ())]
    return bool(patterns) and len(tf.io.matching_files(patterns)) < len(patterns)


def _escaped(path: Any) -> Any:
    """Returns a pattern that matches only this path."""
    return tf.strings.regex_replace(path, r"([*?\[\\])", r"\\\1")


def _remove_begun(names: Sequence[bytes]) -> None:
    with contextlib.suppress(OSError, tf.errors.OpError):
        for name in names:
            directory, file = os.path.split(name.decode())
            for begun in tf.io.gfile.listdir(directory or "."):
                if begun.startswith(f"{file}_"):
                    tf.io.gfile.remove(os.path.join(directory, begun))


def _file_nodes(graph: Any) -> Iterator[Any]:
    """Yields the constants that name cache files in a graph and its functions."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for node in nodes:
            if node.op in ("CacheDataset", "CacheDatasetV2"):
                constant = constants.get(node.input[1].partition(":")[0])
                if constant is not None and _value(constant):
                    yield constant


def _value(node: Any) -> bytes:
    return bytes(next(iter(node.attr["value"].tensor.string_val), b""))
