"""Models that are compiled with an update rule: `fit` trains them by it.

model.compile(optimizer=rule)     model.optimizer is the rule's Keras optimizer, for callbacks and for saving
fit, each step                    pull, model.train_step, push; once more with a newer model if it is rejected
fit, the end of each epoch        the rule settles, before validation and callbacks
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.fit.replica_steps import on_replicas
from coordinator.ps_strategy.keras.internals.captured_gradients import RepeatedStepScope, gradients_captured
from coordinator.ps_strategy.tensorflow_internals.replica_values import total

Step = Callable[[Any], Any]


class RuleFits:
    """Knows the rules of compiled models. A rule is an `UpdateRule` of the package above."""

    def __init__(self) -> None:
        self._rules: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()

    def compile(self, model: keras.Model, optimizer: Any) -> Any:
        """Returns what a model is compiled with, as `model.optimizer`; a rule is kept, for its steps.

        Raises:
          ValueError: the rule has an update function.
        """
        self._rules.pop(model, None)
        if not is_rule(optimizer):
            return optimizer
        if optimizer.keras_optimizer is None:
            raise ValueError(
                "A model is compiled with a rule that has a Keras optimizer, which callbacks read and checkpoints "
                "save; this one has an update function. Call rule.pull() and rule.push() in a train_step of your own."
            )
        self._rules[model] = optimizer
        return optimizer.keras_optimizer

    def step(self, model: keras.Model) -> Step:
        """Returns what trains a model on a batch: its `train_step`, by its rule if it has one.

        Raises:
          ValueError: Keras has put the rule's optimizer into one that scales the loss.
        """
        rule = self._rules.get(model)
        if rule is None:
            return on_replicas(model.train_step, model.distribute_strategy)
        if model.optimizer is not rule.keras_optimizer:
            raise ValueError(
                f"The model {model.name!r} computes in float16, for which Keras scales the loss, and a rule cannot "
                "train with that. Give it the dtype policy mixed_bfloat16, or compile it with auto_scale_loss=False."
            )
        return _step_of(rule, model)

    def callbacks(self, model: keras.Model, given: Any) -> Any:
        """Returns the callbacks of a call of `fit`, and the rule's, which comes first."""
        rule = self._rules.get(model)
        if rule is None:
            return given
        settling = _Settling(rule)
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(settling)
            return given
        return [settling, *keras.tree.flatten(given if given is not None else [])]


def is_rule(optimizer: Any) -> bool:
    """Returns whether something is an update rule."""
    return callable(getattr(optimizer, "switch_to", None)) and callable(getattr(optimizer, "pull", None))


class _Settling(keras.callbacks.Callback):
    """Has the rule settle when the steps of an epoch have finished: before validation, and before other callbacks."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self._rule = rule

    def on_test_begin(self, logs: Any = None) -> None:
        self._rule.current.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._rule.current.settle()


def _step_of(rule: Any, model: keras.Model) -> Step:
    def step(batch: Any) -> Any:
        with rule.pull() as version:
            logs, gradients = _logs_and_gradients(rule, model, batch)
        accepted = rule.push(gradients, version)
        if rule.current.may_reject:
            repeat = tf.function(lambda: _repeat(rule, model, batch), autograph=False)
            tf.while_loop(tf.logical_not, lambda _: repeat(), [accepted])
        return logs

    return step


def _repeat(rule: Any, model: keras.Model, batch: Any) -> Any:
    """Runs a step again whose gradients were rejected; the metrics have its examples already."""
    with rule.pull() as version:
        _, gradients = _logs_and_gradients(rule, model, batch, RepeatedStepScope)
    return rule.push(gradients, version)


def _logs_and_gradients(
    rule: Any,
    model: keras.Model,
    batch: Any,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Any, list[Any]]:
    """Runs a model's `train_step` in a scope; returns its result, and the gradients, ordered as the rule's variables.

    Those of several replicas are summed, on the worker.
    """

    def train_step(part: Any) -> Any:
        # Of the thread: each replica has one.
        with scope():
            return model.train_step(part)

    strategy = model.distribute_strategy
    with gradients_captured(rule.keras_optimizer) as captured:
        logs = on_replicas(train_step, strategy)(batch)
    if len(captured) != strategy.num_replicas_in_sync:
        raise ValueError(
            f"The train_step of {model.name!r} has applied the rule's optimizer {len(captured)} times. A model that is "
            "compiled with a rule applies all of its gradients once; otherwise call rule.pull() and rule.push() in "
            "train_step, and compile the model without the rule."
        )
    return logs, list(map(total, zip(*(rule.ordered(*each) for each in captured), strict=True)))
