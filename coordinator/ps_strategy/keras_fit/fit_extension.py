"""What Keras' loop is given for the models of a `ParameterServerStrategy`."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from coordinator.ps_strategy import keras_internals
from coordinator.ps_strategy.keras.fit.feeds import ClientData, ClientFeed
from coordinator.ps_strategy.keras_fit.scheduled_function import ScheduledFunction
from coordinator.ps_strategy.keras_fit.scheduled_prediction import ScheduledPrediction
from coordinator.ps_strategy.keras_fit.worker_data import WorkerData
from coordinator.ps_strategy.per_worker_dataset import PerWorkerDataset


class FitExtension:
    """Schedules the steps of `fit`, `evaluate` and `predict`.

    Args:
      strategy_class: the class of the strategies whose models are trained so.
    """

    def __init__(self, strategy_class: type[Any]) -> None:
        self._strategy_class = strategy_class
        self._latest_feed: Callable[[], ClientFeed | None] = lambda: None

    def is_for(self, strategy: Any) -> bool:
        """Whether models of this strategy are trained here."""
        return isinstance(strategy, self._strategy_class)

    def epoch_iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> keras_internals.EpochIterator:
        """The batches of `x`, which is what Keras takes, or a per-worker dataset, or a dataset function."""
        if callable(x):
            x = strategy.experimental_distribute_datasets_from_function(x)
        if not isinstance(x, PerWorkerDataset):
            return keras_internals.EpochIterator(
                lambda dataset: ClientData(dataset, strategy, self._remember), x, arguments
            )
        _refuse_besides_own_data(arguments)
        is_counted = arguments.get("steps_per_epoch") is not None
        return keras_internals.EpochIterator(
            lambda dataset: WorkerData(dataset, strategy, is_counted=is_counted),
            keras_internals.OwnData(x),
            arguments,
        )

    def train_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """Trains a model for a turn."""
        _check(model)
        return ScheduledFunction(model, model.train_step, model.distribute_strategy)

    def test_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """Evaluates a model for a turn."""
        _check(model)
        return ScheduledFunction(model, model.test_step, model.distribute_strategy)

    def predict_function(self, model: keras.Model) -> Callable[[Any], Any]:
        """Predicts for a turn."""
        _check(model)
        return ScheduledPrediction(model, model.distribute_strategy, self._feed_made_last)

    def _feed_made_last(self) -> ClientFeed | None:
        return self._latest_feed()

    def _remember(self, feed: ClientFeed) -> None:
        self._latest_feed = weakref.ref(feed)


@functools.cache
def extend_keras(strategy_class: type[Any]) -> None:
    """From now on, Keras' loop trains the models of these strategies here; again, does nothing."""
    if keras.backend.backend() == "tensorflow":
        keras_internals.extend_trainer(FitExtension(strategy_class))


def _refuse_besides_own_data(arguments: dict[str, Any]) -> None:
    given = [name for name in ("y", "sample_weight", "class_weight") if arguments.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be given along with a dataset function or a per-worker dataset, whose elements "
            "are whole batches (x, y) or (x, y, sample_weight). Put it into the dataset."
        )


def _check(model: keras.Model) -> None:
    """Refuses a model that cannot be trained on parameter servers.

    Raises:
      ValueError: it is to run eagerly, or compiled by XLA, or has variables that are not on parameter servers.
    """
    if model.run_eagerly:
        raise ValueError(
            "run_eagerly=True: workers run traced functions, they have no Python. Compile the model without it; to "
            "debug a step, call model.train_step(batch) of a model that was made without a strategy."
        )
    if model.jit_compile:
        raise ValueError(
            "jit_compile=True: XLA compiles functions for one device, and a step uses variables on parameter servers. "
            "Compile the model without it."
        )
    optimizer = getattr(model, "optimizer", None)
    held = [*model.variables, *(optimizer.variables if optimizer else ())]
    is_held = model.distribute_strategy.extended.holds
    astray = [variable.path for variable in held if not is_held(keras_internals.variable_of(variable))]
    if astray:
        raise ValueError(
            f"{len(astray)} variables of model {model.name!r} are not on parameter servers, {astray[0]!r} among them. "
            "Make the model, its optimizer and its metrics, and compile it, inside `with strategy.scope():`."
        )
