"""A contestant as a program: a line on standard input has it run a round, and a line on standard output tells.

    python -m benchmarks.contestants.program dispatch ours '{"worker": [...], "ps": [...]}'

    out  {"connected": 1.5}                                   once, when it may begin: seconds that connecting took
    in   {"work": "empty", "seconds": 1.0}
    out  {"figures": {"rate": 1000.0}} or {"error": "..."}    for each line

It ends with its input, at once.
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.contestants.bare_loop import BareLoop
from benchmarks.contestants.course import Course
from benchmarks.contestants.library import Library
from benchmarks.contestants.peer import Peer
from benchmarks.contestants.side import Side
from benchmarks.contestants.single_process import SingleProcess

SIDES: dict[str, Callable[[Any], Side]] = {
    "ours": Library,
    "alone": functools.partial(Library, steps_per_dispatch=1),
    "peer": Peer,
    "bare": BareLoop,
    "hand": BareLoop,
    "single": SingleProcess,
}
# Where each course's class is: what one of them imports is loaded for that one alone.
COURSES = {
    "dispatch": ("closures", "Closures"),
    "latency": ("latencies", "Latencies"),
    "recommender": ("recommender_steps", "RecommenderSteps"),
    "dense": ("digits_steps", "DigitsSteps"),
}


def answer(course: Course, order: dict[str, Any]) -> dict[str, Any]:
    """Runs one round; an error is an answer too."""
    try:
        return {"figures": course.run(order["work"], order["seconds"])}
    except Exception as error:  # noqa: BLE001 - told
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def main() -> None:
    """Connects, then runs rounds until there are no more orders."""
    course_name, side_name, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # What TensorFlow prints is not to be among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    side = SIDES[side_name](_resolver(spec))
    print(json.dumps({"connected": time.perf_counter() - began}), file=answers, flush=True)
    course = None
    for line in sys.stdin:
        if course is None:
            course = _course(course_name)(side)
        print(json.dumps(answer(course, json.loads(line))), file=answers, flush=True)
    # A call under way would hold up any orderly end.
    os._exit(0)


def _resolver(spec: dict[str, list[str]]) -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )


def _course(name: str) -> Callable[[Side], Course]:
    module, class_name = COURSES[name]
    return getattr(importlib.import_module(f"benchmarks.contestants.{module}"), class_name)


if __name__ == "__main__":
    main()
