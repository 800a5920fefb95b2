"""The simulation engine: workers and parameter servers as discrete events in virtual time.

worker       asks ----.                     .--> computes --.                 .--> dispatch, asks
                       latency     latency /                 latency         / latency
servers                 `-> rule: begin? -> pull                `-> rule: push

A step has two events: the worker's request to begin arrives at the servers, and its gradient arrives. Times in between
are computed. If a worker must wait, its begin is a third event, after the servers have served a push that allows this.

Guarantees: the servers see messages in the order of arrival. Rules decide by the functions that the graphs of a real
cluster call. The same seed always gives the same events.
"""

import functools
import math
import time
from collections.abc import Callable

import numpy as np
import simpy

from coordinator.simulation.learning import LearningModel, SimulatedModel
from coordinator.simulation.result import Result
from coordinator.simulation.rules import GRADIENT, MODEL, MODEL_BOTH_WAYS
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_tasks import Death, ReusableEvent, ServerQueues, SimulatedWorker, Timeline

# The maximum number of timelines that fit a picture.
_MOST_TIMELINES = 10


def simulate(setting: Setting, model: SimulatedModel | None = None) -> Result:
    """Simulates a cluster, and returns the result.

    Args:
      setting: the cluster.
      model: an object that computes gradients of any kind, which is trained instead of `setting.learning`.
    """
    return SimulatedCluster(setting, model).run()


class SimulatedCluster:
    """A cluster in virtual time. `run` may be called once."""

    def __init__(self, setting: Setting, model: SimulatedModel | None = None) -> None:
        # Each purpose has its own random stream, so that a change of one setting does not change the other numbers.
        streams = [np.random.default_rng(seed) for seed in np.random.SeedSequence(setting.seed).spawn(5)]
        self._setting = setting
        self._environment = simpy.Environment()
        self._over = self._environment.event()
        if model is None:
            model = LearningModel(setting.learning, streams[3]) if setting.learning else SimulatedModel()
        self._model = model
        self._rule_run = setting.rule.new_run(self._model)
        self._servers = ServerQueues(setting.ps, setting.distribution("service"), streams[0])
        self._dispatch = setting.distribution("dispatch").sampler(streams[4])
        self._latency = setting.distribution("latency").sampler(streams[1])
        # The seconds that a message's bytes take on a worker's link. `_served_...` are the seconds on a server's link.
        self._pull_seconds = setting.model_bytes / setting.bandwidth
        self._push_seconds = setting.pushed_bytes / setting.bandwidth
        self._served_pull_seconds = self._pull_seconds / setting.ps
        self._served_push_seconds = self._push_seconds / setting.ps
        self._workers = self._new_workers(streams[2])
        self._expected = setting.workers
        self._last_push = setting.pushes or float("inf")
        self._gradients = 0
        self._events = 0

    def run(self) -> Result:
        setting, environment = self._setting, self._environment
        for worker in self._workers:
            worker.asking.schedule_in(self._latency())
        for death in setting.deaths:
            self._at(death.at, functools.partial(self._die, death))
        if setting.seconds is not None:
            self._at(setting.seconds, self._end)
        began = time.process_time()
        environment.run(until=self._over)
        processor_seconds = time.process_time() - began
        for worker in self._workers:
            worker.settle(environment.now)
        workers, run = self._workers, self._rule_run
        curve = self._model.curve if isinstance(self._model, LearningModel) else ()
        loss_times, loss_pushes, losses = np.array(curve, dtype=float).reshape(-1, 3).T
        return Result(
            setting=setting,
            seconds=environment.now,
            gradients=self._gradients,
            updates=run.version,
            rejected=run.rejected,
            push_times=np.array(run.push_times),
            push_workers=np.array(run.push_workers, dtype=np.int64),
            staleness=np.array(run.staleness, dtype=np.int64),
            clocks=np.array([worker.clock for worker in workers]),
            computed=np.array([worker.computed for worker in workers]),
            waited=np.array([worker.waited for worker in workers]),
            absent=np.array([worker.absent for worker in workers]),
            queue=self._servers.statistics(environment.now),
            timelines=tuple(worker.timeline for worker in workers if worker.timeline),
            loss_times=loss_times,
            loss_pushes=loss_pushes.astype(np.int64),
            losses=losses,
            events=self._events,
            processor_seconds=processor_seconds,
        )

    def _on_ask(self, event: ReusableEvent) -> None:
        self._events += 1
        worker, now = event.worker, self._environment.now
        if self._rule_run.may_begin(worker):
            version = self._rule_run.version
            worker.transfer = self._rule_run.begin(worker, now)
            self._compute(worker, now, self._rule_run.version - version)
        else:
            worker.asked_at = now
            worker.is_waiting = True
            self._rule_run.add_waiting(worker)

    def _on_begin(self, event: ReusableEvent) -> None:
        self._events += 1
        worker, now = event.worker, self._environment.now
        worker.end_wait(now)
        # Under rules that make workers wait, the begin of a step never updates the model.
        self._compute(worker, now, 0)

    def _compute(self, worker: SimulatedWorker, now: float, updates: int) -> None:
        """Sends a worker the model, after some updates, and schedules the arrival of the worker's gradient."""
        transfer, latency = worker.transfer, self._latency()
        start, updating = now, updates * self._setting.update
        if transfer is MODEL:
            start = self._servers.serve(now, self._served_pull_seconds + updating, now + self._pull_seconds)
        end = worker.compute(start + latency)
        if transfer is MODEL_BOTH_WAYS:
            # The model is sent both ways, and an averaging updates the model.
            busy = 2 * self._served_pull_seconds + updating
            end = max(end, self._servers.serve(now, busy, now + 2 * self._pull_seconds) + latency)
        worker.pushing.schedule_in(end - now + self._latency())

    def _on_push(self, event: ReusableEvent) -> None:
        self._events += 1
        self._gradients += 1
        worker, now, run = event.worker, self._environment.now, self._rule_run
        worker.computed += worker.compute_to - worker.compute_from
        worker.compute_to = worker.compute_from
        version, done = run.version, now
        if run.push(worker, now) is GRADIENT:
            update = self._setting.update if run.version != version else 0.0
            done = self._servers.serve(now, self._served_push_seconds + update, now + self._push_seconds)
        self._model.count_push(now)
        worker.asking.schedule_in(done - now + self._latency() + self._dispatch() + self._latency())
        if run.waiting:
            self._begin_waiting(now)
        if self._gradients >= self._last_push:
            self._end()

    def _begin_waiting(self, now: float) -> None:
        """Begins the steps of waiting workers that may begin, after the home server has served all arrived messages."""
        run, delay = self._rule_run, max(self._servers.home_free_at - now, 0.0)
        while (worker := run.next_ready()) is not None:
            worker.transfer = run.begin(worker, now + delay)
            worker.beginning.schedule_in(delay)

    def _die(self, death: Death) -> None:
        worker, now = self._workers[death.worker], self._environment.now
        if worker.died_at is not None:
            return
        worker.settle(now)
        worker.died_at = now
        self._rule_run.remove_waiting(worker)
        for event in (worker.asking, worker.beginning, worker.pushing):
            event.cancel()
        if death.back_after <= self._setting.detection:
            self._at(death.back_after, lambda: self._return(worker))
            return
        self._at(self._setting.detection, lambda: self._detect_death(worker))
        if math.isfinite(death.back_after):
            self._at(death.back_after, lambda: self._return(worker))
            return
        self._expected -= 1
        if not self._expected:
            self._end()

    def _detect_death(self, worker: SimulatedWorker) -> None:
        """Tells the servers that a worker died, so that they no longer wait for the worker."""
        self._rule_run.forget(worker)
        self._begin_waiting(self._environment.now)

    def _return(self, worker: SimulatedWorker) -> None:
        worker.settle(self._environment.now)
        worker.died_at = None
        self._detect_death(worker)
        self._create_events(worker)
        worker.asking.schedule_in(self._latency())

    def _end(self) -> None:
        if not self._over.triggered:
            self._over.succeed()

    def _at(self, seconds: float, callback: Callable[[], None]) -> None:
        timeout = self._environment.timeout(seconds)
        timeout.callbacks.append(lambda _: callback())

    def _new_workers(self, generator: np.random.Generator) -> list[SimulatedWorker]:
        setting, compute = self._setting, self._setting.compute_of_each
        draw = {each: each.sampler(generator) for each in dict.fromkeys(compute)}
        count = setting.workers
        # The recorded workers are spread over all, and include the last worker, which is a straggler if any worker is.
        recorded = set(np.linspace(0, count - 1, min(count, _MOST_TIMELINES)).round().astype(int).tolist())
        workers = []
        for index, factor in enumerate(setting.factors):
            pauses = [pause for pause in setting.pauses if pause.worker == index]
            timeline = Timeline(index) if index in recorded else None
            worker = SimulatedWorker(index, draw[compute[index]], factor, pauses, timeline)
            self._create_events(worker)
            workers.append(worker)
        return workers

    def _create_events(self, worker: SimulatedWorker) -> None:
        environment = self._environment
        worker.asking = ReusableEvent(environment, self._on_ask, worker)
        worker.beginning = ReusableEvent(environment, self._on_begin, worker)
        worker.pushing = ReusableEvent(environment, self._on_push, worker)
