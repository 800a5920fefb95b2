"""A contestant as a program: it runs a round for each line of standard input, and prints a line with the result.

    python -m benchmarks.contestants.program dispatch ours '{"worker": [...], "ps": [...]}'

    out  {"connected": 1.5}                                   once: the seconds that connecting took
    in   {"work": "empty", "seconds": 1.0}
    out  {"figures": {"rate": 1000.0}} or {"error": "..."}    for each line

It ends at once when its input ends.
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from benchmarks.contestants.bare_loop import BareLoop
from benchmarks.contestants.library import Library, LibraryDevices, LibraryGraph, LibraryRuns
from benchmarks.contestants.peer import Peer
from benchmarks.contestants.side import Side
from benchmarks.contestants.single_process import SingleProcess


def _partitioner() -> Any:
    # Tables are divided among two parameter servers, other variables are not.
    return tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)


SIDES: dict[str, Callable[[Any], Side]] = {
    "ours": Library,
    "runs": LibraryRuns,
    "loop": functools.partial(LibraryGraph, is_plain=True),
    "other loop": functools.partial(LibraryGraph, is_plain=False),
    "devices": LibraryDevices,
    "alone": functools.partial(Library, steps_per_dispatch=1),
    "dense": functools.partial(Library, sparse_updates="dense"),
    "sharded": lambda resolver: Library(resolver, _partitioner()),
    "peer": Peer,
    "peer sharded": lambda resolver: Peer(resolver, _partitioner()),
    "bare": BareLoop,
    "hand": BareLoop,
    "single": SingleProcess,
}
# The module and class of each workload, which imports only what it needs.
WORKLOADS = {
    "dispatch": ("closures", "Closures"),
    "first": ("first_result", "FirstResult"),
    "latency": ("latencies", "Latencies"),
    "pauses": ("first_seconds", "FirstSeconds"),
    "recommender": ("recommender_steps", "RecommenderSteps"),
    "dense": ("digits_steps", "DigitsSteps"),
    "layers": ("layers_steps", "LayersSteps"),
    "recurrent": ("recurrent_steps", "RecurrentSteps"),
    "embeddings": ("sparse_updates", "SparseUpdates"),
    "sharded": ("sharded_steps", "ShardedSteps"),
    "data": ("data_steps", "DataSteps"),
    "tables": ("table_steps", "TableSteps"),
}


class Workload(Protocol):
    """What a contestant runs, in rounds. Created with a `Side`, in the contestant's process."""

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """Runs one round of the named function, for about `seconds`, and returns its figures by name."""


def answer(workload: Workload, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one round, and returns its figures or its error."""
    try:
        return {"figures": workload.run(command["work"], command["seconds"])}
    except Exception as error:  # noqa: BLE001 - reported
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def main() -> None:
    """Connects, then runs rounds until the input ends."""
    workload_name, side_name, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # TensorFlow prints to standard output as well: it gets standard error instead.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    side = SIDES[side_name](_resolver(spec))
    print(json.dumps({"connected": time.perf_counter() - began}), file=answers, flush=True)
    workload = None
    for line in sys.stdin:
        if workload is None:
            workload = _workload(workload_name)(side)
        print(json.dumps(answer(workload, json.loads(line))), file=answers, flush=True)
    # A running call would delay an orderly end.
    os._exit(0)


def _resolver(spec: dict[str, list[str]]) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )


def _workload(name: str) -> Callable[[Side], Workload]:
    module, class_name = WORKLOADS[name]
    return getattr(importlib.import_module(f"benchmarks.contestants.{module}"), class_name)


if __name__ == "__main__":
    main()
