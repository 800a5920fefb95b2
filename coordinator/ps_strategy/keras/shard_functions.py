"""The functions that workers run for the shards of an evaluation.

The logs of a step that depend on the state of metrics after it and on nothing else, such as a metric's result.

Each shard of an evaluation has such a log of its own batches. That of all batches is computed from the state of all:

    batch, state before --> the step --> state after --> result() --> log
                                              '-- replaced by the state of all shards
"""

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.data.source import Source
from coordinator.ps_strategy.keras.internals.evaluation_scope import EvaluationScope, VariableReads, stored_variable
from coordinator.ps_strategy.keras.internals.optimizers import parts_of
from coordinator.ps_strategy.tensorflow_internals.functions import captured_inputs
from coordinator.ps_strategy.tensorflow_internals.handles import is_server_handle, owner_of_handle
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable


class ModelCopies:
    """Variables in which the weights of a model are kept while it is trained on.

    A server shares the memory of both until one of them changes.

    Args:
      model: its weights exist.

    Attributes:
      was_reset: whether a recovery has replaced the copies since they were last taken.

    Raises:
      ValueError: a weight is a table.
    """

    def __init__(self, model: keras.Model) -> None:
        strategy = self._strategy = model.distribute_strategy
        self._originals = {id(each): stored_variable(each) for each in model.weights}
        _refuse_tables(self._originals.values())
        with strategy.scope():
            self._copies = {key: _copy_of(each, strategy) for key, each in self._originals.items()}
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
        """Returns the copy of a weight; another variable itself."""
        return self._copies.get(id(variable), stored_variable(variable))

    def check(self, concrete: Any) -> None:
        """Raises ValueError if a function reads a variable or table on a parameter server that has no copy."""
        handles = {id(part.handle) for copy in self._copies.values() for part in parts_of(copy)}
        for captured in captured_inputs(concrete):
            if is_server_handle(captured) and id(captured) not in handles:
                owner = owner_of_handle(captured)
                raise ValueError(
                    f'model_state="snapshot" copies the weights of Keras layers alone, and the model reads '
                    f"{getattr(owner, 'name', owner)!r}, which is none. Leave it out, while nothing is scheduled."
                )

    def reset(self) -> None:
        """Called when all variables were lost."""
        self.was_reset = True

    def hold(self) -> None:
        """Called before that."""

    def resume(self) -> None:
        """Called when the variables have been restored."""


def _refuse_tables(variables: Iterable[Any]) -> None:
    """Raises ValueError if a variable is that of a table, whose rows are elsewhere; a copy would have all of them."""
    tables = [variable.name.partition(":")[0] for variable in variables if isinstance(variable, TableVariable)]
    if tables:
        raise ValueError(
            f'model_state="snapshot" cannot copy the rows of tables, and the model has {", ".join(map(repr, tables))}. '
            "Leave it out, while nothing is scheduled."
        )


def _copy_of(variable: Any, strategy: Any) -> Any:
    with strategy.extended.colocate_vars_with(variable):
        return tf.Variable(
            lambda: tf.zeros(variable.shape, variable.dtype),
            trainable=False,
            dtype=variable.dtype,
            shape=variable.shape,
        )


# What a function is given: batches, states, and variables of other functions.
_GIVEN = "Placeholder"


class StateLogs:
    """Computes those logs of a step that depend on the state of metrics only.

    Args:
      graph: of the step.
      after: the tensors of the state after the step, in this graph.
      logs: what the step has logged, by name.
    """

    def __init__(self, graph: Any, after: Sequence[Any], logs: Mapping[str, Any]) -> None:
        self._after = [each.name for each in after]
        self._logs: dict[str, str] = {}
        operations: set[str] = set()
        for name, log in logs.items():
            found = _between(log, set(self._after)) if tf.is_tensor(log) and hasattr(log, "op") else None
            if found is not None:
                self._logs[name] = log.name
                operations |= found
        self._definition = _part_of(graph, operations) if operations else None
        # Of a method that is traced for several objects, TensorFlow warns that it is traced too often.
        self._compute = tf.function(functools.partial(self._imported), autograph=False)

    def values(self, state: Sequence[Any]) -> dict[str, Any]:
        """Returns these logs by name, as NumPy values.

        Args:
          state: what the metrics' variables hold after all shards.
        """
        if not self._logs:
            return {}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            return {name: value.numpy() for name, value in self._compute(list(state)).items()}

    def _imported(self, state: Sequence[Any]) -> dict[str, Any]:
        given = dict(zip(self._after, state, strict=True))
        computed = [name for name in self._logs.values() if name not in given]
        if self._definition is not None:
            used = {each if ":" in each else f"{each}:0" for node in self._definition.node for each in node.input}
            inputs = {name: value for name, value in given.items() if name in used}
            found = tf.graph_util.import_graph_def(self._definition, inputs, computed, name="")
            given.update(zip(computed, found, strict=True))
        return {name: tf.identity(given[tensor]) for name, tensor in self._logs.items()}


def _between(log: Any, after: set[str]) -> set[str] | None:
    """Returns the names of the operations that compute a log from the state after a step; None if it needs more."""
    operations: set[str] = set()
    tensors = [log]
    while tensors:
        tensor = tensors.pop()
        if tensor.name in after or tensor.op.name in operations:
            continue
        if tensor.op.type.startswith(_GIVEN):
            return None
        operations.add(tensor.op.name)
        tensors.extend(tensor.op.inputs)
    return operations


def _part_of(graph: Any, operations: set[str]) -> Any:
    """Returns the definition of some operations of a graph, which can run anywhere and wait for nothing else."""
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in operations]
    del definition.node[:]
    for node in nodes:
        kept = [each for each in node.input if not each.startswith("^")]
        del node.input[:]
        node.input.extend(kept)
        node.device = ""
    definition.node.extend(nodes)
    return definition


# Operations that change what other functions see.
_WRITES = re.compile(
    r"(Resource)?(Assign|Scatter|Apply|StridedSliceAssign)\w*|(Mutable)?\w*LookupTable(Insert|Import|Remove)V2"
)


class NotShardableError(ValueError):
    """A step changes more than metrics, so that the shards of an evaluation would not be independent."""


class ShardFunctions:
    """Functions that evaluate a step on batches and return the state of its metrics.

    Each returns a dict: `state` is a list with the values of `variables()` after the batches, from the initial state of
    the metrics on; `batches` is the number of batches, int64; `logs` is what the step has returned for the last batch,
    empty if that is the metrics' results, which are read from the state of all shards.

    The functions of a trial take two batches instead; `state` is a list of three states: after one of them, after the
    other one, and after both. They read variables once, so that all three are of the same weights.

    Attributes:
      are_sums: whether all metrics have been found to be sums; see `MetricTotals.find_sums`.
      was_reported: whether it was reported that shards are not possible.

    Args:
      step: takes a batch, updates metrics, and returns logs.
      metrics: returns the metrics, some of which may create their variables while the step is traced.
      results: returns the results of the metrics by name.
      copies: of the model's weights, which are read in their place; None for none.
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
        self._of_examples: dict[Any, Any] = {}
        self._of_source: weakref.WeakKeyDictionary[Source, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self.of_batches = _function_of(self._evaluate_batches)
        self.of_dataset = _function_of(self._evaluate_dataset)
        self.trial_of_batches = _function_of(self._try_batches)
        self.trial_of_dataset = _function_of(self._try_dataset)
        self._state_logs: StateLogs | None = None

    def metrics(self) -> list[Any]:
        """Returns the metrics; in place of one that consists of others, as Keras' compiled metrics do, these."""
        return list(_leaves(self._metrics()))

    def variables(self) -> list[keras.Variable]:
        """Returns the variables of all metrics, each once."""
        return list({id(each): each for metric in self.metrics() for each in metric.variables}.values())

    def logs_of_state(self, state: Sequence[Any]) -> dict[str, Any]:
        """Returns those logs of the step that depend on the state of metrics only, by name, as NumPy values."""
        return {} if self._state_logs is None else self._state_logs.values(state)

    def of_examples(self, data: Any) -> Any:
        """Returns a function of the flattened tensors of several batches, which may have None, and the batch size.

        Args:
          data: such batches, or a batch.
        """
        leaves = tf.nest.flatten(data)
        specs = [_spec_of_any_size(each) for each in leaves if each is not None]
        structure = tf.nest.map_structure(lambda each: each is None, data)
        data = tf.nest.pack_sequence_as(
            structure, [None if each is None else _spec_of_any_size(each) for each in leaves]
        )
        key = (*specs, str(structure))
        if key not in self._of_examples:

            def evaluate(tensors: Sequence[Any], batch_size: Any) -> Any:
                present = iter(tensors)
                flat = [None if is_none else next(present) for is_none in tf.nest.flatten(structure)]
                count = tf.shape(tensors[0], tf.int64)[0]

                def read(begin: Any, end: Any) -> Any:
                    rows = [None if each is None else each[begin:end] for each in flat]
                    return tf.nest.pack_sequence_as(structure, rows)

                return self._evaluate_slices(data, count, batch_size, read)

            signature = [specs, tf.TensorSpec([], tf.int64)]
            self._of_examples[key] = tf.function(evaluate, autograph=False, input_signature=signature)
        return self._of_examples[key]

    def of_range(self, source: Source) -> Any:
        """Returns a function of a range of a source and the batch size."""
        return self._functions_of(source)[0]

    def trial_of_range(self, source: Source) -> Any:
        """Returns a function of the ranges of two batches of a source."""
        return self._functions_of(source)[1]

    def _functions_of(self, source: Source) -> tuple[Any, Any]:
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
                first, second = reference().read(one), reference().read(other)
                return self._try(tf.nest.map_structure(_spec_of_any_size, first), first, second)

            of_range, size = tf.TensorSpec([5], tf.int64), tf.TensorSpec([], tf.int64)
            self._of_source[source] = (
                tf.function(evaluate, autograph=False, input_signature=[of_range, size]),
                tf.function(try_ranges, autograph=False, input_signature=[of_range, of_range]),
            )
        return self._of_source[source]

    def _evaluate_slices(self, spec: Any, count: Any, batch_size: Any, read: Callable[[Any, Any], Any]) -> Any:
        """Evaluates `count` examples in batches of the type `spec`, which `read` returns for two positions."""
        step, state, logs = self._begin(spec)

        def body(begin: Any, batches: Any, state: Any, _: Any) -> Any:
            end = tf.minimum(begin + batch_size, count)
            return (end, batches + 1, *step(state, read(begin, end)))

        zero = tf.zeros([], tf.int64)
        _, batches, state, logs = tf.while_loop(
            lambda begin, *_: begin < count, body, (zero, zero, state, logs), _shapes(([], [], state, logs))
        )
        return {"state": state, "batches": batches, "logs": logs}

    def _evaluate_dataset(self, dataset: Any) -> Any:
        """Evaluates all elements of a dataset."""
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
        """Evaluates a tuple of batches of any kind."""
        step, state, logs = self._begin(tf.nest.map_structure(_spec_of, batches[0]))
        for batch in batches:
            state, logs = step(state, batch)
        return {"state": state, "batches": tf.constant(len(batches), tf.int64), "logs": logs}

    def _try(self, spec: Any, one: Any, other: Any) -> Any:
        """Evaluates two batches of the type `spec`, each alone and both, one after the other."""
        step, state, _ = self._begin(spec)
        first, _ = step(state, one)
        second, _ = step(state, other)
        both, _ = step(first, other)
        return {"state": [first, second, both], "batches": tf.constant(2, tf.int64)}

    def _try_batches(self, one: Any, other: Any) -> Any:
        spec = tf.nest.map_structure(_spec_of_any_size if _are_tensors(one) else _spec_of, one)
        return self._try(spec, one, other)

    def _try_dataset(self, dataset: Any) -> Any:
        """Evaluates the first two elements of a dataset; `batches` is 0 if it has fewer."""
        iterator = iter(dataset.take(2))
        one, other = iterator.get_next_as_optional(), iterator.get_next_as_optional()
        step, state, _ = self._begin(dataset.element_spec)

        def evaluate() -> Any:
            first, _ = step(state, one.get_value())
            second, _ = step(state, other.get_value())
            return tf.constant(2, tf.int64), first, second, step(first, other.get_value())[0]

        batches, *states = tf.cond(other.has_value(), evaluate, lambda: (tf.zeros([], tf.int64), state, state, state))
        return {"state": states, "batches": batches}

    def _begin(self, spec: Any) -> tuple[Any, Any, Any]:
        """Returns the step as a function of a state and a batch, the initial state, and logs of zeros.

        Raises:
          NotShardableError: the step changes more than metrics.
        """
        while True:
            variables = self.variables()
            reads = VariableReads(stored_variable if self.copies is None else self.copies.stored)
            concrete, assigned, self._state_logs = self._traced_step(variables, spec, reads)
            # Some layers and metrics create their variables with their first batch.
            if not reads.is_incomplete and len(self.variables()) == len(variables):
                break
        if assigned:
            raise NotShardableError(f"it assigns {assigned[0]!r}, which is the state of no metric")
        _refuse_writes(concrete.graph)
        if self.copies is not None:
            self.copies.check(concrete)
        outputs = concrete.structured_outputs
        logs = tf.nest.map_structure(lambda each: tf.zeros([n or 0 for n in each.shape], each.dtype), outputs[1])
        return concrete, initial_state(self.metrics(), variables), logs

    def _result_names(self) -> set[str]:
        try:
            return set(self.results())
        except ValueError:
            # Keras has no results of metrics that it has not built, because no step uses them.
            return set()

    def _traced_step(self, variables: Sequence[keras.Variable], spec: Any, reads: VariableReads) -> Any:
        """Returns the step as a concrete function, the names of other variables that it assigns, and `StateLogs`."""
        assigned: list[str] = []
        traced: list[Any] = []

        def run_step(state: Sequence[Any], batch: Any) -> Any:
            with EvaluationScope(variables, state, reads) as scope:
                logs = self._step(batch)
                are_results = isinstance(logs, dict) and set(logs) == self._result_names()
                after = [scope.get_current_value(each) for each in variables]
            assigned.extend(scope.others)
            logs = {} if are_results or logs is None else logs
            traced[:] = after, logs if isinstance(logs, dict) else {}
            shaped = [tf.ensure_shape(value, each.shape) for value, each in zip(after, variables, strict=True)]
            return shaped, logs

        states = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
        concrete = tf.function(run_step, autograph=False).get_concrete_function(states, spec)
        return concrete, assigned, StateLogs(concrete.graph, *traced)


def _function_of(method: Callable[..., Any]) -> Any:
    # Of a method that is traced for several objects, TensorFlow warns that it is traced too often.
    return tf.function(functools.partial(method), autograph=False, reduce_retracing=True)


def _leaves(metrics: Iterable[Any]) -> Iterator[Any]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        if isinstance(inner, list) and {id(v) for each in inner for v in each.variables} == set(
            map(id, metric.variables)
        ):
            yield from _leaves(inner)
        else:
            yield metric


def initial_state(metrics: Iterable[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """Returns the values of the variables of metrics before the first batch."""
    with keras.StatelessScope() as scope:
        for metric in metrics:
            metric.reset_state()
    values = [scope.get_current_value(each) for each in variables]
    return [
        tf.convert_to_tensor(stored_variable(each)) if value is None else tf.cast(value, each.dtype)
        for each, value in zip(variables, values, strict=True)
    ]


def _spec_of_any_size(value: Any) -> Any:
    """Returns the type of a tensor, or of NumPy values, with any number of rows."""
    if value is None:
        return None
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def _are_tensors(batch: Any) -> bool:
    return all(each is None or isinstance(each, tf.Tensor) for each in tf.nest.flatten(batch))


def _spec_of(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _shapes(structure: Any) -> Any:
    """Returns the invariant shapes of the variables of a loop."""
    begin, batches, state, logs = structure
    return (
        tf.TensorShape(begin),
        tf.TensorShape(batches),
        [each.shape for each in state],
        tf.nest.map_structure(lambda each: tf.TensorShape([n if n else None for n in each.shape]), logs),
    )


def _refuse_writes(graph: Any) -> None:
    definition = graph.as_graph_def()
    nodes: Iterator[Any] = (node for function in definition.library.function for node in function.node_def)
    for node in (*definition.node, *nodes):
        if _WRITES.fullmatch(node.op):
            raise NotShardableError(f"it changes a variable or a table by {node.op} ({node.name!r})")
