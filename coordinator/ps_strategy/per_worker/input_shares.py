"""Which share of the data each worker reads: what a `tf.distribute.InputContext` tells a dataset function.

the workers of the beginning    share 0 of 2, share 1 of 2
one is added as worker 2        that one: share 2 of 3; the others keep theirs
  with `reshard_inputs`         share 0 of 3, share 1 of 3, share 2 of 3
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class InputShare(NamedTuple):
    """A share of the data.

    Attributes:
      pipelines: into how many shares the data is divided, `num_input_pipelines`.
      number: from 0 on, `input_pipeline_id`.
    """

    pipelines: int
    number: int


class InputShares:
    """The shares of the workers of one strategy.

    Args:
      workers: the indices of the workers of the beginning.
      present: returns those of the present workers, among which the data is divided; None to keep the shares.
    """

    def __init__(self, workers: Sequence[int], present: Callable[[], Sequence[int]] | None = None) -> None:
        beginning = tuple(sorted(workers))
        self._workers = present or (lambda: beginning)

    @property
    def workers(self) -> Sequence[int]:
        """The indices of the workers among which the data is divided, in their order."""
        return self._workers()

    def of(self, worker: int) -> InputShare:
        """Returns the share of a worker. One that is not among them gets its own share, as if it were the last."""
        workers = self._workers()
        if worker in workers:
            return InputShare(len(workers), workers.index(worker))
        number = max(len(workers), worker)
        return InputShare(number + 1, number)
