"""The client of one side, as a program: commands on standard input, events on standard output.

    python -m benchmarks.recovery_client ours '{"spec": {...}, "folder": "...", "mark": "..."}'

    in   feed       threads schedule steps, one after the other, until `pause`
         pause
         hold       one function is scheduled that does not end on the first worker that runs it
         join       a few steps are scheduled, then everything is joined
    out  one event of `benchmarks.recovery_outcome` as a JSON object in each line

Each thread schedules a step and waits for its result, so that a step that never ends blocks one thread. There are more
threads than workers. The program ends at once when its input ends.
"""

import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from benchmarks.contestants.library import Library
from benchmarks.contestants.peer import Peer
from benchmarks.contestants.side import Side

VARIABLES = 100
STEPS_BEFORE_JOIN = 20
THREADS_PER_WORKER = 2
# Between two steps of a thread, in seconds, so that the machine has time for what is measured.
PAUSE = 0.01
# Between an error and the next step of a thread, in seconds.
PAUSE_AFTER_ERROR = 0.2
# How long the held function would take on its first worker, in seconds; it is killed or frozen at once.
HELD = 600.0


class RecoverySide(Side, Protocol):
    """A side whose cluster may lose servers."""

    def worker_index(self) -> tf.Tensor:
        """Returns the index of the worker that runs the present function."""

    def join(self) -> None:
        """Waits until every call has finished, or raises what one raised."""

    def restore_from(self, manager: tf.train.CheckpointManager) -> None:
        """Restores what is lost with a parameter server from these checkpoints, where that is possible."""


SIDES: dict[str, Callable[[Any], RecoverySide]] = {"ours": Library, "peer": Peer}


class RecoveryClient:
    """Trains a little on one side, and reports each step.

    Args:
      side: runs the functions.
      folder: for checkpoints; if it has one, training continues from it.
      mark: a file that does not exist; the held function writes the index of its first worker there.
      report: called with the kind and the fields of each event.
    """

    def __init__(self, side: RecoverySide, folder: str, mark: str, report: Callable[..., None]) -> None:
        self._side = side
        self._report = report
        self._feeding = threading.Event()
        self._pause = threading.Event()
        with side.scope():
            variables = [tf.Variable(tf.zeros([10])) for _ in range(VARIABLES)]
        checkpoint = tf.train.Checkpoint(**{f"variable{index}": variable for index, variable in enumerate(variables)})
        saves = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        if saves.restore_or_initialize() is None:
            saves.save()
        side.restore_from(saves)
        self._step = tf.function(new_step(side, variables))
        self._hold = tf.function(new_hold(side, mark))

    def start(self, threads: int) -> None:
        """Starts the threads that schedule steps after `feed`."""
        for _ in range(threads):
            threading.Thread(target=self._run_steps, daemon=True).start()

    def follow(self, command: str) -> None:
        """Carries out one command; what takes time runs on another thread.

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

    def _run_steps(self) -> None:
        while True:
            self._feeding.wait()
            is_done = self._reported("step", self._run_step)
            self._pause.wait(PAUSE if is_done else PAUSE_AFTER_ERROR)

    def _run_step(self) -> Any:
        return self._side.schedule(self._step)()

    def _run_held(self, wait: Callable[[], Any]) -> None:
        self._reported("held", wait)

    def _run_join(self) -> None:
        try:
            for _ in range(STEPS_BEFORE_JOIN):
                self._side.schedule(self._step)
            self._side.join()
        except Exception as error:  # noqa: BLE001 - reported
            self._report("raised", error=type(error).__name__)
        else:
            self._report("joined")

    def _reported(self, kind: str, run: Callable[[], Any]) -> bool:
        try:
            began, worker = run()
        except Exception as error:  # noqa: BLE001 - reported
            self._report("raised", error=type(error).__name__)
            return False
        self._report(kind, began=float(began), worker=int(worker))
        return True


def new_step(side: RecoverySide, variables: list[tf.Variable]) -> Callable[[], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a step that adds to every variable and returns when it began and on which worker."""

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        began = tf.timestamp()
        for variable in variables:
            variable.assign_add(tf.ones([10]))
        return began, side.worker_index()

    return step


def new_hold(side: RecoverySide, mark: str) -> Callable[[], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that writes the mark and runs for `HELD` seconds, unless the mark exists already."""

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


class EventWriter:
    """Writes events to a stream from any thread, each as a line with the time.

    Args:
      stream: a text stream.
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
    """Connects, then carries out commands until the input ends."""
    side_name, settings = sys.argv[1], json.loads(sys.argv[2])
    # TensorFlow prints to standard output as well: it gets standard error instead.
    report = EventWriter(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    spec = tf.train.ClusterSpec(settings["spec"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    side = SIDES[side_name](resolver)
    folder = pathlib.Path(settings["folder"])
    client = RecoveryClient(side, str(folder), settings["mark"], report)
    client.start(THREADS_PER_WORKER * len(settings["spec"]["worker"]))
    report("ready")
    for line in sys.stdin:
        client.follow(line.strip())
    # A call to a lost server would delay an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
