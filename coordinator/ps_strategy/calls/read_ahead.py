"""Reads ranges of examples in the background on a worker, before functions on that worker take them.

    client     take 7, begin 9          take 8, begin 10         one short call before each function
    worker     slot 0: [7][ ... 9 ... ]
               slot 1:      [8][ ... 10 ... ]

A slot is a queue of one range, and an iterator that takes ranges from the queue and prefetches their examples into the
worker's memory. A worker runs one call at a time; the iterators read during the call.

Guarantees:
- A function gets the examples of its own range, because a slot returns each range together with its examples.
- After a call that failed or was cancelled, the worker gets new slots. The ranges of the old slots are read again.
"""

import uuid
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.data.ranges import POSITIONS, Choice
from coordinator.data.source import without_autotuning
from coordinator.ps_strategy.calls.traced_function import TracedFunction
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerContext

_RANGE = tf.TensorSpec([POSITIONS], tf.int64)
_QUEUE = tf.TensorSpec([], tf.resource)
Trace = Callable[[Any, tuple[Any, ...]], TracedFunction]


class ReadAhead:
    """The slots of all workers for one source, `slots` per worker.

    `read` is `Source.read_range`; `trace` traces a `tf.function` in the scope of the strategy. `spec` has the
    `tf.TypeSpec`s of the result of `value_on`, in the same structure.
    """

    def __init__(self, read: Callable[[Any], Any], slots: int, trace: Trace) -> None:
        self._read = trace(tf.function(read, autograph=False), (_RANGE,))
        self.spec = _RANGE, self._read.result_spec
        iterator = tf.data.IteratorSpec(self.spec)
        self._pipeline = trace(tf.function(lambda queue: _pipeline(queue, read), autograph=False), (_QUEUE,))
        self._begin = trace(_begin, (_QUEUE, _RANGE))
        self._take = trace(_take, (iterator, _RANGE))
        self._take_and_begin = trace(_take_and_begin, (iterator, _RANGE, _QUEUE, _RANGE))
        self._slots = PerWorkerResource(
            "the reading of ranges ahead", lambda context: [self._new_slot(context) for _ in range(slots)]
        )

    def value_on(self, context: WorkerContext, choice: Choice, on_failure: Callable[[], None]) -> Any:
        """Returns a range and its examples, which stay on the worker, and begins to read other ranges.

        `on_failure` is called if a failure drops all ranges that were begun on the worker. Raises
        ClosureCancelledError, or an OpError if the range could not be read.
        """
        context = context.on_cpu
        try:
            return choice.positions, self._examples_on(context, choice)
        except BaseException as error:
            self._slots.recreate_on(context)
            on_failure()
            if not isinstance(error, tf.errors.OpError):
                raise
            # The failure may be in a dropped range, so the wanted range is read without a slot.
            return choice.positions, self._read.call_on(context, (tf.constant(choice.positions),))

    def _examples_on(self, context: WorkerContext, choice: Choice) -> Any:
        slots = self._slots.value_on(context)
        for slot, positions in choice.dropped:
            self._take.call_on(context, (slots[slot][1], tf.constant(positions)))
        begun = dict(choice.begun)
        if choice.slot is None:
            examples = self._read.call_on(context, (tf.constant(choice.positions),))
        elif choice.slot in begun:
            queue, iterator = slots[choice.slot]
            arguments = iterator, tf.constant(choice.positions), queue, tf.constant(begun.pop(choice.slot))
            examples = self._take_and_begin.call_on(context, arguments)
        else:
            examples = self._take.call_on(context, (slots[choice.slot][1], tf.constant(choice.positions)))
        for slot, positions in begun.items():
            self._begin.call_on(context, (slots[slot][0], tf.constant(positions)))
        return examples

    def _new_slot(self, context: WorkerContext) -> tuple[Any, Any]:
        # The name is unique, because a worker may outlive the client and keep its queues.
        name = f"coordinator_ranges_{uuid.uuid4()}"
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shapes=[[POSITIONS]], shared_name=name)
        return queue, iter(self._pipeline.call_on(context, (queue,)))


def _pipeline(queue: Any, read: Callable[[Any], Any]) -> tf.data.Dataset:
    def element(_: Any) -> Any:
        [positions] = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
        positions.set_shape([POSITIONS])
        return positions, read(positions)

    options = tf.data.Options()
    options.experimental_warm_start = True
    pipeline = tf.data.Dataset.from_tensors(0).repeat().map(element).prefetch(1).with_options(options)
    return without_autotuning(pipeline, options)


@tf.function(autograph=False)
def _begin(queue: Any, positions: Any) -> None:
    tf.raw_ops.QueueEnqueueV2(handle=queue, components=[positions])


@tf.function(autograph=False)
def _take(iterator: Any, positions: Any) -> Any:
    read, examples = next(iterator)
    with tf.control_dependencies([tf.debugging.assert_equal(read, positions)]):
        return tf.nest.map_structure(tf.identity, examples, expand_composites=True)


@tf.function(autograph=False)
def _take_and_begin(iterator: Any, positions: Any, queue: Any, next_positions: Any) -> Any:
    examples = _take(iterator, positions)
    with tf.control_dependencies(tf.nest.flatten(examples, expand_composites=True)):
        tf.raw_ops.QueueEnqueueV2(handle=queue, components=[next_positions])
    return examples
