"""The base of all update rules: pull, push, counters, and switching to another rule.

worker                       parameter servers
with rule.pull() as v:  <--  the version and the dense variables, one message per server
    gradients
rule.push(gradients, v) -->  the gradients, one message per server; the rule decides, its optimizer applies
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.repeated_function import disable_fusing
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.reads import graph_around, reads_as_ever
from coordinator.updates.gradient_optimizer import GradientOptimizer, gradient_optimizer
from coordinator.updates.rule_statistics import RuleStatistics
from coordinator.updates.state.rule_state import RuleState
from coordinator.updates.state.server_mutex import ServerMutex
from coordinator.updates.transport.gradients import SentGradients, checked, flat, rebuilt
from coordinator.updates.transport.model import Model, pull, transfer
from coordinator.updates.transport.pulled_variables import PulledModel, PulledVariables


@dataclasses.dataclass(frozen=True)
class Parts:
    """The collaborators of a rule. Not in checkpoints: TensorFlow does not track the attributes of a dataclass.

    Attributes:
      strategy: its parameter servers have the model.
      model: the variables.
      optimizer: changes them.
      locks: by device of a server: held while that server's variables are changed, if `use_locking`.
      key: of the collection in which a graph stores its pulls.
      successor: the rule that this one was switched to, if any.
    """

    strategy: ParameterServerStrategy
    model: Model
    optimizer: GradientOptimizer
    locks: dict[str, ServerMutex]
    key: str
    successor: list["UpdateRule"] = dataclasses.field(default_factory=list)


class UpdateRule(tf.Module):
    """Decides what a pushed gradient does to the model. Created in `strategy.scope()`; used in scheduled functions.

    It is a `tf.Module`: `tf.train.Checkpoint(model=model, optimizer=optimizer, rule=rule)` saves its version, clocks
    and counters with the model.

    Args:
      optimizer: a Keras 3 optimizer, or a function `(variable, gradient, learning_rate)` that changes a variable.
      variables: `tf.Variable`s or `keras.Variable`s, for which gradients are pushed.
      embeddings: those of which steps look up rows. They are never copied to a worker as a whole ahead of time.
      learning_rate: for an update function: a number or a scalar `tf.Variable`.
      use_locking: whether one gradient at a time is applied to the variables of a server.
      allow_duplicate_indices: whether an update function accepts `tf.IndexedSlices` with repeated indices. A function
        that only adds multiples of the gradient, as plain SGD does with `scatter_sub`, has the same effect then.
        Otherwise rows of the same index are summed first, on the worker.

    Raises:
      RuntimeError: not in the scope of a `coordinator.ParameterServerStrategy`.
      TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
        use_locking: bool = True,
        allow_duplicate_indices: bool = False,
    ) -> None:
        super().__init__(type(self).__name__)
        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, ParameterServerStrategy):
            raise RuntimeError(
                "An update rule is created inside strategy.scope() of a coordinator.ParameterServerStrategy."
            )
        model = Model(variables, embeddings)
        self.state = RuleState()
        key = f"coordinator/updates/{self.state.number}"
        self._parts = Parts(
            strategy,
            model,
            gradient_optimizer(optimizer, model.originals, learning_rate, allow_duplicate_indices),
            {device: ServerMutex(f"{key}/{number}", device) for number, device in enumerate(model.by_device)},
            key,
        )
        self._use_locking = use_locking

    @property
    def version(self) -> tf.Variable:
        """The number of updates applied, an int64 scalar on a parameter server."""
        return self.state.version

    @tf.autograph.experimental.do_not_convert
    def pull(self) -> contextlib.AbstractContextManager[Any]:
        """Opens a scope that reads the model from copies, pulled once per variable when the scope is entered.

        Used in a scheduled function. The scope's value is the model version that was pulled, an int64 scalar.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: inside another `pull`.
        """
        return self._current()._pull_scope()

    @tf.autograph.experimental.do_not_convert
    def push(self, gradients: Sequence[Any], version: Any) -> Any:
        """Pushes the gradients of a step.

        Args:
          gradients: one for each variable, in their order: a tensor, `tf.IndexedSlices`, or None.
          version: the version that they were computed on, the value of the `pull` scope.

        Returns:
          Whether the rule accepted them, a bool scalar.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: the number of gradients is not that of the variables, all are None, or a shape or the id of a row
            does not fit its variable. Shapes that are unknown while the function is traced are checked when it runs,
            before anything is sent: then it raises `tf.errors.InvalidArgumentError`. So are ids, by the rules that
            collect gradients on the servers before they apply them.
          TypeError: a gradient's dtype is neither its variable's nor a floating-point one, which is cast to it.
        """
        return self._current()._push_all(gradients, version)

    @tf.autograph.experimental.do_not_convert
    def run(self, step_body: Callable[..., tuple[Any, Sequence[Any]]], *batch: Any) -> Any:
        """Runs a step on a minibatch, and repeats it with a newer model while its gradients are rejected.

        Args:
          step_body: takes the minibatch, returns a result and the gradients: `(loss, gradients)`.
          *batch: its arguments.

        Returns:
          The result of the accepted attempt.
        """

        def attempt() -> tuple[Any, Any]:
            with self.pull() as version:
                result, gradients = step_body(*batch)
            return result, self.push(gradients, version)

        if not self._current().may_reject:
            return attempt()[0]
        # Traced once, called in two places.
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
        return RuleStatistics.of(self._current().state)

    def switch_to(self, rule: "UpdateRule") -> None:
        """Replaces this rule: from now on, functions that use it do what the other rule does.

        Waits until all scheduled functions have finished, as `strategy.join()`. Version, clocks and counters continue.
        Functions are retraced when they are next scheduled; a concrete function keeps the rule that it was traced with.
        (Sync-Switch, arXiv 2104.08364: synchronous first, asynchronous later.)

        Args:
          rule: for the same variables, and not in use.

        Raises:
          ValueError: it is for other variables, or in use.
          StrategyClosedError: the strategy is closed.
          Exception: what `join` raises; then nothing is switched.
        """
        self._refuse_closed("switch_to")
        current = self._current()
        if rule is current or rule._parts.successor or current._parts.strategy is not rule._parts.strategy:
            raise ValueError("switch_to takes a rule of the same strategy that was not used before.")
        mine, theirs = ([id(v) for v in each._parts.model.variables] for each in (current, rule))
        if mine != theirs:
            raise ValueError("switch_to takes a rule that was created for the same variables, in the same order.")
        strategy = current._parts.strategy
        strategy.join()
        current._finish()
        rule._take_over(current)
        current._parts.successor.append(rule)
        strategy.extended.services.retrace()

    # Overridden by the rules.

    # Whether `push` may return False.
    may_reject = False
    # Whether all servers are read after the version, which costs a message to each.
    _pulls_after_version = True
    # Whether a step checks the ids of rows before it sends any: some operations for each variable.
    _checks_ids = False

    @property
    def may_wait(self) -> bool:
        """Whether a pull or a push may wait for other workers. Then steps are not fused."""
        return True

    def _begin_step(self) -> Any:
        """Waits until the worker may pull, and returns the version that it will pull, an int64 scalar."""
        with tf.device(self.state.home):
            return self.state.version.read_value()

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        """Pushes gradients, by the positions of their variables; returns whether they are accepted."""
        raise NotImplementedError

    def _pull_model(self, version: Any) -> PulledModel:
        parts = self._parts
        numbers = parts.model.pulled_at_once()
        variables = [*(parts.model.variables[number] for number in numbers), *parts.optimizer.scalars]
        only_on = None if self._pulls_after_version else self.state.home
        values, size = pull(variables, [version], only_on, is_packed=self.may_wait)
        return PulledModel(version, values[len(numbers) :], dict(zip(numbers, values, strict=False)), size, 1)

    def _finish(self) -> None:
        """Applies all that was pushed to the shared model; nothing is scheduled meanwhile."""

    def _take_over(self, rule: "UpdateRule") -> None:
        """Continues with the state of another rule."""
        self.state = rule.state

    # Used by the rules.

    def _current(self) -> "UpdateRule":
        return self._parts.successor[0]._current() if self._parts.successor else self

    def _refuse_closed(self, called: str) -> None:
        """Raises StrategyClosedError if the strategy is closed: then it is disconnected from the parameter servers."""
        self._parts.strategy.extended.services.refuse_closed(
            f"rule.{called}() asks the parameter servers and cannot be called any more; call it before strategy.close()"
        )

    @contextlib.contextmanager
    def _pull_scope(self) -> Iterator[Any]:
        self._prepare_trace("pull")
        parts = self._parts
        worker = parts.strategy.extended.services.worker_index()
        model = self._pull_model(self._begin_step())
        copies = PulledVariables(parts.model.variables, model.values)
        # Stored in the graph, whose tensors it holds, so that both are freed together.
        graph = tf.compat.v1.get_default_graph()
        graph.add_to_collection(parts.key, dataclasses.replace(model, worker=worker))
        with copies.active():
            yield model.version
        # Identities are on the worker: the size of a tensor on its server would be a message.
        later = [tf.size(tf.identity(tensor), tf.int64) * tensor.dtype.size for tensor in copies.read_later]
        self.state.count(pulls=model.pulls, bytes_pulled=tf.add_n([model.size, *later]))

    def _push_all(self, gradients: Sequence[Any], version: Any) -> Any:
        self._prepare_trace("push")
        model = self._parts.model
        if len(gradients) != len(model.variables):
            raise ValueError(
                f"push takes {len(model.variables)} gradients, one for each variable; got {len(gradients)}."
            )
        given = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        if not given:
            raise ValueError("All gradients are None: the loss does not depend on any of the rule's variables.")
        given, checks = checked(given, model.variables, checks_ids=self._checks_ids)
        prepared = self._parts.optimizer.prepared(list(given.values()))
        with reads_as_ever(model.variables):
            pulled = dataclasses.replace(self._latest_pull(), version=tf.convert_to_tensor(version, tf.int64))
            return self._push(dict(zip(given, prepared, strict=True)), pulled.after(checks))

    def _prepare_trace(self, called: str) -> None:
        """Raises outside of a function that is being traced; disables fusing if the rule may wait."""
        if tf.executing_eagerly():
            raise RuntimeError(f"rule.{called}() is used inside a tf.function that is given to strategy.schedule.")
        if self.may_wait:
            disable_fusing()

    def _latest_pull(self) -> PulledModel:
        """Returns this step's pull; if that was in another function, the scalars are pulled now."""
        parts = self._parts
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if found := graph.get_collection_ref(parts.key):
                pulled: PulledModel = found[-1]
                return pulled
            graph = graph_around(graph)
        scalars, size = pull(parts.optimizer.scalars, [], is_packed=self.may_wait)
        return PulledModel(
            tf.constant(0, tf.int64), scalars, {}, size, 0, worker=parts.strategy.extended.services.worker_index()
        )

    def _send_to(self, device: str, gradients: dict[int, Any], extras: Sequence[Any]) -> SentGradients:
        """Sends the gradients of a server's variables there, with further tensors."""
        numbers = [number for number in self._parts.model.by_device.get(device, ()) if number in gradients]
        tensors = flat(gradients, numbers)
        arrived, size = transfer([*tensors, *extras], None, device, is_packed=self.may_wait)
        with tf.device(device):
            rebuilt_gradients = rebuilt(gradients, numbers, arrived[: len(tensors)])
            return SentGradients(device, numbers, rebuilt_gradients, arrived[len(tensors) :], size)

    def _apply(self, sent: SentGradients, scalars: Sequence[Any], rate: Any) -> None:
        """Has the optimizer change a server's variables; all arguments are on that server."""
        variables = [self._parts.model.originals[number] for number in sent.numbers]
        if variables:
            with tf.device(sent.device):
                self._parts.optimizer.apply(variables, sent.gradients, scalars, rate)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._parts.optimizer!r}, {self._parts.model!r}>"
