"""The setting of a simulation, which is checked when it is created."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from coordinator.errors import SettingError
from coordinator.options import check_integer, check_number
from coordinator.simulation.distribution import Distribution, Slowed, distribution_of
from coordinator.simulation.learning import Learning
from coordinator.simulation.rules import Asynchronous, Rule
from coordinator.simulation.simulated_tasks import Death, Pause

# A distribution, or a text or number that `distribution_of` takes.
Times = Distribution | str | float

_MOST_SERVERS = 1_000_000
# Enough pushes for a 99th percentile, in well under a second.
_DEFAULT_PUSHES = 20_000
_DEFAULT_STEPS_PER_WORKER = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster, its rule, and how long it is simulated. Times are in seconds, or texts with a unit such as "50ms".

    A step consists of dispatch, request to the rule, pull of the model, computation, and push of the gradient. Each
    message has a part for each parameter server. Messages take one latency, and are served in the order of arrival.

    Attributes:
      workers, ps: the number of workers and of parameter servers, from 1 to a million.
      rule: the update rule, such as `simulation.BoundedDelay(8)`.
      compute: the time of a step's computation: a distribution, or one for each worker. See `distribution_of`.
      slow_down: maps worker indices to factors of the computation time, above 0.
      stragglers: the share of workers whose computation takes `straggler_factor` times as long, from 0 to 1. The last
        workers are the stragglers.
      straggler_factor: the factor for stragglers, above 0.
      slow_steps: the share of random steps whose computation takes `slow_step_factor` times as long, from 0 to 1.
      slow_step_factor: the factor for slow steps, above 0.
      pauses, deaths: the pauses and deaths of workers.
      detection: the time after a death at which the servers learn of it, and stop waiting for the worker.
      dispatch: the time of the client and the input pipeline between a worker's step and its request for the next one;
        a distribution.
      latency: the one-way latency of a message; a distribution.
      bandwidth: the bandwidth of each server's and each worker's link, in bytes per second. `inf` means no limit.
      model_bytes, gradient_bytes: the size of a pull and of a push, in bytes, for all servers together. By default, a
        gradient is as large as the model.
      service: the time that a message takes on a server, without the time for its bytes; a distribution.
      update: the additional time of an update on each server, for its part of the model, in seconds.
      pushes: the simulation ends when all workers together have computed this many gradients, at least 1.
      seconds: the simulation ends at this time, above 0. If `pushes` is given too, the first limit ends the simulation.
        If both are None, `pushes` is 20,000, or 100 per worker if this is more.
      learning: the problem that is learned, or None if only time is of interest.
      seed: the seed of all random numbers. The same seed gives the same result.

    Raises:
      SettingError: a setting is wrong. A SettingError is a ValueError.
    """

    workers: int = 4
    ps: int = 1
    rule: Rule = dataclasses.field(default_factory=Asynchronous)
    compute: Times | Sequence[Times] = 0.05
    slow_down: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stragglers: float = 0.0
    straggler_factor: float = 4.0
    slow_steps: float = 0.0
    slow_step_factor: float = 10.0
    pauses: Sequence[Pause] = ()
    deaths: Sequence[Death] = ()
    detection: float = 1.0
    dispatch: Times = 0.0
    latency: Times = 0.0
    bandwidth: float = math.inf
    model_bytes: float = 0.0
    gradient_bytes: float | None = None
    service: Times = 0.0
    update: float = 0.0
    pushes: int | None = None
    seconds: float | None = None
    learning: Learning | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        if not isinstance(self.rule, Rule):
            raise SettingError("rule", f"must be a rule such as simulation.Asynchronous(), got {self.rule!r}.")
        for name in ("dispatch", "latency", "service"):
            self._set(name, self.distribution(name))
        compute = self.compute
        if isinstance(compute, str) or not isinstance(compute, Sequence):
            self._set("compute", distribution_of("compute", compute))
        elif len(compute) == self.workers:
            self._set("compute", tuple(distribution_of("compute", each) for each in compute))
        else:
            raise SettingError(
                "compute", f"must be one distribution, or one for each of {self.workers} workers; has {len(compute)}."
            )
        if self.pushes is None and self.seconds is None:
            self._set("pushes", max(_DEFAULT_PUSHES, _DEFAULT_STEPS_PER_WORKER * self.workers))
        named = {"pauses": [each.worker for each in self.pauses], "deaths": [each.worker for each in self.deaths]}
        for name, workers in {"slow_down": list(self.slow_down), **named}.items():
            if wrong := [worker for worker in workers if worker not in range(self.workers)]:
                raise SettingError(name, f"must name workers from 0 to {self.workers - 1}, got {wrong[0]!r}.")
        # If nothing takes time, a simulation of some seconds would never end.
        times = [*(each.mean for each in self.compute_of_each), self.update]
        times += [self.distribution(name).mean for name in ("dispatch", "latency", "service")]
        if self.seconds is not None and not any(times) and self.bandwidth == math.inf:
            raise SettingError("compute", "must be above 0, or something else must take time, for seconds to pass.")

    @property
    def compute_of_each(self) -> tuple[Distribution, ...]:
        """The computation time of each worker, with random slow steps, without the factor of the worker."""
        compute = self.compute
        each_given = (compute,) * self.workers if isinstance(compute, Distribution | str | float) else compute
        given = tuple(distribution_of("compute", each) for each in each_given)
        if not self.slow_steps:
            return given
        slowed = {each: Slowed(each, self.slow_steps, self.slow_step_factor) for each in set(given)}
        return tuple(slowed[each] for each in given)

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each worker's computation."""
        first_straggler = self.workers - round(self.stragglers * self.workers)
        return tuple(
            self.slow_down.get(index, 1.0) * (self.straggler_factor if index >= first_straggler else 1.0)
            for index in range(self.workers)
        )

    def distribution(self, name: str) -> Distribution:
        """Returns the distribution of `dispatch`, `latency` or `service`."""
        return distribution_of(name, getattr(self, name))

    @property
    def pushed_bytes(self) -> float:
        """The size of a gradient, in bytes."""
        return self.model_bytes if self.gradient_bytes is None else self.gradient_bytes

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, minimum in (("workers", 1), ("ps", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), minimum=minimum)
        if (most := max(self.workers, self.ps)) > _MOST_SERVERS:
            name = "workers" if self.workers == most else "ps"
            raise SettingError(name, f"must be at most {_MOST_SERVERS}, got {most}.")
        if self.pushes is not None:
            check_integer("pushes", self.pushes, minimum=1)
        for name in ("stragglers", "slow_steps"):
            check_number(name, getattr(self, name), minimum=0, maximum=1)
        for name in ("straggler_factor", "slow_step_factor", "bandwidth", "seconds"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, maximum=math.inf)
        for name in ("model_bytes", "gradient_bytes", "update", "detection"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum=0)
        if not all(factor > 0 for factor in self.slow_down.values()):
            raise SettingError("slow_down", f"must have factors above 0, got {dict(self.slow_down)!r}.")
