"""The synchronous rule: an update is the mean of gradients of one and the same model version."""

from typing import Any

from coordinator.updates import decisions
from coordinator.updates.accumulating import Accumulating
from coordinator.updates.committed_pushes import Arrival


class Synchronous(Accumulating):
    """Applies the mean of `grads_to_wait` gradients of the present model version; rejects gradients of older ones.

    The result is that of one process that applies the mean. Nobody waits: a worker whose gradient came too late, or is
    one too many, repeats its minibatch with the new model; `rule.run` does that. So workers beyond `grads_to_wait` are
    backup workers (Chen et al., arXiv 1604.00981): an update needs the fastest, and one that dies is not missed. A
    worker may also give several gradients to one update.

    What a push returned as False was not counted in, and never will be. (ElasticDL, "Asynchronous SGD": synchronous
    mode.)

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      grads_to_wait: how many gradients make an update, at least 1.

    Raises:
      ValueError: `grads_to_wait` is no whole number of at least 1; and see `UpdateRule`.
    """

    @property
    def may_reject(self) -> bool:
        """True."""
        return True

    def _is_accepted(self, push: Arrival) -> Any:
        return decisions.is_accepted(push.version, push.pulled_version, push.waiting, self._grads_to_wait)
