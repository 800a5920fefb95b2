"""What is simulated, checked when it is made."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from coordinator.errors import SettingError
from coordinator.simulation.absence import Death, Pause
from coordinator.simulation.distribution import Distribution, Slowed
from coordinator.simulation.distribution_text import distribution_of
from coordinator.simulation.learning import Learning
from coordinator.simulation.rules.asynchronous import Asynchronous
from coordinator.simulation.rules.rule import Rule

# What stands for a distribution: see `distribution_of`.
Times = Distribution | str | float

# Enough for a p99, in well under a second.
_USUAL_PUSHES = 20_000
_USUAL_STEPS_OF_EACH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster, its rule, and how long it is watched. Times are in seconds; a text such as "50ms" has its own unit.

    A step is: have it dispatched, ask the rule, pull the model, compute, push the gradient. Each message goes to all
    parameter servers at once, to each of them its part, takes one latency, and is served there when those before it
    have been.

    Attributes:
      workers, ps: how many workers and parameter servers, at least 1.
      rule: the update rule, such as `simulation.BoundedDelay(8)`.
      compute: what a worker computes for in a step; a distribution, or one for each worker. See `distribution_of`.
      slow_down: for workers by index, how many times as long as others they compute, above 0.
      stragglers: the share of workers, the last ones, that compute `straggler_factor` times as long; from 0 to 1.
      straggler_factor: above 0.
      slow_steps: the share of all steps, at random, that take `slow_step_factor` times as long; from 0 to 1.
      slow_step_factor: above 0.
      pauses, deaths: when workers stand still or die.
      detection: how long after a death the servers are told, so that nobody waits for the dead any more.
      dispatch: between the end of a worker's step and its question about the next one: the client's part, and the input
        pipeline's; a distribution.
      latency: of a message, one way; a distribution.
      bandwidth: of each server's and each worker's link, in bytes per second; `inf` is no limit.
      model_bytes, gradient_bytes: what is pulled and what is pushed, in bytes, of all servers together; a gradient is
        as large as the model if that is not said.
      service: what a server takes for a message, beside its bytes; a distribution.
      update: what each server takes for an update of its part of the model, in seconds, beside that.
      pushes: it ends when all workers together have computed so many gradients, at least 1.
      seconds: it ends then, above 0. What comes first ends it; if neither is given, 20,000 pushes, or 100 of each
        worker if that is more.
      learning: what is learned; None if only time is of interest.
      seed: of all random numbers; with the same one everything is the same again.

    Raises:
      SettingError: a setting is wrong. It is a ValueError.
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
        self._check_counts()
        self._check_numbers()
        if not isinstance(self.rule, Rule):
            raise SettingError("rule", f"must be a rule such as simulation.Asynchronous(), got {self.rule!r}.")
        self._settle_times()
        if self.pushes is None and self.seconds is None:
            self._become("pushes", max(_USUAL_PUSHES, _USUAL_STEPS_OF_EACH * self.workers))
        self._check_workers_named()
        self._check_progress()

    @property
    def compute_of_each(self) -> tuple[Distribution, ...]:
        """What each worker computes for in a step, random slow steps included, its own factor not."""
        compute = self.compute
        each_given = (compute,) * self.workers if isinstance(compute, Distribution | str | float) else compute
        given = tuple(distribution_of("compute", each) for each in each_given)
        if not self.slow_steps:
            return given
        slowed = {each: Slowed(each, self.slow_steps, self.slow_step_factor) for each in set(given)}
        return tuple(slowed[each] for each in given)

    @property
    def factors(self) -> tuple[float, ...]:
        """How many times as long as others each worker computes."""
        first_straggler = self.workers - round(self.stragglers * self.workers)
        return tuple(
            self.slow_down.get(index, 1.0) * (self.straggler_factor if index >= first_straggler else 1.0)
            for index in range(self.workers)
        )

    @property
    def dispatch_of_each(self) -> Distribution:
        """Between a step's end and the question about the next one."""
        return distribution_of("dispatch", self.dispatch)

    @property
    def message_latency(self) -> Distribution:
        """Of a message, one way."""
        return distribution_of("latency", self.latency)

    @property
    def message_service(self) -> Distribution:
        """What a server takes for a message, beside its bytes."""
        return distribution_of("service", self.service)

    @property
    def pushed_bytes(self) -> float:
        """The size of a gradient, in bytes."""
        return self.model_bytes if self.gradient_bytes is None else self.gradient_bytes

    def _become(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _settle_times(self) -> None:
        for name in ("dispatch", "latency", "service"):
            self._become(name, distribution_of(name, getattr(self, name)))
        compute = self.compute
        if isinstance(compute, str) or not isinstance(compute, Sequence):
            self._become("compute", distribution_of("compute", compute))
            return
        if len(compute) != self.workers:
            raise SettingError(
                "compute", f"must be one distribution, or one for each of {self.workers} workers; has {len(compute)}."
            )
        self._become("compute", tuple(distribution_of("compute", each) for each in compute))

    def _check_counts(self) -> None:
        for name, least in (("workers", 1), ("ps", 1), ("seed", 0), ("pushes", 1)):
            value = getattr(self, name)
            if value is None and name == "pushes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(name, f"must be a whole number of at least {least}, got {value!r}.")

    def _check_numbers(self) -> None:
        for name in ("stragglers", "slow_steps"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(name, f"must be a share from 0 to 1, got {getattr(self, name)!r}.")
        for name in ("straggler_factor", "slow_step_factor", "bandwidth", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(name, f"must be above 0, got {value!r}.")
        for name in ("model_bytes", "gradient_bytes", "update", "detection"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise SettingError(name, f"must be at least 0, got {value!r}.")
        if not all(factor > 0 for factor in self.slow_down.values()):
            raise SettingError("slow_down", f"must have factors above 0, got {dict(self.slow_down)!r}.")

    def _check_workers_named(self) -> None:
        named = {
            "slow_down": self.slow_down,
            "pauses": [pause.worker for pause in self.pauses],
            "deaths": [death.worker for death in self.deaths],
        }
        for name, workers in named.items():
            if wrong := [worker for worker in workers if worker not in range(self.workers)]:
                raise SettingError(name, f"must name workers from 0 to {self.workers - 1}, got {wrong[0]!r}.")

    def _check_progress(self) -> None:
        """Refuses a cluster in which no time would pass: it would never be over."""
        spent = [*(each.mean for each in self.compute_of_each), self.update]
        spent += [self.dispatch_of_each.mean, self.message_latency.mean, self.message_service.mean]
        if self.seconds is not None and not any(spent) and self.bandwidth == math.inf:
            raise SettingError("compute", "must be above 0, or something else must take time, for seconds to pass.")
