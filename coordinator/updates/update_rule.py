"""The base of all update rules: pull, push, counters, and switching to another rule.

worker                       parameter servers
with rule.pull() as v:  <--  the version and the dense variables, one message per server
    gradients
rule.push(gradients, v) -->  the gradients, one message per server; the rule decides, its optimizer applies
"""

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, TypeVar

import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.ps_strategy.fusing.repeated_function import disable_fusing
from coordinator.ps_strategy.keras.internals.optimizers import variable_of
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.replicas import refuse_replica
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, reads_not_replaced, reads_replaced
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable
from coordinator.updates.gradient_optimizer import gradient_optimizer
from coordinator.updates.gradients import checked, not_finite, value_checks
from coordinator.updates.model import Model, PulledModel, PulledVariable, RoundingErrors, checked_version, latest_pull
from coordinator.updates.rule_state import Gate, RuleState, RuleStatistics, range_number
from coordinator.updates.settings import rounding_dtype


class CommonSettings(TypedDict, total=False):
    """The keywords that all rules take; `UpdateRule` explains them and has their defaults."""

    embeddings: Sequence[Any] | None
    learning_rate: Any
    require_finite: bool


class RoundedSettings(CommonSettings, total=False):
    """The keywords of rules that can round their messages."""

    transfer_dtype: Any
    error_feedback: bool


class CommittedSettings(RoundedSettings, total=False):
    """The keywords of rules that can commit each range once."""

    once: Epochs | None


_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


def takes_settings(constructor: _Constructor) -> _Constructor:
    """Decorates a rule's constructor, whose `**settings: Unpack[...]` takes only the keywords of the TypedDict.

    Type checkers and editors read the TypedDict. `help` and the documentation list the keywords one by one, with the
    defaults of `UpdateRule`. Any other keyword is a TypeError.
    """
    *own, settings = inspect.signature(constructor).parameters.values()
    [accepted] = typing.get_args(settings.annotation)
    common = inspect.signature(UpdateRule.__init__).parameters
    signature = inspect.Signature([*own, *(common[name] for name in accepted.__annotations__)], return_annotation=None)

    @functools.wraps(constructor)
    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in signature.parameters:
                raise TypeError(f"{constructor.__qualname__}() got an unexpected keyword argument {name!r}")
        constructor(self, *arguments, **keywords)

    construct.__signature__ = signature  # type: ignore[attr-defined]
    return typing.cast(_Constructor, construct)


class TablesOfRule:
    """The tables among a rule's variables, and their gradients among the pushed gradients.

    Tables update their rows themselves, by key, on all servers. `given` has all variables of the rule; `variables` has
    the variables of tables, by their positions in `given`.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        # This class holds the variables, since TensorFlow would save attributes of the rule with its checkpoints.
        self.given = tuple(variables)
        wholes = enumerate(map(variable_of, variables))
        self.variables = {number: variable for number, variable in wholes if isinstance(variable, TableVariable)}

    def others(self, values: Sequence[Any]) -> list[Any]:
        """Returns the variables, or the gradients, that do not belong to tables."""
        return [value for number, value in enumerate(values) if number not in self.variables]

    def value_checks(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns operations that fail if a gradient of a table is not finite."""
        return [check for table, gradient in self._pushed(gradients) for check in value_checks(gradient, table)]

    def apply(self, gradients: Sequence[Any], checks: Sequence[Any], accepted: Any, *, may_reject: bool) -> Any:
        """Applies the tables' gradients after `checks`, if `accepted`, a bool scalar, is True; returns `accepted`.

        `accepted` may be False only with `may_reject`. A gradient is None if the step did not use the table.
        """
        pushed = self._pushed(gradients)

        def apply_all() -> Any:
            with tf.control_dependencies(list(checks)):
                for table, gradient in pushed:
                    table.apply_gradients(gradient)
            return tf.constant(True)

        if pushed and may_reject:
            tf.cond(accepted, apply_all, lambda: tf.constant(False))
        elif pushed:
            apply_all()
        return accepted

    def _pushed(self, gradients: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(table, gradients[n]) for n, table in self.variables.items() if gradients[n] is not None]


class UpdateRule(tf.Module):
    """Decides what a pushed gradient does to the model. Created in `strategy.scope()`; used in scheduled functions.

    A rule is a `tf.Module`: `tf.train.Checkpoint(model=model, optimizer=optimizer, rule=rule)` saves the rule's
    version, clocks and counters with the model.

    Args:
      optimizer: a Keras 3 optimizer, or a function `(variable, gradient, learning_rate)` that changes a variable, or a
        part of a sharded variable.
      variables: `tf.Variable`s or `keras.Variable`s, for which gradients are pushed. The `variable` of a table may be
        among them: the gradients of an accepted push go directly to the table's own optimizer, independently of what
        the rule does with the other variables.
      embeddings: variables that steps look up by rows. No embedding is copied to a worker as a whole. By default,
        embeddings are the sharded variables, and the variables of `Embedding` layers, which Keras names "embeddings".
      learning_rate: the learning rate of an update function: a number, a scalar `tf.Variable`, or a function of the
        pulled version, an int64 scalar, such as a schedule of Keras. A function is called once with 0 to check it.
      allow_duplicate_indices: whether an update function accepts `tf.IndexedSlices` with repeated indices. True is
        right for a function that only adds multiples of the gradient, as plain SGD does with `scatter_sub`. Otherwise,
        the worker first sums rows of the same index.
      once: the `coordinator.data.Epochs` whose ranges the rule commits once each, or None. See `push`.
      require_finite: whether a push with an infinite value or NaN raises `tf.errors.InvalidArgumentError`, before
        anything is sent. By default, such a push only counts in `statistics().not_finite`.
      transfer_dtype: `tf.bfloat16` rounds dense float32 variables and gradients while they are sent, which halves the
        bytes; `tf.float32` rounds nothing; None takes `Options.transfer_dtype`. Variables, slots and sums stay float32.
      error_feedback: whether each worker adds the rounding errors of its earlier pushes to each push. Each worker then
        holds a rounding error of the size of each rounded variable.

    Raises:
      RuntimeError: the current scope is not the scope of a `coordinator.ParameterServerStrategy`.
      StrategyClosedError: the strategy is closed.
      TypeError, ValueError: an argument is wrong.
    """

    def __init__(  # noqa: PLR0913 - all but two are keywords
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        embeddings: Sequence[Any] | None = None,
        learning_rate: Any = None,
        allow_duplicate_indices: bool = False,
        once: Epochs | None = None,
        require_finite: bool = False,
        transfer_dtype: Any = None,
        error_feedback: bool = False,
    ) -> None:
        super().__init__(type(self).__name__)
        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, ParameterServerStrategy):
            raise RuntimeError(
                "An update rule is created inside strategy.scope() of a coordinator.ParameterServerStrategy."
            )
        self._strategy = strategy
        strategy.extended.services.refuse_closed("An update rule cannot be created any more")
        self._require_finite = require_finite
        if once is not None and not isinstance(once, Epochs):
            raise TypeError(f"once must be the coordinator.data.Epochs whose ranges the steps are given, got {once!r}.")
        self._tables = TablesOfRule(variables)
        if once is not None and self._tables.variables:
            raise ValueError(
                "A rule with once= cannot have tables: a table applies its rows itself, apart from what the rule "
                "commits. Give the rule the other variables, and the table a rule without once=."
            )
        if transfer_dtype is None:
            transfer_dtype = strategy.extended.services.options.transfer_dtype
        dtype = rounding_dtype(transfer_dtype, error_feedback)
        self._model = Model(self._tables.others(variables), embeddings, dtype, is_packed=self.may_wait)
        self._errors = RoundingErrors(self._model, are_kept=error_feedback)
        self.state = RuleState(once)
        # Names the locks on the servers, and the collection in which a graph stores its pulls.
        self._key = f"coordinator/updates/{self.state.number}"
        self._optimizer = gradient_optimizer(optimizer, self._model.given, learning_rate, allow_duplicate_indices)
        # Returns the rule that replaced this rule. It is a function, since TensorFlow would save a rule with this rule.
        self._successor: Callable[[], UpdateRule] | None = None
        strategy.extended.services.rules.add(self)

    @property
    def version(self) -> tf.Variable:
        """The number of updates applied, an int64 scalar on a parameter server."""
        return self.state.version

    @property
    def current(self) -> "UpdateRule":
        """The rule that replaced this rule with `switch_to`, or this rule itself."""
        return self._successor() if self._successor else self

    @property
    def keras_optimizer(self) -> Any:
        """The Keras optimizer that the rule was created with; None for an update function."""
        return getattr(self._optimizer, "optimizer", None)

    def ordered(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns gradients in the order that `push` takes; ValueError if the rule lacks a variable with a gradient."""
        wholes = list(map(variable_of, variables))
        by_variable = {id(variable): gradient for variable, gradient in zip(wholes, gradients, strict=True)}
        in_order = [by_variable.pop(id(variable_of(variable)), None) for variable in self._tables.given]
        for variable in wholes:
            if by_variable.get(id(variable)) is not None:
                raise ValueError(
                    f"The rule was created without the variable {variable.name!r}, which has a gradient. Create it "
                    "with all variables that are trained."
                )
        return in_order

    @tf.autograph.experimental.do_not_convert
    def pull(self) -> contextlib.AbstractContextManager[Any]:
        """Opens a scope, in a scheduled function, in which reads of the model are answered from local copies.

        A variable is pulled at most once: when the scope is entered, or, if it is large or an embedding, when it is
        read as a whole. The scope's value is the model version that was pulled, an int64 scalar.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: inside another `pull`.
        """
        return self.current._pull_scope()

    @tf.autograph.experimental.do_not_convert
    def push(self, gradients: Sequence[Any], version: Any, positions: Any = None) -> Any:
        """Pushes the gradients of a step.

        A rule with `once=epochs` commits one push for each range. If a step runs again after an earlier run has pushed
        (for instance because its worker died), the second push is ignored.

        Args:
          gradients: a gradient for each variable of the rule, in order: a tensor, `tf.IndexedSlices`, or None.
          version: the version that the gradients were computed on, which is the value of the `pull` scope.
          positions: the range that the gradients were computed on, as the function was given it; only with `once`.

        Returns:
          Whether the rule accepted the gradients, a bool scalar; also True for an ignored push of a committed range.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: there are more or fewer gradients than variables, all are None, or a shape or the id of a row
            does not fit its variable; or `positions` are missing, given to a rule without `once`, or given twice in a
            function. Shapes that are unknown at tracing are checked at run time, before anything is sent, and raise
            `tf.errors.InvalidArgumentError`. Rules that collect gradients on the servers also check ids of rows then.
          TypeError: a gradient's dtype is neither the variable's dtype nor a floating-point dtype that is cast to it;
            or `positions` is no range.
        """
        return self.current._push_all(gradients, version, positions)

    @tf.autograph.experimental.do_not_convert
    def run(self, step_body: Callable[..., tuple[Any, Sequence[Any]]], *batch: Any, positions: Any = None) -> Any:
        """Runs a step on a minibatch, and repeats it with a newer model while its gradients are rejected.

        Args:
          step_body: a function that takes the minibatch, and returns a result and the gradients: `(loss, gradients)`.
          *batch: the arguments of `step_body`.
          positions: see `push`.

        Returns:
          The result of the accepted attempt.
        """

        def attempt() -> tuple[Any, Any]:
            with self.pull() as version:
                result, gradients = step_body(*batch)
            return result, self.push(gradients, version, positions)

        if not self.current.may_reject:
            return attempt()[0]
        # `attempt` is traced once, and called in two places.
        attempt_function = tf.function(attempt)
        result, accepted = attempt_function()
        return tf.while_loop(
            lambda _, accepted: tf.logical_not(accepted), lambda *_: attempt_function(), (result, accepted)
        )[0]

    def statistics(self) -> RuleStatistics:
        """Returns the rule's counters, read from its home server.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: the server does not answer.
        """
        self._refuse_closed("statistics")
        return RuleStatistics.of(self.current.state)

    def switch_to(self, rule: "UpdateRule") -> None:
        """Replaces this rule: from now on, functions that use this rule do what the other rule does.

        Waits until all scheduled functions have finished, like `strategy.join()`. No function runs during the switch.
        The version, clocks and counters continue. Functions are retraced when they are next scheduled; a concrete
        function keeps the rule that it was traced with.

        Args:
          rule: a rule for the same variables that is not in use.

        Raises:
          ValueError: the rule is for other variables, has another `once`, or is in use.
          StrategyClosedError: the strategy is closed.
          Exception: an error that `strategy.join` raises; then the rule is not replaced.
        """
        self._refuse_closed("switch_to")
        current, strategy = self.current, self._strategy
        if rule is current or rule._successor or strategy is not rule._strategy:
            raise ValueError("switch_to takes a rule of the same strategy that was not used before.")
        mine, theirs = ([id(variable_of(v)) for v in either._tables.given] for either in (current, rule))
        if mine != theirs:
            raise ValueError("switch_to takes a rule that was created for the same variables, in the same order.")
        if current._once is not rule._once:
            raise ValueError("switch_to takes a rule that was created with the same once= as this one.")
        strategy.join()
        # Functions that other threads have scheduled since then run afterwards.
        with strategy.quiet():
            current._finish()
            rule.state = current.state
            rule._use_state()
            current._successor = lambda: rule.current
            strategy.extended.services.rules.discard(current)
            change = f"{type(current).__name__} to {type(rule).__name__}"
            strategy.events.record("rule_changed", name=type(rule).__name__, detail=change)
            strategy.extended.services.retrace()

    # Overridden by the rules.

    # Whether a push sends pulled values of dense variables with their gradients; see `Accumulating`.
    sends_pulled_values = False

    @property
    def may_reject(self) -> bool:
        """Whether `push` may return False."""
        return False

    # Whether the reads on all servers wait for the version, which costs a message to each server.
    _pulls_after_version = True
    # Whether a step checks the ids of rows before it sends rows, which takes some operations for each variable.
    _checks_ids = False

    @property
    def may_wait(self) -> bool:
        """Whether a pull or a push may wait for other workers. If so, steps that pull or push are not fused."""
        return True

    # Where a worker waits until it may pull.
    _gate: Gate | None = None

    def _begin_step(self) -> Any:
        """Waits until the worker may pull; returns the version that it will pull, an int64 scalar."""
        if self._gate is not None:
            return self._gate.wait_open()
        with tf.device(self.state.home):
            return self.state.version.read_value()

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        """Pushes gradients by position; returns whether they are accepted."""
        raise NotImplementedError

    def _pull_model(self, version: Any) -> PulledModel:
        numbers = self._model.pulled_at_once(with_large=self.sends_pulled_values)
        variables = [*(self._model.variables[number] for number in numbers), *self._optimizer.scalars]
        only_on = None if self._pulls_after_version else self.state.home
        values, size = self._model.pull(variables, [version], only_on)
        return PulledModel(version, values[len(numbers) :], dict(zip(numbers, values, strict=False)), size, 1)

    def settle(self) -> None:
        """Applies all waiting pushes that training would apply. Called on the client while nothing is scheduled.

        `fit` calls it at the end of each epoch.
        """

    def _finish(self) -> None:
        """Applies all pushes to the shared model. Called while nothing is scheduled."""

    def _use_state(self) -> None:
        """Creates the objects that depend on `state`; called in `__init__`, and by `switch_to` with the new state."""

    # Used by the rules.

    @property
    def _once(self) -> Epochs | None:
        return self.state.committed.epochs if hasattr(self.state, "committed") else None

    def _refuse_closed(self, called: str) -> None:
        """Raises StrategyClosedError if the strategy is closed: it is disconnected from the parameter servers."""
        self._strategy.extended.services.refuse_closed(
            f"rule.{called}() asks the parameter servers and cannot be called any more; call it before strategy.close()"
        )

    @contextlib.contextmanager
    def _pull_scope(self) -> Iterator[Any]:
        self._prepare_trace("pull")
        worker = self._strategy.extended.services.worker_index()
        model = self._pull_model(self._begin_step())
        variables = self._model.wholes
        copies = list(map(PulledVariable, variables, self._model.joined(model.values), self._model.transfer_dtypes()))
        # The graph holds the pulled model, which has tensors of this graph. So both are freed together.
        graph = tf.compat.v1.get_default_graph()
        graph.add_to_collection(self._key, dataclasses.replace(model, worker=worker))
        with reads_replaced(variables, copies):
            yield model.version
        # The identities are on the worker. The size of a tensor on its server would need a message.
        read = [tensor for copy in copies for tensor in copy.read_later]
        later = [tf.size(tf.identity(tensor), tf.int64) * tensor.dtype.size for tensor in read]
        pulls, size = model.pulls, tf.add_n([model.size, *later])
        if tf.is_tensor(pulls):
            # One message has both numbers.
            both = tf.stack([pulls, size])
            with tf.device(self.state.home):
                pulls, size = tf.unstack(both)
        self.state.count(pulls=pulls, bytes_pulled=size)

    def _push_all(self, gradients: Sequence[Any], version: Any, positions: Any) -> Any:
        self._prepare_trace("push")
        number, version = range_number(positions, self._once, self._key), checked_version(version)
        model = self._model
        expected = len(self._tables.given)
        if not isinstance(gradients, list | tuple):
            raise TypeError(f"push takes a list of {expected} gradients, one for each variable; got {gradients!r}.")
        if len(gradients) != expected:
            raise ValueError(f"push takes {expected} gradients, one for each variable; got {len(gradients)}.")
        others = enumerate(self._tables.others(gradients))
        pushed = {position: gradient for position, gradient in others if gradient is not None}
        if not pushed:
            raise ValueError("All gradients are None: the loss does not depend on any of the rule's variables.")
        checks = self._tables.value_checks(gradients) if self._require_finite else []
        pushed, checks = checked(pushed, model.wholes, checks, ids=self._checks_ids, values=self._require_finite)
        prepared = self._optimizer.prepared(list(pushed.values()), [model.wholes[number] for number in pushed])
        with reads_not_replaced(model.wholes):
            latest = latest_pull(self._key, version)
            if latest is None:
                # The pull was in another function.
                scalars, size = self._model.pull(self._optimizer.scalars)
                worker = self._strategy.extended.services.worker_index()
                latest = PulledModel(tf.constant(0, tf.int64), scalars, {}, size, 0, worker=worker)
            pulled = dataclasses.replace(latest, version=version, number=number, not_finite=not_finite(gradients))
            exact = self._errors.added_to(model.divided(dict(zip(pushed, prepared, strict=True))))
            accepted = self._push(model.rounded(exact), pulled.after(checks))
            self._errors.keep(exact, pulled.not_finite, accepted if self.may_reject else True)
        return self._tables.apply(gradients, checks, accepted, may_reject=self.may_reject)

    def _prepare_trace(self, called: str) -> None:
        """Raises an error if no worker's function is being traced; disables fusing if the rule may wait."""
        self._refuse_closed(called)
        if tf.executing_eagerly():
            raise RuntimeError(f"rule.{called}() is used inside a tf.function that is given to strategy.schedule.")
        refuse_replica(f"rule.{called}()")
        if self.may_wait:
            disable_fusing()

    def _apply(self, device: str, gradients: dict[int, Any], scalars: Sequence[Any], rate: Any) -> None:
        """Has the optimizer change a server's variables; all tensors are on that server."""
        if gradients:
            with tf.device(device):
                variables = [self._model.originals[number] for number in gradients]
                self._optimizer.apply(variables, list(gradients.values()), scalars, rate)

    def _lock(self, device: str) -> ServerMutex:
        """Returns the lock of a server's variables, which also protects the optimizer's variables there."""
        return ServerMutex(f"{self._key}/variables", device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._optimizer!r}, {self._model!r}>"
