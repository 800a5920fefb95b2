"""The engine: workers and parameter servers as discrete events in virtual time.

worker       asks ----.                     .--> computes --.                 .--> dispatch, asks
                       latency     latency /                 latency         / latency
servers                 `-> rule: begin? -> pull                `-> rule: push

A step is two events: its question arrives at the servers, and its gradient does. Everything between them is arithmetic.
A worker that has to wait is a third: it begins when a push has been served that lets it.

It promises that the servers see messages in the order of their arrival, that whatever a rule decides is decided by the
functions that the cluster's graphs run, and that a seed gives the same course every time.
"""

import functools
import math
import time
from collections.abc import Callable

import numpy as np
import simpy

from coordinator.simulation.absence import Death
from coordinator.simulation.arrival import Arrival
from coordinator.simulation.learning import LearningModel
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.result import Result
from coordinator.simulation.rules.rule import GRADIENT, MODEL, MODEL_BESIDE
from coordinator.simulation.server_queues import ServerQueues
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.simulation.timeline import Lane

# As many as a picture has room for.
_MOST_LANES = 10


def simulate(setting: Setting) -> Result:
    """Simulates a cluster.

    Args:
      setting: what is simulated.

    Returns:
      What was seen.
    """
    return SimulatedCluster(setting).run()


class SimulatedCluster:
    """A cluster in virtual time; it runs once.

    Args:
      setting: what is simulated.
    """

    def __init__(self, setting: Setting) -> None:
        # One stream of random numbers for each purpose: what one setting changes leaves the others' numbers alone.
        streams = [np.random.default_rng(seed) for seed in np.random.SeedSequence(setting.seed).spawn(5)]
        self._setting = setting
        self._environment = simpy.Environment()
        self._over = self._environment.event()
        self._record = PushRecord()
        self._model = LearningModel(setting.learning, streams[3]) if setting.learning else SimulatedModel()
        self._course = setting.rule.course(self._model, self._record)
        self._servers = ServerQueues(setting.ps, setting.message_service, streams[0])
        self._dispatch = setting.dispatch_of_each.drawn(streams[4])
        self._latency = setting.message_latency.drawn(streams[1])
        # What the bytes of a message keep a worker's link busy, and a server's.
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
        """Runs it to its end, and returns what was seen."""
        setting, environment = self._setting, self._environment
        for worker in self._workers:
            worker.asking.due_in(self._latency())
        for death in setting.deaths:
            self._at(death.at, functools.partial(self._die, death))
        if setting.seconds is not None:
            self._at(setting.seconds, self._end)
        began = time.process_time()
        environment.run(until=self._over)
        processor_seconds = time.process_time() - began
        for worker in self._workers:
            worker.settle(environment.now)
        return Result.of(
            setting=setting,
            seconds=environment.now,
            workers=self._workers,
            record=self._record,
            course=self._course,
            servers=self._servers,
            gradients=self._gradients,
            events=self._events,
            processor_seconds=processor_seconds,
            curve=self._model.curve if isinstance(self._model, LearningModel) else (),
        )

    # What happens.

    def _ask(self, arrival: Arrival) -> None:
        """A worker's question, whether it may begin, is there."""
        self._events += 1
        worker, now = arrival.worker, self._environment.now
        if self._course.may_begin(worker):
            version = self._course.version
            worker.moved = self._course.begin(worker, now)
            self._set_to_work(worker, now, self._course.version - version)
        else:
            worker.asked_at = now
            worker.is_waiting = True
            self._course.hold(worker)

    def _begin(self, arrival: Arrival) -> None:
        """A worker that has waited begins."""
        self._events += 1
        worker, now = arrival.worker, self._environment.now
        worker.wait_over(now)
        # Under the rules that make workers wait, none makes an update by beginning.
        self._set_to_work(worker, now, 0)

    def _set_to_work(self, worker: SimulatedWorker, now: float, updates: int) -> None:
        """A worker is sent what it needs, after so many updates, computes, and sends what comes of it."""
        moved, latency = worker.moved, self._latency()
        start, updating = now, updates * self._setting.update
        if moved is MODEL:
            start = self._servers.serve(now, self._served_pull_seconds + updating, now + self._pull_seconds)
        end = worker.compute(start + latency)
        if moved is MODEL_BESIDE:
            # There and back; and what averages changes the model.
            busy = 2 * self._served_pull_seconds + updating
            end = max(end, self._servers.serve(now, busy, now + 2 * self._pull_seconds) + latency)
        worker.pushing.due_in(end - now + self._latency())

    def _push(self, arrival: Arrival) -> None:
        """A worker's gradient is there."""
        self._events += 1
        self._gradients += 1
        worker, now, course = arrival.worker, self._environment.now, self._course
        worker.computed += worker.compute_to - worker.compute_from
        worker.compute_to = worker.compute_from
        version, done = course.version, now
        if course.push(worker, now) is GRADIENT:
            update = self._setting.update if course.version != version else 0.0
            done = self._servers.serve(now, self._served_push_seconds + update, now + self._push_seconds)
        self._model.note_push(now)
        worker.asking.due_in(done - now + self._latency() + self._dispatch() + self._latency())
        if course.lined_up:
            self._release(now)
        if self._gradients >= self._last_push:
            self._end()

    def _release(self, now: float) -> None:
        """Those who may begin now do so when the rule's server has dealt with what has come."""
        course, delay = self._course, max(self._servers.home_free_at - now, 0.0)
        while (worker := course.released()) is not None:
            worker.moved = course.begin(worker, now + delay)
            worker.beginning.due_in(delay)

    def _die(self, death: Death) -> None:
        worker, now = self._workers[death.worker], self._environment.now
        if worker.died_at is not None:
            return
        worker.settle(now)
        worker.died_at = now
        self._course.withdraw(worker)
        for arrival in (worker.asking, worker.beginning, worker.pushing):
            arrival.drop()
        if death.back_after <= self._setting.detection:
            self._at(death.back_after, lambda: self._return(worker))
            return
        self._at(self._setting.detection, lambda: self._tell_of(worker))
        if math.isfinite(death.back_after):
            self._at(death.back_after, lambda: self._return(worker))
            return
        self._expected -= 1
        if not self._expected:
            self._end()

    def _tell_of(self, worker: SimulatedWorker) -> None:
        """The servers are told that a worker died: nobody waits for it any more."""
        self._course.forget(worker)
        self._release(self._environment.now)

    def _return(self, worker: SimulatedWorker) -> None:
        worker.settle(self._environment.now)
        worker.died_at = None
        self._tell_of(worker)
        self._give_events(worker)
        worker.asking.due_in(self._latency())

    def _end(self) -> None:
        if not self._over.triggered:
            self._over.succeed()

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        """Has something happen in so many seconds."""
        timeout = self._environment.timeout(seconds)
        timeout.callbacks.append(lambda _: happens())

    def _new_workers(self, generator: np.random.Generator) -> list[SimulatedWorker]:
        setting, compute = self._setting, self._setting.compute_of_each
        drawn = {each: each.drawn(generator) for each in dict.fromkeys(compute)}
        count = setting.workers
        # Spread over all, the last one included, which is the first to be a straggler.
        laned = set(np.linspace(0, count - 1, min(count, _MOST_LANES)).round().astype(int).tolist())
        workers = []
        for index, factor in enumerate(setting.factors):
            pauses = [pause for pause in setting.pauses if pause.worker == index]
            lane = Lane(index) if index in laned else None
            worker = SimulatedWorker(index, drawn[compute[index]], factor, pauses, lane)
            self._give_events(worker)
            workers.append(worker)
        return workers

    def _give_events(self, worker: SimulatedWorker) -> None:
        environment = self._environment
        worker.asking = Arrival(environment, self._ask, worker)
        worker.beginning = Arrival(environment, self._begin, worker)
        worker.pushing = Arrival(environment, self._push, worker)

    def __repr__(self) -> str:
        return f"<SimulatedCluster: {self._setting.workers} workers, {self._setting.rule}, {self._environment.now:g} s>"
