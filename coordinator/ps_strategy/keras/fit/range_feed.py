"""The feed of `fit` for data that are ranges of `coordinator.data.Epochs`."""

from collections.abc import Iterator
from typing import Any

from coordinator.ps_strategy.keras.fit.feeds import Feed
from coordinator.ps_strategy.keras.fit.range_data import RangeData
from coordinator.ps_strategy.keras.fit.steps import ModelSteps


class RangeFeed(Feed):
    """Schedules the steps of one range at each turn. A step reads the examples where it runs.

    Guarantees:
    - An epoch of the loop ends when all ranges of the data's epochs up to this one are done. If a parameter server was
      lost, it does again what was rolled back.
    - A range counts when its steps have finished.

    Args:
      data: prepared for the strategy.
      strategy: the strategy that steps are scheduled on.

    Attributes:
      until: the epoch of the data that the present epoch of the loop ends before; None before the first one.
    """

    def __init__(self, data: RangeData, strategy: Any) -> None:
        super().__init__(strategy)
        self._data = data
        self.until: int | None = None
        self._ranges: Any = None
        self._positions: Any = None

    def turns(self) -> Iterator[int]:
        """Begins the next epoch.

        Yields:
          For each turn, the place of its first batch in the epoch; after a roll back to an earlier epoch 0.

        Raises:
          Exception: what a step raised.
        """
        epochs = self._data.epochs
        self.until = (epochs.epoch if self.until is None else self.until) + 1
        self.close()
        self._ranges = epochs.on(self._strategy, until=self.until)
        for positions in self._ranges:
            self._positions = positions
            yield self._place()

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        function, arguments = steps.of_range(self._data, self._positions)
        self.add(self._strategy.schedule(function, args=arguments))
        return self.wait_room()

    def close(self) -> None:
        """Gives back the range of a turn that was not scheduled."""
        if self._ranges is not None:
            self._ranges.close()

    def _place(self) -> int:
        assert self.until is not None
        data = self._data
        found = data.epochs.statistics()
        ranges = found.done + found.out - 1 - (self.until - 1) * data.ranges_per_epoch
        return max(0, ranges) * data.epochs.settings.batches_per_range
