r"""A Keras callback by which training acts on the results of a sidecar evaluator.

    SidecarEvaluator --one line per evaluation--> evaluations.jsonl --SidecarMetrics--> EarlyStopping, ReduceLROnPlateau
                                                                                   \--> logs of the epoch, history

Promises:
  * The callbacks get each result once, in order, when it arrives: an epoch may have several results or none.
  * Results from before `fit` began belong to an earlier training, and are left out.
"""

import os
from collections.abc import Sequence
from typing import Any

import keras

from coordinator.addresses import path_text
from coordinator.clock import SYSTEM_CLOCK
from coordinator.evaluation.status_files import EvaluationResult, results
from coordinator.options import check_number


class SidecarMetrics(keras.callbacks.Callback):
    """Passes the results of a sidecar evaluation to Keras callbacks, and adds them to the logs of epochs.

        stop = keras.callbacks.EarlyStopping("loss", patience=5)
        model.fit(source, epochs=100, callbacks=[SidecarMetrics(directory, [stop])])

    The callbacks see each evaluation as an epoch: `patience` counts evaluations, and `monitor` names a metric of the
    evaluator. The logs of `fit`'s epochs have the metrics of the newest result as `sidecar_loss` and so on, and the
    training step of the evaluated checkpoint as `sidecar_step`.

    Args:
      directory: the checkpoint directory that was given to the evaluator.
      callbacks: called with each result as if it were an epoch (`on_epoch_end`), and when training begins and ends.
      prefix: the beginning of the names in the logs.
      poll_interval: seconds between checks for results at the end of a batch. Each end of an epoch checks, too.

    Attributes:
      results: the results of this `fit` that the callbacks have got, oldest first.

    Raises:
      ValueError: a callback keeps the present weights, which are not the evaluated weights.
    """

    _clock = SYSTEM_CLOCK

    def __init__(
        self,
        directory: str | os.PathLike[str],
        callbacks: Sequence[keras.callbacks.Callback] = (),
        prefix: str = "sidecar_",
        poll_interval: float = 1.0,
    ) -> None:
        super().__init__()
        check_number("poll_interval", poll_interval, minimum=0, unit="seconds")
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.ModelCheckpoint) or getattr(
                callback, "restore_best_weights", False
            ):
                raise ValueError(
                    f"{type(callback).__name__} would keep the weights of the moment at which a result arrives, which "
                    "were trained on since. The evaluator keeps those that it has found best: "
                    "SidecarEvaluator(best_dir=...) and coordinator.evaluation.best_result."
                )
        self._directory = path_text(directory)
        self._callbacks = list(callbacks)
        self._prefix = prefix
        self._poll_interval = poll_interval
        self.results: list[EvaluationResult] = []
        self._earlier = 0
        self._polled_at = 0.0

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes the parameters on to the callbacks."""
        super().set_params(params)
        for callback in self._callbacks:
            callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Passes the model on to the callbacks."""
        super().set_model(model)
        for callback in self._callbacks:
            callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Passes the call on to the callbacks, and counts the results of earlier trainings."""
        self.results = []
        self._earlier = len(results(self._directory))
        self._polled_at = self._clock.now()
        for callback in self._callbacks:
            callback.on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """Passes new results to the callbacks, if the poll interval has passed."""
        if self._clock.now() - self._polled_at >= self._poll_interval:
            self._act()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """Passes new results to the callbacks, and adds the newest result to the logs."""
        self._act()
        if self.results and logs is not None:
            newest = self.results[-1]
            logs[f"{self._prefix}step"] = newest.step
            logs.update({f"{self._prefix}{name}": value for name, value in newest.metrics.items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Passes new results, and then the call, on to the callbacks."""
        self._act()
        for callback in self._callbacks:
            callback.on_train_end(logs)

    def _act(self) -> None:
        self._polled_at = self._clock.now()
        for result in results(self._directory)[self._earlier + len(self.results) :]:
            for callback in self._callbacks:
                callback.on_epoch_end(len(self.results), dict(result.metrics))
            self.results.append(result)
