"""Imports point one way. Each failure names the file and line of the import that broke the rule.

coordinator (the public names, the command)
 |-- testbed ------------> core, ps_strategy, updates, simulation, testing, launch
 |-- updates ------------> core, ps_strategy
 |-- ps_strategy --------> core, heartbeat (no TensorFlow)
 |-- evaluation ---------> core
 |-- simulation ---------> core, updates.decisions (no TensorFlow)
 |-- testing --> launch -> core, heartbeat, simulation
"""

from collections.abc import Iterable

import pytest

from tests.import_graph import Import, ImportGraph

# The layers that each layer may import. `coordinator` is the package's own `__init__.py` and `__main__.py`.
MAY_IMPORT = {
    "core": set(),
    "heartbeat": set(),
    "ps_strategy": {"core", "heartbeat"},
    "updates": {"core", "ps_strategy"},
    "evaluation": {"core"},
    "simulation": {"core", "updates"},
    "launch": {"core", "heartbeat", "simulation"},
    "testing": {"core", "launch"},
    "testbed": {"core", "ps_strategy", "updates", "simulation", "launch", "testing"},
    "coordinator": {"core", "ps_strategy", "updates", "evaluation", "simulation", "launch", "testing", "testbed"},
}

# Within the core, each of these may import only those before it, and files that are not named here.
CORE_ORDER = (
    "errors",
    "options",
    "future",
    "line",
    "closure",
    "waiting_lines",
    "idle_workers",
    "queue_state",
    "closure_outcomes",
    "closure_queue",
    "idle_watch",
    "recovery",
    "worker",
    "cluster",
)

# What must be installed for the heartbeat, and the only module of it that may import that.
PROBE = "coordinator.heartbeat.task_probe"
PROBE_DISTRIBUTIONS = {"grpcio", "protobuf"}

# What simulations share with the cluster's update rules.
DECISIONS = "coordinator.updates.decisions"

# `tensorflow.core` is not among them: its messages are a format, which outlives the code that reads it.
PRIVATE_TENSORFLOW = (
    "keras.src",
    "tensorflow.__internal__",
    "tensorflow.compiler",
    "tensorflow.keras.__internal__",
    "tensorflow.python",
)
DOORS_TO_PRIVATE_NAMES = {
    "coordinator.ps_strategy.tensorflow_internals",
    "coordinator.ps_strategy.keras_internals",
}


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph()


def refuse(broken: Iterable[Import], rule: str) -> None:
    """Fails with the rule and every import that broke it."""
    lines = [str(found) for found in broken]
    assert not lines, "\n".join([rule, *lines])


def test_every_folder_is_a_layer_with_rules(graph: ImportGraph) -> None:
    assert set(graph.layers) <= set(MAY_IMPORT), "A new folder needs a line in MAY_IMPORT, and a target in BUILD."


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_layers_below_it(graph: ImportGraph, layer: str) -> None:
    edges = graph.layer_edges(layer)
    allowed = MAY_IMPORT[layer]
    refuse(
        (found for target, found in edges.items() if target not in allowed),
        f"{layer} may import {', '.join(sorted(allowed)) or 'no other layer'}.",
    )


def test_no_layer_imports_the_public_names(graph: ImportGraph) -> None:
    refuse(
        (found for found in graph.inner if found.imported == "coordinator" and found.importer != "coordinator"),
        "Inside the package, import from the module that defines a name.",
    )


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_no_two_modules_of_a_layer_import_each_other(graph: ImportGraph, layer: str) -> None:
    assert not (cycle := graph.cycle(layer)), " imports ".join(cycle)


def test_the_core_is_built_in_one_order(graph: ImportGraph) -> None:
    rank = {f"coordinator.{name}": position for position, name in enumerate(CORE_ORDER)}
    refuse(
        (
            found
            for found in graph.inner
            if found.importer in rank and rank.get(found.imported, -1) > rank[found.importer]
        ),
        f"In the core, a module imports only earlier ones of {', '.join(CORE_ORDER)}.",
    )


def test_the_core_and_the_heartbeat_need_nothing_installed_but_grpc_for_the_probe(graph: ImportGraph) -> None:
    refuse(
        (
            found
            for found in graph.outer
            if graph.layer_of(found.importer) in {"core", "heartbeat"}
            and not (found.importer == PROBE and found.distribution in PROBE_DISTRIBUTIONS)
        ),
        "They import no TensorFlow, no NumPy and nothing else that is installed, not even inside a function.",
    )


def test_simulations_take_decisions_alone_from_the_update_rules_and_need_no_tensorflow(graph: ImportGraph) -> None:
    of_simulation = [found for found in graph.imports if graph.layer_of(found.importer) == "simulation"]
    allowed = {"matplotlib", "numpy", "simpy"}
    refuse(
        (
            found
            for found in of_simulation
            if (found.is_within("coordinator.updates") and found.imported != DECISIONS)
            or (found.distribution and not found.is_within("coordinator") and found.distribution not in allowed)
        ),
        f"A simulation imports only {DECISIONS} of the update rules, and of what is installed {', '.join(allowed)}.",
    )


def test_what_update_rules_decide_needs_nothing(graph: ImportGraph) -> None:
    refuse(
        (found for found in graph.imports if found.importer == DECISIONS and found.imported != "typing.Any"),
        "What update rules decide is arithmetic on plain numbers.",
    )


def test_private_names_of_tensorflow_and_keras_have_a_door_each(graph: ImportGraph) -> None:
    refuse(
        (
            found
            for found in graph.outer
            if found.is_within(*PRIVATE_TENSORFLOW)
            and not f"{found.importer}.".startswith(tuple(f"{door}." for door in DOORS_TO_PRIVATE_NAMES))
        ),
        f"Only {' and '.join(sorted(DOORS_TO_PRIVATE_NAMES))} may touch the private parts of TensorFlow and Keras.",
    )


def test_public_names_come_from_every_layer_below(graph: ImportGraph) -> None:
    """Guards the rules above against holding because nothing was found."""
    assert {"core", "ps_strategy", "updates", "evaluation", "testing"} <= set(graph.layer_edges("coordinator"))
