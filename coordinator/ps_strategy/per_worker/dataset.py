"""Datasets and iterators with a copy on each worker, and the iterators' positions, which checkpoints save.

    save      serialize --> each worker that is not lost: SerializeIterator --> the string in the checkpoint
    restore   the string in the checkpoint --> deserialize: kept here --> a new iterator on each worker begins there

Guarantees:
- A position lies between two calls on its worker. So positions that are saved while no scheduled function runs match
  the model.
- An iterator that is created again, because its worker was lost, begins at the last saved or restored position. If its
  data was being cached in a file, the iterator begins at the first element, and the log says so.
- A string of positions is restored completely; or nothing is restored, and a `ValueError` says what differs.
"""

import base64
import contextlib
import functools
import itertools
import json
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from coordinator.data.source import without_autotuning
from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.per_worker.cache_files import is_cache_begun
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, ShareOf, WorkerContext, WorkerCopies
from coordinator.ps_strategy.tensorflow_internals.functions import (
    call_concrete,
    called_functions,
    captured_inputs,
    flat_inputs,
    passed_inputs,
)
from coordinator.runtime import FiniteInput

_logger = logging.getLogger("coordinator")

_TAKING = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})
# Operations that call their function once.
_CALLING = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# Parts of the names of other operations that use an iterator, or return it.
_UNKNOWN = ("Iterator", "Identity", "Switch", "Merge")

_VERSION = 1
# TensorFlow's policy IGNORE: state outside of the iterator, such as a lookup table, is not saved.
_WITHOUT_EXTERNAL_STATE = 1

_HANDLE = tf.TensorSpec([], tf.resource)


def elements_per_call(concrete: Any) -> float:
    """Returns the most elements that a call of a function takes from each iterator among its arguments.

    If elements are taken in a loop or a branch, the number is unknown, and infinity is returned.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    arguments = concrete.inputs[: len(concrete.inputs) - len(captured_inputs(concrete))]
    handles = [argument.op.name for argument in arguments if argument.dtype == tf.resource]
    return max((_taken(handle, graph.node, functions) for handle in handles), default=0)


def _taken(handle: str, nodes: Sequence[Any], functions: Mapping[str, Any]) -> float:
    return sum(_taken_by(node, handle, functions) for node in nodes if handle in node.input)


def _taken_by(node: Any, handle: str, functions: Mapping[str, Any]) -> float:
    if node.op in _TAKING:
        return 1
    count: float = math.inf if any(part in node.op for part in _UNKNOWN) else 0
    for role, name in called_functions(node):
        passed = [inner for inner, outer in passed_inputs(node, role, functions[name]) if outer == handle]
        inside = sum(_taken(inner, functions[name].node_def, functions) for inner in passed)
        count += inside if passed and (node.op in _CALLING or not inside) else math.inf
    return count


class _Position(NamedTuple):
    """The position of one worker's iterator.

    `taken` is the most elements before the position, or infinite. `state` is the iterator, serialized by TensorFlow.
    """

    taken: float
    state: bytes


class IteratorPositions:
    """The positions of one per-worker iterator on all workers.

    Only a worker's own thread uses the worker's entry; the client restores positions while no function runs. `workers`
    returns the number of shares into which the data is divided.
    """

    def __init__(self, workers: Callable[[], int], element_spec: Any) -> None:
        self._workers = workers
        self._element_spec = repr(element_spec)
        self._sizes: dict[int, float] = {}
        self._taken: dict[int, float] = {}
        self._saved: dict[int, _Position] = {}
        # By worker: the share of the present iterator. A position is meaningless in another share.
        self._shares: dict[int, Hashable] = {}

    def iterator_of(self, dataset: tf.data.Dataset, context: WorkerContext, share: Hashable = None) -> Any:
        """Returns a new iterator on a worker, at the share's last saved or restored position if there is one."""
        if self._shares.setdefault(context.index, share) != share:
            self._shares[context.index] = share
            self._saved.pop(context.index, None)
        size = int(dataset.cardinality())
        self._sizes[context.index] = math.inf if size == tf.data.INFINITE_CARDINALITY else max(size, 0)
        self._taken[context.index] = 0
        iterator = iter(dataset)
        if is_cache_begun(dataset) and self._saved.pop(context.index, None) is not None:
            _logger.warning(
                "The iterator on %s begins at the beginning of its data: its position cannot be continued, because the "
                "file in which the dataset is cached was not complete.",
                context.device,
            )
        position = self._saved.get(context.index)
        if position is not None:
            concrete = _restore.get_concrete_function()
            call_concrete(concrete, [_handle_of(iterator), tf.constant(position.state)], context.cancellation)
            self._taken[context.index] = position.taken
        return iterator

    def has_saved(self, worker: int) -> bool:
        """Returns whether a worker's new iterator begins at a saved or restored position."""
        return worker in self._saved

    def is_endless_on(self, worker: int) -> bool:
        """Returns True if the worker's iterator was created and is known to be endless."""
        return self._sizes.get(worker) == math.inf

    def left_on(self, worker: int) -> float:
        """Returns the least number of elements that a worker's finite iterator has left."""
        return max(self._sizes.get(worker, 0) - self._taken.get(worker, 0), 0)

    def count_on(self, worker: int, taken: float) -> None:
        """Counts elements that a call takes from a worker's iterator, at most `taken`."""
        self._taken[worker] += taken

    def save_on(self, iterator: Any, context: WorkerContext) -> None:
        """Saves the position of a worker's iterator, on the worker's thread."""
        with tf.device(context.device):
            state = call_concrete(_save.get_concrete_function(), [_handle_of(iterator)], context.cancellation).numpy()
        self._saved[context.index] = _Position(self._taken[context.index], state)

    def to_json(self) -> str:
        positions = {
            worker: {"taken": position.taken, "state": base64.b64encode(position.state).decode()}
            for worker, position in sorted(self._saved.items())
        }
        own = {"version": _VERSION, "workers": self._workers(), "elements": self._element_spec}
        return json.dumps(own | {"positions": positions})

    def from_json(self, text: Any, name: str) -> None:
        """Replaces the saved positions by a result of `to_json`; raises ValueError for other workers or elements."""
        saved = json.loads(text if isinstance(text, str) else bytes(text))
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The checkpoint has positions of format {saved.get('version')} of the {name}, and this release of "
                f"coordinator reads format {_VERSION}: use the release that wrote it."
            )
        if saved["workers"] != self._workers():
            raise ValueError(
                f"The checkpoint has positions of the {name} on {saved['workers']} workers, and this program began "
                f"with {self._workers()}, among which its data is divided. Start with {saved['workers']} workers, or "
                "leave the iterator out of the tf.train.Checkpoint to begin with the first element. "
                "coordinator.data.Epochs continues on any number of workers."
            )
        if saved["elements"] != self._element_spec:
            raise ValueError(
                f"The checkpoint has positions of the {name} in other data: its elements were {saved['elements']}, and "
                f"are {self._element_spec} now. Continue with the data of then, or leave the iterator out of the "
                "tf.train.Checkpoint to begin with the first element."
            )
        self._saved = {
            int(worker): _Position(position["taken"], base64.b64decode(position["state"]))
            for worker, position in saved["positions"].items()
        }


@tf.function(input_signature=[_HANDLE])
def _save(handle: Any) -> Any:
    state = tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=_WITHOUT_EXTERNAL_STATE)
    return tf.io.serialize_tensor(state)


@tf.function(input_signature=[_HANDLE, tf.TensorSpec([], tf.string)])
def _restore(handle: Any, state: Any) -> None:
    tf.raw_ops.DeserializeIterator(resource_handle=handle, serialized=tf.io.parse_tensor(state, tf.variant))


def _handle_of(iterator: Any) -> Any:
    [handle] = tf.nest.flatten(iterator, expand_composites=True)
    return handle


class _PerWorkerElements(PerWorkerResource, tf.types.experimental.SupportsTracingProtocol):
    """The base of datasets and iterators. `element_spec` is the structure of an element, with `tf.TypeSpec`s."""

    # The class of the type of a worker's copy; functions are traced with this type.
    _spec_class: type[Any]

    def __init__(
        self, name: str, element_spec: Any, build: Callable[[WorkerContext], Any], share_of: ShareOf | None
    ) -> None:
        super().__init__(name, build, share_of)
        self.element_spec = element_spec

    @property
    def _type_spec(self) -> Any:
        """The type of the worker's copy. Programs use the name `_type_spec` in `tf.function(input_signature=)`."""
        return self._spec_class(self.element_spec)

    def __tf_tracing_type__(self, context: Any) -> Any:
        return self._type_spec

    def __getattr__(self, name: str) -> NoReturn:
        # If a function is called on the client, TensorFlow looks for the handle of a real dataset or iterator.
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}: it represents one on each worker. A function that takes "
            "it must be scheduled: strategy.schedule(step, args=(...)) instead of step(...). In Keras 2 (tf_keras), "
            "fit, evaluate and predict are such functions: schedule a step of your own, make the strategy with "
            "coordinator.compat.ParameterServerStrategy, or use a model of Keras 3."
        )


class EndOfDataError(tf.errors.OutOfRangeError):
    """An iterator has no element left on a worker. Users get this error when no worker for the call has elements.

    `ended` is the iterator's `FiniteInput` in an error that a call raises; None in an error that the queue creates.
    """

    def __init__(self, name: str, ended: FiniteInput | None = None) -> None:
        self.ended = ended
        message = (
            f"The {name} has no element left on any worker that may run this function. Catch this error to "
            "end the loop; then iter(dataset) begins the next epoch:\n"
            "  while True:\n"
            "    try:\n"
            "      strategy.schedule(step, args=(iterator,))\n"
            "    except tf.errors.OutOfRangeError:\n"
            "      break\n"
            "  strategy.join()\n"
            "Data that is not to end needs dataset.repeat()."
        )
        super().__init__(None, None, message)


class PerWorkerIterator(_PerWorkerElements, tf.train.experimental.PythonState):
    """One iterator per worker. Pass it as an argument of a scheduled function and call `next` on it there.

    In a `tf.train.Checkpoint`, this object saves and restores the position of each worker's iterator; see docs/data.md.

    If the data of a worker has ended, a function that finds no element there is run on another worker. When the data of
    all workers has ended, `schedule` and `join` raise `tf.errors.OutOfRangeError`.

    The iterator of a restarted worker starts from its last saved or restored position, or else from the beginning. So
    does an iterator that was interrupted; see `iterators_in_use`. The iterators on the workers are freed when the last
    reference to this object is dropped.

    Args:
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      share_of: see `PerWorkerResource`; only an endless iterator begins again when its share changes.
      name, element_spec, workers, copies: as for `PerWorkerDataset`.

    Attributes:
      input: the `FiniteInput` by which the scheduler knows the iterator.
      positions: the positions of the workers' iterators.
      failed: by worker, the connection on which a failed call may have interrupted the iterator. Only the worker's
        thread uses an entry.
    """

    _spec_class = tf.data.IteratorSpec

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        workers: Callable[[], int],
        copies: WorkerCopies,
        share_of: ShareOf | None = None,
    ) -> None:
        # Local variables, because `build_iterator` must not keep this object alive.
        positions = IteratorPositions(workers, element_spec)
        finite_input = FiniteInput(functools.partial(EndOfDataError, f"iterator of {name}"))

        def build_iterator(context: WorkerContext) -> Any:
            share = None if share_of is None else share_of(context.index)
            iterator = positions.iterator_of(build(context), context, share)
            finite_input.is_finite = finite_input.is_finite or not positions.is_endless_on(context.index)
            return iterator

        super().__init__(f"iterator of {name}", element_spec, build_iterator, share_of)
        self._copies = copies
        self.positions = positions
        self.input = finite_input
        self.failed: dict[int, int] = {}

    def serialize(self) -> str:
        """Returns the positions of all workers' iterators; TensorFlow calls this method to save a checkpoint.

        The method does not wait for a lost worker, whose iterator will start again at the position that was saved last.

        Raises:
          ValueError: the dataset has no position that can be saved.
          RuntimeError: the caller is a callback of a future, on a worker's thread.
        """
        try:
            self._copies.run_on_live(
                lambda context: self.positions.save_on(self.value_on(context), context),
                f"save the position of the {self.name}",
            )
        except tf.errors.UnimplementedError as error:
            raise ValueError(
                f"The position of the {self.name} cannot be saved in a checkpoint: generators and TensorFlow's data "
                "service have none. Leave the iterator out of the tf.train.Checkpoint; coordinator.data has sources "
                "whose position is saved."
            ) from error
        return self.positions.to_json()

    def deserialize(self, text: Any) -> None:
        """Continues at positions that `serialize` has returned; TensorFlow calls this method to restore a checkpoint.

        Raises ValueError if the positions are for another number of workers or other data.
        """
        self.positions.from_json(text, self.name)
        self.failed.clear()
        self.recreate()
        self._copies.renew_input(self.input)

    def _may_begin_again(self, worker: int) -> bool:
        return self.positions.is_endless_on(worker)

    def get_next(self) -> NoReturn:
        """Raises RuntimeError; see `__next__`."""
        self.__next__()

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "A per-worker iterator gives elements on the workers alone. Pass it as an argument: "
            "strategy.schedule(step, args=(iterator,)), and call next(iterator) inside `step`."
        )


class PerWorkerDataset(_PerWorkerElements):
    """One dataset per worker. `iter(dataset)` returns a `PerWorkerIterator`; a function may take the dataset.

    Args:
      name: used in messages.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      workers: returns the number of shares into which the data is divided.
      copies: runs work on the workers.
      share_of: see `PerWorkerResource`.
      is_numbered: returns whether an iterator of a worker's dataset depends on the number of earlier iterators.
    """

    _spec_class = tf.data.DatasetSpec

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        workers: Callable[[], int],
        copies: WorkerCopies,
        share_of: ShareOf | None = None,
        is_numbered: Callable[[WorkerContext], bool] = lambda context: True,
    ) -> None:
        super().__init__(name, element_spec, build, share_of)
        self._workers = workers
        self._copies = copies
        self._is_numbered = is_numbered
        # By worker: the dataset that iterators are made from, and the number of its iterators.
        self._iterated = PerWorkerResource(f"iterator of {name}", lambda context: [build(context), 0], share_of)
        self._numbers = itertools.count()

    def __iter__(self) -> PerWorkerIterator:
        """Returns a new iterator per worker, at the beginning of the data.

        As in TensorFlow, each iterator is a further iterator of the same dataset: a seeded shuffle gives another order,
        and a job of TensorFlow's data service is repeated.

        Raises:
          RuntimeError: the caller is a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Make the iterator outside of the function, and pass it: strategy.schedule(step, args=(iterator,))."
            )
        build = functools.partial(self._dataset_for, next(self._numbers))
        iterator = PerWorkerIterator(self.name, self.element_spec, build, self._workers, self._copies, self._share_of)
        self._copies.create(iterator)
        return iterator

    def _dataset_for(self, number: int, context: WorkerContext) -> tf.data.Dataset:
        """Returns the worker's dataset; the dataset's next iterator is iterator `number`, counted from 0.

        This is guaranteed even if the worker was lost, or if iterators were made again.
        """
        iterated = self._iterated.value_on(context)
        dataset, made = iterated
        # A new iterator of the dataset cannot write a cache file that another iterator has begun.
        if made > number or (made and is_cache_begun(dataset)):
            self._iterated.recreate_on(context)
            iterated = self._iterated.value_on(context)
            dataset, made = iterated
        if made < number and self._is_numbered(context):
            concrete = _make_unread.get_concrete_function(dataset, tf.TensorSpec([], tf.int64))
            inputs = flat_inputs(concrete, (dataset, tf.constant(number - made, tf.int64)), {})
            call_concrete(concrete, [*inputs, *concrete.captured_inputs], context.cancellation)
        iterated[1] = number + 1
        return dataset

    def build(self) -> "PerWorkerDataset":
        """Returns this dataset. In TensorFlow, a function can only take a per-worker dataset that was built."""
        return self


@tf.function(autograph=False)
def _make_unread(dataset: tf.data.Dataset, count: Any) -> None:
    """Makes iterators of a dataset that are never read.

    The iterators are made inside of another iterator, at 0.1 ms each for the worker. A separate iterator costs 70 ms.
    """
    # `choose_from_datasets` makes an iterator of each dataset; here it chooses nothing.
    nothing = tf.data.Dataset.range(0)
    unread = tf.data.Dataset.choose_from_datasets([dataset, dataset.take(0)], nothing, stop_on_empty_dataset=False)
    all_unread = tf.data.Dataset.range(count).flat_map(lambda _: unread)
    iter(without_autotuning(all_unread, tf.data.Options())).get_next_as_optional()


def tracing_type(value: Any) -> Any:
    """Returns the type of a worker's copy for a per-worker dataset or iterator; other values unchanged."""
    return value.__tf_tracing_type__(None) if isinstance(value, _PerWorkerElements) else value


@contextlib.contextmanager
def iterators_in_use(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> Iterator[None]:
    """A scope for one call on a worker. It resets iterators of the call that an earlier call has interrupted.

    A call that is cancelled while it waits for an element may leave its iterator cancelled, or ended too early.
    Iterators are inspected only if the call fails. If the call fails because data has ended, each iterator that may
    have ended is asked for one more element, which is lost.

    Raises:
      tf.errors.AbortedError: an earlier call ended an iterator; the iterator starts again with the next call.
      EndOfDataError: an iterator has ended on this worker.
    """
    try:
        yield
    except (ClosureCancelledError, tf.errors.OpError) as error:
        is_end, worker = isinstance(error, tf.errors.OutOfRangeError), context.index
        endless = [iterator for iterator in iterators if iterator.positions.is_endless_on(worker)]
        suspects = [iterator for iterator in iterators if iterator.failed.get(worker) == context.connection_number]
        # The regular end of data interrupts nothing.
        if not is_end or len(endless) == len(iterators):
            for iterator in iterators:
                iterator.failed[worker] = context.connection_number
        # A call that this client cancels raises `ClosureCancelledError` instead of `CancelledError`.
        is_cancelled = isinstance(error, tf.errors.CancelledError)
        if interrupted := [iterator for iterator in suspects if (iterator in endless if is_end else is_cancelled)]:
            message = _restart(interrupted, context)
            if is_end:
                # This error makes the scheduler try the call again, like the cancelled call: the data has not ended.
                raise tf.errors.AbortedError(None, None, message) from error
            raise
        if is_end:
            for iterator in suspects:
                iterator.failed.pop(worker, None)
            if suspects:
                _logger.warning(
                    "%s has ended, and an earlier call that used it was cancelled, which may have ended it too early. "
                    "Make a new iterator if some of its data is missing.",
                    _names(suspects, context),
                )
            for iterator in itertools.filterfalse(endless.__contains__, iterators):
                _raise_if_ended(iterator, context, error)
        raise


@tf.function
def _has_element(iterator: Any) -> Any:
    return iterator.get_next_as_optional().has_value()


def _raise_if_ended(iterator: PerWorkerIterator, context: WorkerContext, cause: Exception) -> None:
    """Takes an element on the worker, and raises EndOfDataError if there is none.

    The call's own error does not prove that there is none: another dataset in the function may raise the same error.
    """
    on_worker = iterator.value_on(context)
    iterator.positions.count_on(context.index, 1)
    concrete = _has_element.get_concrete_function(on_worker)
    try:
        with tf.device(context.device):
            inputs = flat_inputs(concrete, (on_worker,), {})
            has_element = call_concrete(concrete, inputs, context.cancellation).numpy()
    except tf.errors.OpError as error:
        iterator.failed[context.index] = context.connection_number
        if context.cancellation.is_cancelled:
            raise ClosureCancelledError("The call was cancelled.") from error
        raise
    if not has_element:
        iterator.positions.count_on(context.index, math.inf)
        # The frames of the cause's traceback would keep the iterator alive until the garbage collector runs.
        raise EndOfDataError(iterator.name, iterator.input) from cause.with_traceback(None)


def _restart(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    """Has interrupted iterators made again on the worker; returns the logged message."""
    for iterator in iterators:
        iterator.failed.pop(context.index, None)
        iterator.recreate_on(context)
    is_saved = all(iterator.positions.has_saved(context.index) for iterator in iterators)
    start = "its last saved position" if is_saved else "the beginning"
    message = f"{_names(iterators, context)} starts from {start}: a call that waited for an element was cancelled."
    _logger.warning("%s", message)
    return message


def _names(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    return f"{', '.join(iterator.name for iterator in iterators)} on {context.device}"
