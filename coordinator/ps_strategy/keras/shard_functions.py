"""Functions with which workers evaluate shards. They return states of metrics, which `MetricTotals` adds up.

Some logs of a step, such as a metric's result, depend only on the state of the metrics after the step. A shard returns
the values of such logs for its own batches. The values for all batches are computed from the state of all shards:

    batch, state before --> the step --> state after --> result() --> log
                                              '-- replaced by the state of all shards
"""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.data.source import Source
from coordinator.ps_strategy.keras.internals.optimizers import parts_of
from coordinator.ps_strategy.keras.internals.patches import EvaluationScope, stored_variable
from coordinator.ps_strategy.recovery.variable_store import ClientState
from coordinator.ps_strategy.tensorflow_internals.functions import captured_inputs
from coordinator.ps_strategy.tensorflow_internals.handles import is_server_handle, owner_of_handle
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable

_State = list[Any]

# The type of the operations that represent a function's arguments and captures: batches, states and variables.
_ARGUMENT = "Placeholder"
# The types of operations that change a variable or a table.
_WRITES = re.compile(
    r"(Resource)?(Assign|Scatter|Apply|StridedSliceAssign)\w*|(Mutable)?\w*LookupTable(Insert|Import|Remove)V2"
)


class ModelCopies(ClientState):
    """Variables that keep the weights of a model while the training goes on.

    A weight and its copy share the server's memory until one of them changes. The model's weights must exist. A weight
    that is a table raises ValueError, because the weight has no rows and a copy would need all rows of the table.

    Attributes:
      was_reset: whether a recovery has replaced the copies since the last `take`.
    """

    def __init__(self, model: keras.Model) -> None:
        strategy = self._strategy = model.distribute_strategy
        self._originals = {id(weight): stored_variable(weight) for weight in model.weights}
        originals = self._originals.values()
        tables = [original.name.partition(":")[0] for original in originals if isinstance(original, TableVariable)]
        if tables:
            raise ValueError(
                f'model_state="snapshot" cannot copy the rows of tables, and the model has '
                f"{', '.join(map(repr, tables))}. Leave it out, while nothing is scheduled."
            )
        with strategy.scope():
            self._copies = {key: _copy_of(original, strategy) for key, original in self._originals.items()}
        self.was_reset = False
        strategy.extended.services.variables.add_state(self)

    def take(self) -> None:
        """Copies all weights, while no scheduled function runs."""
        with self._strategy.quiet():
            self.was_reset = False
            for key, original in self._originals.items():
                for part, copy in zip(parts_of(original), parts_of(self._copies[key]), strict=True):
                    copy.assign(part, read_value=False)

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the copy of a weight; for any other Keras variable, its TensorFlow variable."""
        return self._copies.get(id(variable), stored_variable(variable))

    def check(self, concrete: Any) -> None:
        """Raises ValueError if a function reads a parameter server's variable or table that has no copy."""
        handles = {id(part.handle) for copy in self._copies.values() for part in parts_of(copy)}
        for captured in captured_inputs(concrete):
            if is_server_handle(captured) and id(captured) not in handles:
                owner = owner_of_handle(captured)
                raise ValueError(
                    f'model_state="snapshot" copies the weights of Keras layers alone, and the model reads '
                    f"{getattr(owner, 'name', owner)!r}, which is none. Leave it out, while nothing is scheduled."
                )

    def reset(self) -> None:
        """Records that all variables were lost, so that an evaluation that reads the copies begins again."""
        self.was_reset = True


def _copy_of(variable: Any, strategy: Any) -> Any:
    shape, dtype = variable.shape, variable.dtype
    with strategy.extended.colocate_vars_with(variable):
        return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, dtype=dtype, shape=shape)


class StateLogs:
    """The logs of a step that depend only on the state of metrics.

    `graph` is the step's graph. `after` has the graph's tensors of the state after the step. `logs` maps names to logs.
    """

    def __init__(self, graph: Any, after: Sequence[Any], logs: Mapping[str, Any]) -> None:
        self._after = [tensor.name for tensor in after]
        self._logs: dict[str, str] = {}
        operations: set[str] = set()
        for name, log in logs.items():
            between = _between(log, set(self._after)) if tf.is_tensor(log) and hasattr(log, "op") else None
            if between is not None:
                self._logs[name] = log.name
                operations |= between
        self._definition = _part_of(graph, operations) if operations else None
        self._compute = _function_of(self._imported)

    def values(self, state: Sequence[Any]) -> dict[str, Any]:
        """Returns the logs by name, as NumPy values; `state` has the metrics' variables after all shards."""
        if not self._logs:
            return {}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            return {name: value.numpy() for name, value in self._compute(list(state)).items()}

    def _imported(self, state: Sequence[Any]) -> dict[str, Any]:
        tensors = dict(zip(self._after, state, strict=True))
        computed = [name for name in self._logs.values() if name not in tensors]
        if self._definition is not None:
            used = {name if ":" in name else f"{name}:0" for node in self._definition.node for name in node.input}
            inputs = {name: value for name, value in tensors.items() if name in used}
            outputs = tf.graph_util.import_graph_def(self._definition, inputs, computed, name="")
            tensors.update(zip(computed, outputs, strict=True))
        return {name: tf.identity(tensors[tensor]) for name, tensor in self._logs.items()}


def _between(log: Any, after: set[str]) -> set[str] | None:
    """Returns the names of the operations that compute a log from the state; None if the log needs another input."""
    operations: set[str] = set()
    tensors = [log]
    while tensors:
        tensor = tensors.pop()
        if tensor.name in after or tensor.op.name in operations:
            continue
        if tensor.op.type.startswith(_ARGUMENT):
            return None
        operations.add(tensor.op.name)
        tensors.extend(tensor.op.inputs)
    return operations


def _part_of(graph: Any, operations: set[str]) -> Any:
    """Returns the definition of some operations of a graph, without their devices and control dependencies."""
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in operations]
    del definition.node[:]
    for node in nodes:
        inputs = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        node.device = ""
    definition.node.extend(nodes)
    return definition


class NotShardableError(ValueError):
    """An evaluation cannot be divided into shards: its step changes more than metrics, or a metric is no sum."""


class ShardFunctions:
    """Functions that evaluate a step on batches and return the state of its metrics.

    Each function returns a dict. `state` is a list of the values of the metrics' variables after the batches, beginning
    with the initial state. `batches` is the number of batches, int64. `logs` is the result of the step for the last
    batch, or is empty if the step returns the metrics' results, which the client computes from the state of all shards.

    Trial functions show whether the metrics are sums: their `state` is a list of three states, after one batch, after
    another batch, and after both. A trial function reads each variable once, so all states are of the same weights.

    `are_sums` says whether all metrics were found to be sums (`MetricTotals.find_sums`). Some of `metrics()` may create
    their variables while the step is traced. With `copies`, steps read the copies instead of the model's weights.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        metrics: Callable[[], Iterable[Any]],
        results: Callable[[], dict[str, Any]],
        copies: ModelCopies | None = None,
    ) -> None:
        self._step = step
        self._metrics = metrics
        self.results = results
        self.copies = copies
        self.are_sums = self.was_reported = False
        self._of_examples: dict[str, Any] = {}
        self._of_source: weakref.WeakKeyDictionary[Source, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self.of_batches = _function_of(self._evaluate_batches)
        self.of_dataset = _function_of(self._evaluate_dataset)
        self.trial_of_batches = _function_of(self._try_batches)
        self.trial_of_dataset = _function_of(self._try_dataset)
        self._state_logs: StateLogs | None = None

    def metrics(self) -> list[Any]:
        """Returns the metrics; a metric that consists of others, like Keras' compiled metrics, is replaced by them."""
        return list(_leaves(self._metrics()))

    def logs_of_state(self, state: Sequence[Any]) -> dict[str, Any]:
        """Returns the logs of the step that depend only on the state of metrics, by name, as NumPy values."""
        return {} if self._state_logs is None else self._state_logs.values(state)

    def of_examples(self, data: Any) -> Any:
        """Returns a function that takes the flattened tensors of several batches like `data`, and the batch size."""
        spec = tf.nest.map_structure(_spec_of_any_size, data)
        key = str(spec)
        if key not in self._of_examples:

            def evaluate(tensors: Sequence[Any], batch_size: Any) -> Any:
                present = iter(tensors)
                parts = [None if part is None else next(present) for part in tf.nest.flatten(spec)]
                examples = tf.nest.pack_sequence_as(spec, parts)

                def read(begin: Any, end: Any) -> Any:
                    return tf.nest.map_structure(lambda part: None if part is None else part[begin:end], examples)

                return self._evaluate_slices(spec, tf.shape(tensors[0], tf.int64)[0], batch_size, read)

            present_specs = [part for part in tf.nest.flatten(spec) if part is not None]
            signature = [present_specs, tf.TensorSpec([], tf.int64)]
            self._of_examples[key] = tf.function(evaluate, autograph=False, input_signature=signature)
        return self._of_examples[key]

    def of_source(self, source: Source) -> tuple[Any, Any]:
        """Returns a function that takes a range of a source and the batch size, and a trial function for two ranges."""
        if source not in self._of_source:
            reference: Callable[[], Any] = weakref.ref(source)

            def evaluate(positions: Any, batch_size: Any) -> Any:
                epoch, start, count, number, seed = tf.unstack(positions, num=5)

                def read(begin: Any, end: Any) -> Any:
                    return reference().read(tf.stack([epoch, start + begin, end - begin, number, seed]))

                examples = tf.function(lambda begin: read(begin, begin + 1), autograph=False)
                outputs = examples.get_concrete_function(tf.TensorSpec([], tf.int64)).structured_outputs
                spec = tf.nest.map_structure(_spec_of_any_size, outputs)
                return self._evaluate_slices(spec, count, batch_size, read)

            def try_ranges(one: Any, other: Any) -> Any:
                return self._try_batches(reference().read(one), reference().read(other))

            of_range, size = tf.TensorSpec([5], tf.int64), tf.TensorSpec([], tf.int64)
            self._of_source[source] = (
                tf.function(evaluate, autograph=False, input_signature=[of_range, size]),
                tf.function(try_ranges, autograph=False, input_signature=[of_range, of_range]),
            )
        return self._of_source[source]

    def _evaluate_slices(self, spec: Any, count: Any, batch_size: Any, read: Callable[[Any, Any], Any]) -> Any:
        step, state, logs = self._begin(spec)

        def body(begin: Any, batches: Any, state: Any, _: Any) -> Any:
            end = tf.minimum(begin + batch_size, count)
            return (end, batches + 1, *step(state, read(begin, end)))

        zero, scalar = tf.zeros([], tf.int64), tf.TensorShape([])
        log_shapes = tf.nest.map_structure(
            lambda log: tf.TensorShape([size if size else None for size in log.shape]), logs
        )
        _, batches, state, logs = tf.while_loop(
            lambda begin, *_: begin < count,
            body,
            (zero, zero, state, logs),
            (scalar, scalar, [value.shape for value in state], log_shapes),
        )
        return {"state": state, "batches": batches, "logs": logs}

    def _evaluate_dataset(self, dataset: Any) -> Any:
        iterator = iter(dataset)
        step, state, logs = self._begin(dataset.element_spec)

        def body(batch: Any, batches: Any, state: Any, _: Any) -> Any:
            state, logs = step(state, batch.get_value())
            return iterator.get_next_as_optional(), batches + 1, state, logs

        first = iterator.get_next_as_optional()
        _, batches, state, logs = tf.while_loop(
            lambda batch, *_: batch.has_value(), body, (first, tf.zeros([], tf.int64), state, logs)
        )
        return {"state": state, "batches": batches, "logs": logs}

    def _evaluate_batches(self, batches: Sequence[Any]) -> Any:
        step, state, logs = self._begin(tf.nest.map_structure(_spec_of, batches[0]))
        for batch in batches:
            state, logs = step(state, batch)
        return {"state": state, "batches": tf.constant(len(batches), tf.int64), "logs": logs}

    def _try_batches(self, one: Any, other: Any) -> Any:
        are_tensors = all(part is None or isinstance(part, tf.Tensor) for part in tf.nest.flatten(one))
        step, state, _ = self._begin(tf.nest.map_structure(_spec_of_any_size if are_tensors else _spec_of, one))
        return {"state": _states_of_trial(step, state, one, other), "batches": tf.constant(2, tf.int64)}

    def _try_dataset(self, dataset: Any) -> Any:
        """Evaluates the first two elements of a dataset; `batches` is 0 if the dataset has fewer."""
        iterator = iter(dataset.take(2))
        one, other = iterator.get_next_as_optional(), iterator.get_next_as_optional()
        step, state, _ = self._begin(dataset.element_spec)
        batches, states = tf.cond(
            other.has_value(),
            lambda: (tf.constant(2, tf.int64), _states_of_trial(step, state, one.get_value(), other.get_value())),
            lambda: (tf.zeros([], tf.int64), [state, state, state]),
        )
        return {"state": states, "batches": batches}

    def _begin(self, spec: Any) -> tuple[Any, Any, Any]:
        """Returns a triple: the step, traced to take a state and a batch; the initial state; and logs of zeros."""
        while True:
            variables = _variables_of(self.metrics())
            concrete, scope, self._state_logs = self._traced_step(variables, spec)
            # Traces again if variables were created: some layers and metrics do that with their first batch.
            if not scope.is_incomplete and len(_variables_of(self.metrics())) == len(variables):
                break
        if scope.others:
            raise NotShardableError(f"it assigns {scope.others[0]!r}, which is the state of no metric")
        _refuse_writes(concrete.graph)
        if self.copies is not None:
            self.copies.check(concrete)
        logs = tf.nest.map_structure(
            lambda log: tf.zeros([size or 0 for size in log.shape], log.dtype), concrete.structured_outputs[1]
        )
        return concrete, _initial_state(self.metrics(), variables), logs

    def _traced_step(self, variables: Sequence[keras.Variable], spec: Any) -> tuple[Any, EvaluationScope, StateLogs]:
        """Returns the step as a concrete function, the scope in which it was traced, and its `StateLogs`."""
        stored = stored_variable if self.copies is None else self.copies.stored
        graph = tf.compat.v1.get_default_graph()
        traced: list[Any] = []

        def run_step(state: Sequence[Any], batch: Any) -> Any:
            with EvaluationScope(variables, state, stored, graph) as scope:
                logs = self._step(batch)
                # Keras raises ValueError for the result of a metric that is not built, because no step uses it.
                with contextlib.suppress(ValueError):
                    logs = {} if isinstance(logs, dict) and set(logs) == set(self.results()) else logs
                after = [scope.get_current_value(variable) for variable in variables]
            logs = {} if logs is None else logs
            traced[:] = scope, after, logs if isinstance(logs, dict) else {}
            shapes = [variable.shape for variable in variables]
            return list(map(tf.ensure_shape, after, shapes)), logs

        states = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        concrete = tf.function(run_step, autograph=False).get_concrete_function(states, spec)
        scope, *after_and_logs = traced
        return concrete, scope, StateLogs(concrete.graph, *after_and_logs)


def _function_of(method: Callable[..., Any]) -> Any:
    # TensorFlow warns if one method is traced for several objects, so each object gets a partial function of its own.
    return tf.function(functools.partial(method), autograph=False, reduce_retracing=True)


def _leaves(metrics: Iterable[Any]) -> Iterator[Any]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, list) and set(map(id, _variables_of(inner))) == set(map(id, metric.variables)):
            yield from _leaves(inner)
        else:
            yield metric


def _variables_of(metrics: Iterable[Any]) -> list[keras.Variable]:
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


def _initial_state(metrics: Iterable[Any], variables: Sequence[keras.Variable]) -> _State:
    with keras.StatelessScope() as scope:
        for metric in metrics:
            metric.reset_state()
    values = [scope.get_current_value(variable) for variable in variables]
    return [
        tf.convert_to_tensor(stored_variable(variable)) if value is None else tf.cast(value, variable.dtype)
        for variable, value in zip(variables, values, strict=True)
    ]


def _states_of_trial(step: Callable[[Any, Any], Any], state: Any, one: Any, other: Any) -> list[Any]:
    first, second = step(state, one)[0], step(state, other)[0]
    return [first, second, step(first, other)[0]]


def _spec_of(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _spec_of_any_size(value: Any) -> Any:
    """Returns the type of a tensor, or of NumPy values, with any number of rows."""
    return None if value is None else tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def _refuse_writes(graph: Any) -> None:
    definition = graph.as_graph_def()
    nodes: Iterator[Any] = (node for function in definition.library.function for node in function.node_def)
    for node in (*definition.node, *nodes):
        if _WRITES.fullmatch(node.op):
            raise NotShardableError(f"it changes a variable or a table by {node.op} ({node.name!r})")


class MetricTotals:
    """The sum of the states of metrics that shards have returned; the variables of the metrics must exist.

    A metric's state after all shards is its initial state plus each shard's change. A metric whose state is no such sum
    may have a method `merge(state, other)`. The method takes two states, which are lists of the values of
    `metric.variables`, and returns the state after the batches of both.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._variables = _variables_of(self._metrics)
        self._places = {id(variable): place for place, variable in enumerate(self._variables)}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._initial = [np.asarray(value) for value in _initial_state(self._metrics, self._variables)]
        self._state: _State = list(self._initial)
        self._is_empty = True

    def add(self, state: Sequence[Any]) -> None:
        shard = list(map(np.asarray, state))
        if self._is_empty:
            self._state, self._is_empty = shard, False
            return
        total = [_sum(*values) for values in zip(self._state, self._initial, shard, strict=True)]
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                merged = metric.merge(self._of(metric, self._state), self._of(metric, shard))
                for variable, value in zip(metric.variables, merged, strict=True):
                    total[self._places[id(variable)]] = value
        self._state = total

    def results(self, read: Callable[[], Any]) -> Any:
        """Returns the result of `read` while the metrics have the state of all shards.

        The client calls `read`, without entering the scope of a strategy.
        """
        with tf.device("/device:CPU:0"), keras.StatelessScope(self._values()):
            return tf.nest.map_structure(lambda value: tf.convert_to_tensor(value).numpy(), read())

    def state(self) -> list[Any]:
        """Returns the state of all shards: a tensor for each of the metrics' variables."""
        return [value for _, value in self._values()]

    def assign(self) -> None:
        """Assigns the state of all shards to the variables of the metrics."""
        for variable, value in self._values():
            variable.assign(value)

    def _values(self) -> list[tuple[Any, Any]]:
        return [
            (variable, tf.constant(np.asarray(value).astype(tf.as_dtype(variable.dtype).as_numpy_dtype)))
            for variable, value in zip(self._variables, self._state, strict=True)
        ]

    def _of(self, metric: Any, state: Sequence[Any]) -> _State:
        return [state[self._places[id(variable)]] for variable in metric.variables]

    def find_sums(self, first: Sequence[Any], second: Sequence[Any], both: Sequence[Any]) -> tuple[bool, list[str]]:
        """Compares the state after two batches with the sum of each batch's change.

        Returns whether all metrics are known to be sums, and the names of the metrics that are no sums. A metric is
        known to be a sum only if each of the two batches changes its state.
        """
        are_sums, others = True, []
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                continue
            parts = [self._of(metric, state) for state in (self._initial, first, second, both)]
            if not all(map(_is_sum, *parts)):
                others.append(metric.name)
            are_sums &= all(any(map(np.any, map(np.not_equal, parts[0], part))) for part in parts[1:3])
        return are_sums and not others, others


def _sum(state: Any, initial: Any, shard: Any) -> Any:
    if initial.dtype.kind in "fV":
        # Adds in float64, so that the order of the shards has no visible effect.
        return np.asarray(state, np.float64) + (shard.astype(np.float64) - initial.astype(np.float64))
    return state + (shard - initial)


def _is_sum(initial: Any, first: Any, second: Any, both: Any) -> bool:
    states = list(map(np.asarray, (initial, first, second, both)))
    dtype = states[0].dtype
    if dtype.kind in "iu":
        start, one, other, all_ = states
        return bool((all_ - start == (one - start) + (other - start)).all())
    if dtype.kind not in "fV":
        return False
    # The tolerance is relative to the values, because the state is rounded after each batch.
    tolerance = 1000 * float(np.finfo(tf.as_dtype(dtype).as_numpy_dtype).eps) if dtype.kind == "f" else 0.1
    start, one, other, all_ = (state.astype(np.float64) for state in states)
    scale = np.maximum(np.abs(one - start), np.abs(other - start))
    with np.errstate(invalid="ignore"):
        close = np.abs((all_ - start) - (one - start) - (other - start)) <= tolerance * (scale + np.abs(start))
    return bool(np.isfinite(start).all() and (close | ~np.isfinite(all_)).all())
