"""The client of one side, as a program: it is told what to do on standard input, and tells there what came of it.

    python -m benchmarks.recovery_client ours '{"spec": {...}, "folder": "...", "mark": "..."}'

    in   feed       lanes schedule steps, one after the other, until `pause`
         pause
         hold       one function is scheduled that does not end on the first worker that runs it
         join       a few steps are scheduled, then everything is joined
    out  one event of `benchmarks.recovery_outcome` as a JSON object in each line

Each lane is a thread that schedules a step and waits for its result, so that a step that never ends holds up one lane.
There are more lanes than workers. The program ends with its input, at once, whatever it was doing.
"""

import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.recovery_side import SIDES, Side

VARIABLES = 100
STEPS_BEFORE_JOIN = 20
LANES_PER_WORKER = 2
# Between two steps of a lane, so that the machine has time for what is measured.
PAUSE = 0.01
# Between an error and the next step of a lane.
PAUSE_AFTER_ERROR = 0.2
# How long the held function would take on its first worker, in seconds; it is killed or frozen at once.
HELD = 600.0


class RecoveryClient:
    """Trains a little on one side, and tells of each step.

    Args:
      side: is made to run the functions.
      folder: for checkpoints; if it has one, training goes on from it.
      mark: a file that does not exist; the held function writes the index of its first worker there.
      tell: is given the fields of each event.
    """

    def __init__(self, side: Side, folder: str, mark: str, tell: Callable[..., None]) -> None:
        self._side = side
        self._tell = tell
        self._feeding = threading.Event()
        self._pause = threading.Event()
        with side.strategy.scope():
            variables = [tf.Variable(tf.zeros([10])) for _ in range(VARIABLES)]
        checkpoint = tf.train.Checkpoint(**{f"variable{index}": variable for index, variable in enumerate(variables)})
        saves = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        if saves.restore_or_initialize() is None:
            saves.save()
        side.restore_from(saves)
        self._step = tf.function(new_step(side, variables))
        self._hold = tf.function(new_hold(side, mark))

    def start(self, lanes: int) -> None:
        """Starts the lanes, which do nothing until `feed`."""
        for _ in range(lanes):
            threading.Thread(target=self._run_lane, daemon=True).start()

    def follow(self, command: str) -> None:
        """Carries out one command; what takes time goes on on another thread.

        Raises:
          ValueError: there is no such command.
        """
        match command:
            case "feed":
                self._feeding.set()
            case "pause":
                self._feeding.clear()
            case "hold":
                threading.Thread(target=self._run_held, args=(self._side.schedule(self._hold),), daemon=True).start()
            case "join":
                threading.Thread(target=self._run_join, daemon=True).start()
            case _:
                raise ValueError(f"There is no command {command!r}.")

    def _run_lane(self) -> None:
        while True:
            self._feeding.wait()
            is_well = self._told("step", lambda: self._side.fetch(self._side.schedule(self._step)))
            self._pause.wait(PAUSE if is_well else PAUSE_AFTER_ERROR)

    def _run_held(self, scheduled: Any) -> None:
        self._told("held", lambda: self._side.fetch(scheduled))

    def _run_join(self) -> None:
        try:
            for _ in range(STEPS_BEFORE_JOIN):
                self._side.schedule(self._step)
            self._side.join()
        except Exception as error:  # noqa: BLE001 - told
            self._tell("raised", error=type(error).__name__)
        else:
            self._tell("joined")

    def _told(self, kind: str, run: Callable[[], Any]) -> bool:
        try:
            began, worker = run()
        except Exception as error:  # noqa: BLE001 - told
            self._tell("raised", error=type(error).__name__)
            return False
        self._tell(kind, began=float(began), worker=int(worker))
        return True


def new_step(side: Side, variables: list[tf.Variable]) -> Callable[[], tuple[tf.Tensor, tf.Tensor]]:
    """A useful step: it adds to every variable, and says when it began and on which worker."""

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        began = tf.timestamp()
        for variable in variables:
            variable.assign_add(tf.ones([10]))
        return began, side.worker_index()

    return step


def new_hold(side: Side, mark: str) -> Callable[[], tuple[tf.Tensor, tf.Tensor]]:
    """A function that goes on for `HELD` seconds unless the mark is there, and leaves the mark when it begins."""

    def hold() -> tuple[tf.Tensor, tf.Tensor]:
        began = tf.timestamp()
        worker = side.worker_index()
        if tf.equal(tf.size(tf.io.matching_files(mark)), 0):
            tf.io.write_file(mark, tf.strings.as_string(worker))
            turns = tf.constant(0)
            while tf.timestamp() < began + HELD:
                turns += 1
        return began, worker

    return hold


class Teller:
    """Writes events to a stream, each with the time, from any thread.

    Args:
      stream: takes a line for each.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def __call__(self, kind: str, **fields: Any) -> None:
        """Writes one event."""
        line = json.dumps({"kind": kind, "at": time.time(), **fields})
        with self._lock:
            print(line, file=self._stream, flush=True)


def main() -> None:
    """Connects, then follows commands until there are no more."""
    side_name, settings = sys.argv[1], json.loads(sys.argv[2])
    # What TensorFlow prints is not to be among the events.
    tell = Teller(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    spec = tf.train.ClusterSpec(settings["spec"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    side = SIDES[side_name](resolver)
    folder = pathlib.Path(settings["folder"])
    client = RecoveryClient(side, str(folder), settings["mark"], tell)
    client.start(LANES_PER_WORKER * len(settings["spec"]["worker"]))
    tell("ready")
    for line in sys.stdin:
        client.follow(line.strip())
    # A call to a server that is gone would hold up any orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
