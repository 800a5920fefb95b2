"""What all update rules have in common: pull, push, what is kept and counted, and how one follows another.

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

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.lone_functions import mark_as_lone
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.updates.gradient_optimizer import gradient_optimizer
from coordinator.updates.parcel import send
from coordinator.updates.pulled import ModelCopies, Pulled
from coordinator.updates.rule_parts import Parts
from coordinator.updates.rule_statistics import RuleStatistics
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.snapshot import Snapshot
from coordinator.updates.state.rule_state import Ledger
from coordinator.updates.state.server_mutex import Exclusive
from coordinator.updates.transport.gradients import checked
from coordinator.updates.transport.model import Model, flat, pull, rebuilt


class UpdateRule(tf.Module):
    """Decides what a pushed gradient does to the model. Made in `strategy.scope()`; used in scheduled functions.

    It is a `tf.Module`: `tf.train.Checkpoint(model=model, optimizer=optimizer, rule=rule)` saves its version, clocks
    and counts with the model.

    Args:
      optimizer: a Keras 3 optimizer, or a function `(variable, gradient, learning_rate)` that changes a variable.
      variables: what gradients are pushed for, `tf.Variable`s or `keras.Variable`s.
      embeddings: those of which steps look up rows, and which are never copied to a worker as a whole ahead of time.
      learning_rate: for an update function: a number or a scalar `tf.Variable`.
      use_locking: whether a gradient's update of a server's variables keeps others out until it is done.
      allow_duplicate_indices: whether an update function may be given `tf.IndexedSlices` that have an index more than
        once. One that only adds to a variable what is in proportion to the gradient, as plain SGD does with
        `scatter_sub`, has the same effect then. Otherwise rows of the same index are summed first, on the worker.

    Raises:
      RuntimeError: not in the scope of a `coordinator.ParameterServerStrategy`.
      TypeError, ValueError: an argument is something else.
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
                "An update rule is made inside strategy.scope() of a coordinator.ParameterServerStrategy."
            )
        model = Model(variables, embeddings)
        self.ledger = Ledger()
        self._parts = Parts(
            strategy,
            model,
            gradient_optimizer(optimizer, model.originals, learning_rate, allow_duplicate_indices),
            {
                part.device: Exclusive(f"coordinator/updates/{self.ledger.number}/{number}", part.device)
                for number, part in enumerate(model.parts)
            },
            key=f"coordinator/updates/{self.ledger.number}",
        )
        self._use_locking = use_locking

    @property
    def version(self) -> tf.Variable:
        """The number of updates that were applied, an int64 scalar on a parameter server."""
        return self.ledger.version

    @tf.autograph.experimental.do_not_convert
    def pull(self) -> contextlib.AbstractContextManager[Any]:
        """A scope in which the model is read from copies that were pulled at its beginning, once per variable.

        To be used in a scheduled function. Entering gives the model version that was pulled, an int64 scalar.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: inside another `pull`.
        """
        return self._present()._pull_scope()

    @tf.autograph.experimental.do_not_convert
    def push(self, gradients: Sequence[Any], version: Any) -> Any:
        """Pushes the gradients of a step.

        Args:
          gradients: one for each variable, in their order: a tensor, `tf.IndexedSlices`, or None.
          version: the version that they were computed on, as `pull` gave it.

        Returns:
          Whether the rule took them, a bool scalar.

        Raises:
          RuntimeError: outside of a scheduled function.
          ValueError: there are more or fewer gradients than variables, all are None, or the shape of one, or the id of
            a row, is not one that its variable has. What is not known of shapes while the function is traced is
            checked when it runs, before anything is sent: then it raises `tf.errors.InvalidArgumentError`. So are ids
            by the rules that collect gradients on the servers before they apply them.
          TypeError: a gradient's dtype is neither its variable's nor a floating-point one, which is cast to it.
        """
        return self._present()._push_all(gradients, version)

    @tf.autograph.experimental.do_not_convert
    def run(self, step_body: Callable[..., tuple[Any, Sequence[Any]]], *batch: Any) -> Any:
        """Runs a whole step on a minibatch, again with a newer model for as long as its gradients are rejected.

        Args:
          step_body: takes the minibatch, returns a result and the gradients: `(loss, gradients)`.
          *batch: its arguments.

        Returns:
          The result of the attempt that was accepted.
        """

        def attempt() -> tuple[Any, Any]:
            with self.pull() as version:
                result, gradients = step_body(*batch)
            return result, self.push(gradients, version)

        if not self._present().may_reject:
            return attempt()[0]
        # Traced once, called in two places.
        attempt_function = tf.function(attempt)
        result, accepted = attempt_function()
        return tf.while_loop(
            lambda _, accepted: tf.logical_not(accepted), lambda *_: attempt_function(), (result, accepted)
        )[0]

    def statistics(self) -> RuleStatistics:
        """What the rule has seen so far; read from its home server.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: the server does not answer.
        """
        self._refuse_closed("statistics")
        return RuleStatistics.of(self._present().ledger)

    def switch_to(self, rule: "UpdateRule") -> None:
        """Goes on with another rule: from now on, functions that use this one do what that one does.

        Waits until everything that was scheduled has finished, as `strategy.join()`. Version, clocks and counts go on.
        Functions are traced anew when they are next scheduled; a concrete function keeps the rule that it was traced
        with. (Sync-Switch, arXiv 2104.08364: synchronous first, asynchronous later.)

        Args:
          rule: made for the same variables, and not in use.

        Raises:
          ValueError: it is made for other variables, or in use.
          StrategyClosedError: the strategy is closed.
          Exception: what `join` raises; then nothing is switched.
        """
        self._refuse_closed("switch_to")
        present = self._present()
        if rule is present or rule._parts.successor or present._parts.strategy is not rule._parts.strategy:
            raise ValueError("switch_to takes a rule of the same strategy that was not used before.")
        mine, theirs = ([id(v) for v in each._parts.model.variables] for each in (present, rule))
        if mine != theirs:
            raise ValueError("switch_to takes a rule that was made for the same variables, in the same order.")
        strategy = present._parts.strategy
        strategy.join()
        present._end()
        rule._go_on_from(present)
        present._parts.successor.append(rule)
        strategy.trace_anew()

    # What a rule of its own kind overrides.

    @property
    def may_reject(self) -> bool:
        """Whether `push` may say no."""
        return False

    @property
    def may_wait(self) -> bool:
        """Whether a pull or a push may wait for what other workers do. Then no two steps are run in one call."""
        return True

    @property
    def _is_version_for_all_servers(self) -> bool:
        """Whether what is pulled from other servers is of the pulled version, too, which takes a message to each."""
        return True

    @property
    def _looks_at_ids(self) -> bool:
        """Whether a step looks at the ids of rows before it sends any: some operations for each variable."""
        return False

    def _begin(self) -> Any:
        """Waits until the worker may pull, and returns the version that it will pull, an int64 scalar."""
        with tf.device(self.ledger.home):
            return self.ledger.version.read_value()

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        """Pushes the gradients that are there, by the positions of their variables; returns whether they are taken."""
        raise NotImplementedError

    def _model_copies(self, version: Any) -> ModelCopies:
        """Pulls the model."""
        parts = self._parts
        numbers = parts.model.pulled_at_once()
        variables = [parts.model.variables[number] for number in numbers]
        wait_for_version = None if self._is_version_for_all_servers else self.ledger.home
        pulled = [*variables, *parts.optimizer.scalars]
        values, size = pull(pulled, [version], wait_for_version, is_joined=self.may_wait)
        return ModelCopies(dict(zip(numbers, values, strict=False)), values[len(numbers) :], version, size, 1)

    def _end(self) -> None:
        """Brings the shared model to what this rule makes of all that was pushed; nothing runs meanwhile."""

    def _go_on_from(self, rule: "UpdateRule") -> None:
        """Takes over what another rule has kept."""
        self.ledger = rule.ledger

    # What they share.

    def _present(self) -> "UpdateRule":
        return self._parts.successor[0]._present() if self._parts.successor else self

    def _refuse_closed(self, called: str) -> None:
        """Refuses what asks the parameter servers, from which a closed strategy is disconnected."""
        self._parts.strategy.cluster.refuse_closed(
            f"rule.{called}() asks the parameter servers and cannot be called any more; call it before strategy.close()"
        )

    @contextlib.contextmanager
    def _pull_scope(self) -> Iterator[Any]:
        if tf.executing_eagerly():
            raise RuntimeError("rule.pull() is used inside a tf.function that is given to strategy.schedule.")
        if self.may_wait:
            mark_as_lone()
        parts = self._parts
        worker = parts.strategy.worker_index()
        copies = self._model_copies(self._begin())
        snapshot = Snapshot(parts.model.variables, copies.values)
        # Kept with the graph, whose tensors it holds, so that both go together.
        graph = tf.compat.v1.get_default_graph()
        graph.add_to_collection(parts.key, Pulled(copies.version, worker, copies.scalars, copies.kept))
        with snapshot.in_force():
            yield copies.version
        # Of what has arrived: the size of what is still on its server would be a message of its own.
        later = [tf.size(tf.identity(tensor), tf.int64) * tensor.dtype.size for tensor in snapshot.read_later]
        self.ledger.count(pulls=copies.pulls, bytes_pulled=tf.add_n([copies.size, *later]))

    def _push_all(self, gradients: Sequence[Any], version: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError("rule.push() is used inside a tf.function that is given to strategy.schedule.")
        if self.may_wait:
            mark_as_lone()
        model = self._parts.model
        if len(gradients) != len(model.variables):
            raise ValueError(
                f"push takes {len(model.variables)} gradients, one for each variable; got {len(gradients)}."
            )
        there = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        if not there:
            raise ValueError("All gradients are None: the loss does not depend on any of the rule's variables.")
        there, checks = checked(there, model.variables, looks_at_ids=self._looks_at_ids)
        prepared = self._parts.optimizer.prepared(list(there.values()))
        with tensorflow_internals.reads_as_ever(model.variables):
            pulled = dataclasses.replace(self._pulled_before(), version=tf.convert_to_tensor(version, tf.int64))
            return self._push(dict(zip(there, prepared, strict=True)), pulled.after(checks))

    def _pulled_before(self) -> Pulled:
        """What the pull of this step found; if it was in another function, what would be found now."""
        parts = self._parts
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if found := graph.get_collection_ref(parts.key):
                pulled: Pulled = found[-1]
                return pulled
            graph = tensorflow_internals.graph_around(graph)
        scalars, _ = pull(parts.optimizer.scalars, [], is_joined=self.may_wait)
        return Pulled(tf.constant(0, tf.int64), parts.strategy.worker_index(), scalars)

    def _send_to(self, device: str, gradients: dict[int, Any], extras: Sequence[Any]) -> SentGradients:
        """Brings the gradients of a server's variables there, and more tensors with them."""
        numbers = [number for number in self._parts.model.numbers_on(device) if number in gradients]
        tensors = flat(gradients, numbers)
        parcel = send([*tensors, *extras], None, device, is_joined=self.may_wait)
        there, more = parcel.tensors[: len(tensors)], parcel.tensors[len(tensors) :]
        with tf.device(device):
            return SentGradients(device, numbers, rebuilt(gradients, numbers, there), more, parcel.size)

    @contextlib.contextmanager
    def _exclusively(self, device: str, after: Sequence[Any]) -> Iterator[None]:
        """A scope in which the variables of a server are changed, under its lock if there is to be one.

        Args:
          device: the server's CPU.
          after: tensors; nothing is changed before they are there.
        """
        lock = self._parts.locks.get(device) if self._use_locking else None
        if lock is not None:
            with lock.hold(after):
                yield
        else:
            with tf.device(device), tf.control_dependencies(list(after)):
                yield

    def _apply(self, sent: SentGradients, scalars: Sequence[Any], rate: Any) -> None:
        """Has the optimizer change a server's variables; everything given is on that server."""
        variables = [self._parts.model.originals[number] for number in sent.numbers]
        if variables:
            with tf.device(sent.device):
                self._parts.optimizer.apply(variables, sent.gradients, scalars, rate)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._parts.optimizer!r}, {self._parts.model!r}>"
