"""The synchronous rule: an update is the mean of gradients of the same model version."""

from typing import Any

from coordinator.updates import decisions
from coordinator.updates.rules.accumulating import Accumulating


class Synchronous(Accumulating):
    """Applies the mean of `grads_to_wait` gradients of the current model version; rejects gradients of older ones.

    A single process that applies the mean gets the same result, except with `global_clipnorm`, and with `clipnorm` of a
    sharded variable: these clip each gradient before the mean. No worker waits: if a gradient is late, or one too many,
    `rule.run` repeats the minibatch with the new model. Workers beyond `grads_to_wait` are backup workers (Chen et al.,
    arXiv 1604.00981): an update needs only the fastest workers, and a dead worker delays none. A worker may also give
    several gradients to one update. A gradient whose push returned False is in no update. (ElasticDL, "Asynchronous
    SGD": synchronous mode.)

    Args:
      optimizer, variables, embeddings, learning_rate, once, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`.
      grads_to_wait: the number of gradients in an update, at least 1.

    Raises:
      ValueError: `grads_to_wait` is not an integer of at least 1; and see `UpdateRule`.
    """

    def is_accepted(self, worker: Any, pulled_version: Any) -> Any:
        """See `Accumulating`."""
        del worker
        return decisions.is_accepted(self.version.read_value(), pulled_version, self.waiting(), self._grads_to_wait)
