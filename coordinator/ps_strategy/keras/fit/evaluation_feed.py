"""A feed that evaluates shards and adds up what they return."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from coordinator.ps_strategy.keras.evaluation.metric_totals import MetricTotals
from coordinator.ps_strategy.keras.evaluation.shard_functions import NotShardableError, ShardFunctions
from coordinator.ps_strategy.keras.evaluation.shards import ShardCall, Shards, WorkerShards
from coordinator.ps_strategy.keras.fit.feeds import CALLS_PER_WORKER, Feed, worker_count
from coordinator.ps_strategy.keras.fit.steps import ModelSteps

_logger = logging.getLogger("coordinator")


class EvaluationFeed(Feed):
    """Schedules shards, enough of them to keep the workers busy, and adds up the states of their metrics.

    In Keras' loop a turn ends when its batches have been scheduled; the last one, when all shards have finished. The
    logs of a turn are the results of all shards that have finished.

    Args:
      shards: those of the data.
      strategy: the strategy that they are scheduled on.
      in_place: returns the feed for layers, steps and metrics that do not allow shards; None for an error.
    """

    def __init__(self, shards: Shards, strategy: Any, in_place: Callable[[], Feed] | None = None) -> None:
        super().__init__(strategy)
        self.has_own_data = isinstance(shards, WorkerShards)
        self._shards = shards
        self._in_place = in_place
        # What is used instead, if anything.
        self._feed: Feed | None = None
        self._functions: ShardFunctions | None = None
        self._calls: Iterator[ShardCall] = iter(())
        self._coming: ShardCall | None = None
        self._scheduled = 0
        self._totals: MetricTotals | None = None
        # The number of the last shard among those that have finished, and what its last batch has logged.
        self._last_logs: tuple[int, Any] = (-1, {})
        # The number of batches that were scheduled, or were found, and that no turn has had yet.
        self._batches = 0
        self._results: Any = None

    def __next__(self) -> NoReturn:
        """Raises RuntimeError: Keras' loop schedules turns, it asks for no batch."""
        raise RuntimeError("The batches of an evaluation are sent to the workers, and cannot be read here.")

    def evaluate(self, functions: ShardFunctions) -> Any:
        """Evaluates all shards and returns the results of the metrics, as NumPy values.

        Args:
          functions: what is scheduled.

        Raises:
          ValueError: the step or a metric does not allow shards; or there are no data.
          Exception: what a shard raised.
        """
        self._begin(functions)
        try:
            while self.unfinished:
                self.wait_one()
                self._fill()
        finally:
            for future in list(self.unfinished):
                future.cancel()
        if self._totals is None:
            raise ValueError("The data to evaluate are empty.")
        return self._results_so_far(functions)

    def schedule(self, steps: ModelSteps) -> Any:
        """See `Feed`."""
        functions = steps.shards
        if functions is None:
            if self._feed is None:
                self._feed = self._one_by_one()
            return self._feed.schedule(steps)
        if self._functions is None:
            self._begin(functions)
        if self._feed is not None:
            return self._feed.schedule(steps)
        self._fill()
        while self._batches < steps.steps_per_call and self.unfinished:
            self.wait_one()
            self._fill()
        if not self._batches:
            raise StopIteration
        self._batches = max(0, self._batches - steps.steps_per_call)
        is_last = not self._batches and self._coming is None
        while self.unfinished and (is_last or self._totals is None or not self._finished.empty()):
            self.wait_one()
        return self._results_so_far(functions)

    def wait_one(self) -> tuple[Any, int | None]:
        """See `Feed`."""
        result, number = super().wait_one()
        batches = int(result["batches"])
        if not self._shards.are_counted:
            self._batches += batches
        if batches:
            assert self._functions is not None
            assert number is not None
            self._totals = self._totals or MetricTotals(self._functions.metrics())
            self._totals.add(result["state"])
            self._last_logs = max(self._last_logs, (number, result["logs"]), key=lambda each: each[0])
            self._results = None
        return result, number

    def wait_finished(self) -> None:
        """Waits for all shards, and assigns their totals to the metrics, for Keras to read."""
        if self._feed is not None:
            self._feed.wait_finished()
            return
        super().wait_finished()
        totals, self._totals = self._totals, None
        if totals is not None:
            totals.assign()

    def _one_by_one(self) -> Feed:
        """Returns the feed for a model that needs the order of its batches."""
        if self._in_place is None:
            raise ValueError(
                "A layer of the model has stateful=True and needs the batch before each batch, but a source is "
                "evaluated in shards, in any order. Give evaluate arrays, a dataset or a dataset function."
            )
        return self._in_place()

    def _begin(self, functions: ShardFunctions) -> None:
        """Checks that the metrics can be added up, and schedules the first shards.

        Raises:
          ValueError: they cannot, and there is no other feed.
        """
        self._functions = functions
        try:
            if not functions.are_sums and (trial := self._shards.trial(functions)):
                self._try(functions, trial)
            self._calls = self._shards.calls(functions)
            self._coming = next(self._calls, None)
            self._fill()
        except NotShardableError as error:
            if self._in_place is None:
                raise ValueError(f"The evaluation cannot be divided into shards, because {error}.") from None
            if not functions.was_reported:
                functions.was_reported = True
                _logger.warning(
                    "Batches are evaluated one by one, and those of a lost worker may count twice, because %s.", error
                )
            self._feed = self._in_place()

    def _try(self, functions: ShardFunctions, trial: ShardCall) -> None:
        self.add(self._strategy.schedule(trial.function, args=trial.args, worker=trial.worker))
        result, _ = super().wait_one()
        if not int(result["batches"]):
            return
        totals = MetricTotals(functions.metrics())
        functions.are_sums, others = totals.find_sums(*result["state"])
        if others:
            raise NotShardableError(
                f"the state of the metric {others[0]!r} is no sum over batches, and it has no method "
                "merge(state, other)"
            )

    def _fill(self) -> None:
        """Schedules shards until there are enough."""
        most = CALLS_PER_WORKER * worker_count(self._strategy)
        while self._coming is not None and len(self.unfinished) < most:
            call = self._coming
            future = self._strategy.schedule(call.function, args=call.args, worker=call.worker)
            self.add(future, self._scheduled)
            self._scheduled += 1
            if self._shards.are_counted:
                self._batches += call.batches
            self._coming = next(self._calls, None)

    def _results_so_far(self, functions: ShardFunctions) -> Any:
        if self._results is None:
            assert self._totals is not None
            logs = self._last_logs[1]
            # Logs that are not computed from the state of metrics are those of the last batch, as in Keras.
            self._results = (
                {**logs, **functions.logs_of_state(self._totals.state())}
                if logs
                else self._totals.results(functions.results)
            )
        return self._results
