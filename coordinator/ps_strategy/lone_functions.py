"""Functions that must not run several times in one call, and how such a one is told from others.

A function that waits for what another worker does would keep that waiting for itself: those behind it in the same call
can run nowhere else meanwhile. It is known by an operation that does nothing, wherever in it that is: in a branch, in a
loop, in a function that it calls and that was traced before.
"""

from typing import Any

import tensorflow as tf

_NAME = "coordinator_runs_alone"


def mark_as_lone() -> None:
    """To be called while a function is traced: it is to be run alone, and so is every function that calls it."""
    tf.no_op(name=_NAME)


def is_lone(concrete: Any) -> bool:
    """Whether a concrete function is marked."""
    graph = concrete.graph.as_graph_def()
    inner = (node for function in graph.library.function for node in function.node_def)
    return any(_NAME in node.name for nodes in (graph.node, inner) for node in nodes)
