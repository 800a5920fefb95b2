"""What the library's update rules need of a strategy, and users do not."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from coordinator.events.event_stream import EventStream
from coordinator.options import Options
from coordinator.ps_strategy.per_worker.variable import worker_number
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.strategy_parts import StrategyParts


@dataclasses.dataclass(frozen=True)
class StrategyServices:
    """What the library's update rules need of a strategy, and users do not: `strategy.extended.services`.

    Attributes:
      worker_index: called inside a scheduled function, returns the index of the worker that runs it.
      connection_number: likewise, returns a number that grows with each connection that the worker has, so that what an
        abandoned call does can be told from the rest.
      unique_numbers: for names on the servers that no other object of this strategy has.
      retrace: has each `tf.function` traced again when it is scheduled next.
      add_idle_callback: see `Cluster.add_idle_callback`.
      refuse_closed: see `ClosureQueue.refuse_stopped`.
      variables: those on the parameter servers, with the tables.
      options: those of the strategy.
      events: what happens, as a stream.
      rules: the update rules that still exist, for the dashboard.
    """

    worker_index: Callable[[], Any]
    connection_number: Callable[[], Any]
    unique_numbers: Iterator[int]
    retrace: Callable[[], None]
    add_idle_callback: Callable[[Callable[[int], object]], None]
    refuse_closed: Callable[[str], None]
    variables: VariableStore
    options: Options
    events: EventStream
    rules: weakref.WeakSet[Any]

    @classmethod
    def of(cls, parts: StrategyParts, options: Options) -> "StrategyServices":
        """Returns those of a strategy with these parts."""
        handles, scheduler = parts.handles, parts.scheduler
        return cls(
            worker_index=worker_number("worker index", handles, lambda context: context.index),
            connection_number=worker_number("connection number", handles, lambda context: context.connection_number),
            unique_numbers=itertools.count(),
            retrace=parts.tracer.reset,
            add_idle_callback=scheduler.cluster.add_idle_callback,
            refuse_closed=scheduler.queue.refuse_stopped,
            variables=parts.variables,
            options=options,
            events=scheduler.queue.events,
            rules=weakref.WeakSet(),
        )
