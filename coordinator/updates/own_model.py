"""The model that each worker trains by itself and that is averaged with those of the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates.state.local_model import LocalModel
from coordinator.updates.state.server_mutex import Exclusive
from coordinator.updates.transport.model import flat


class OwnModel:
    """A worker's own model, and when it was last brought together with the shared one.

    It is used in scheduled functions. A lock on each worker guards it: a call that was given up, but still runs, never
    changes it while another one does. It is in no checkpoint.

    To be made in the strategy's scope.

    Args:
      model: has the values and changes them.
      lock_name: names the lock on each worker.

    Attributes:
      numbers: the positions of its variables in the shared model.
      version: of the shared model, when this one was averaged or taken from it; a per-worker int64 scalar.
      averaged_at: when that was, on the worker's clock, in seconds; a per-worker float64 scalar.
    """

    def __init__(self, model: LocalModel, lock_name: str) -> None:
        self.numbers = model.numbers
        self.version = _per_worker(tf.int64, "averaged_version")
        self.averaged_at = _per_worker(tf.float64, "averaged_at")
        # 0 on a worker that is new or was restarted.
        self._generation = _per_worker(tf.int64, "generation")
        self._model = model
        self._lock = Exclusive(lock_name, "")

    def is_of(self, generation: Any) -> Any:
        """Whether it is one of this generation, a bool scalar."""
        return tf.equal(generation, self._generation.read_value())

    def read(self) -> list[Any]:
        """The values, in the order of `numbers`."""
        with self._lock.hold():
            return list(self._model.values().values())

    def replace(self, values: Sequence[Any], generation: Any, version: Any, now: Any) -> None:
        """Has these values from now on; everything given is on the worker.

        Args:
          values: in the order of `numbers`.
          generation: that it is of then, an int64 scalar; 0 for none.
          version: of the shared model that they are from, an int64 scalar.
          now: the time, a float64 scalar.
        """
        with self._lock.hold([*values, generation, version, now]):
            self._model.assign(dict(zip(self.numbers, values, strict=True)))
            self._generation.assign(generation, read_value=False)
        self.note_averaged(version, now)

    def note_averaged(self, version: Any, now: Any) -> None:
        """Notes that it is a part of the shared model of this version."""
        self.version.assign(version, read_value=False)
        self.averaged_at.assign(now, read_value=False)

    def train(
        self, gradients: Mapping[int, Any], rate: Any, values: Sequence[Any], averages: Sequence[Any], is_averaged: Any
    ) -> None:
        """Moves it by as much as the mean is away from what was averaged, then has its optimizer apply gradients.

        Args:
          gradients: by the positions of their variables.
          rate: the learning rate, a float32 scalar.
          values: what was averaged.
          averages: the mean.
          is_averaged: whether there is a mean, a bool scalar.
        """
        with self._lock.hold([*flat(gradients, list(gradients)), rate, *values, *averages, is_averaged]):

            def move() -> Any:
                present = self._model.values()
                moved = {
                    # Exact, if nobody else has changed it, as only a call that was given up may have.
                    number: average + (present[number] - value)
                    for number, value, average in zip(self.numbers, values, averages, strict=True)
                }
                self._model.assign(moved)
                return tf.no_op()

            tf.cond(is_averaged, move, tf.no_op)
            if gradients:
                self._model.apply(gradients, rate)

    def __repr__(self) -> str:
        return f"<OwnModel: {self._model!r}>"


def _per_worker(dtype: tf.DType, name: str) -> tf.Variable:
    return tf.Variable(lambda: tf.zeros([], dtype), trainable=False, name=name, per_worker_variable=True)
