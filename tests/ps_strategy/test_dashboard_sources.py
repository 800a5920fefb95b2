"""The dashboard of a strategy on real servers: what they use, what rules count, what is reported."""

import json
import pathlib
import platform
import urllib.request
from typing import Any

import tensorflow as tf

import coordinator
from coordinator.ps_strategy.dashboard_sources import dashboard_of
from coordinator.simulation.request import calibration
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import scheduler_of


def test_what_the_servers_use_and_the_rules_count_and_the_program_reports_is_shown(
    strategy: coordinator.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        variable = tf.Variable(1.0)
        rule = coordinator.updates.Asynchronous(_subtract, [variable], learning_rate=0.1)

    @tf.function
    def dashboard_step() -> Any:
        with rule.pull() as version:
            gradient = variable * 2.0
        return rule.push([gradient], version)

    for future in [strategy.schedule(dashboard_step) for _ in range(6)]:
        assert future.result()
    strategy.report(dashboard_loss=tf.constant(0.25))
    rules = [rule]
    with dashboard_of("127.0.0.1:0", scheduler_of(strategy), strategy.parameter_servers, rules) as url:
        state: dict[str, Any] = {}

        def is_asked() -> bool:
            # Advice is about the time between two questions, in which something must finish.
            strategy.schedule(_nothing).result()
            state.update(json.load(urllib.request.urlopen(f"{url}api/state", timeout=30)))
            return bool(state["rules"] and state["advice"]) and all(row["receiving"] > 0 for row in state["servers"])

        # What is asked for the second time is not what was read first.
        wait_until(is_asked)
        assert [row["usage"]["task"] for row in state["servers"]] == ["ps 0", "ps 1"]
        for row in state["servers"]:
            # In bytes, seconds and bytes: a server has TensorFlow loaded, and has talked to this process.
            assert 50e6 < row["usage"]["memory"] < 50e9
            assert row["usage"]["cpu"] > 0
            assert row["usage"]["received"] > 1000
            assert 0 < row["usage"]["processors"] <= row["usage"]["machine_processors"]
            assert row["usage"]["machine_cpu"] > row["usage"]["cpu"]
            assert row["usage"]["machine"]
            assert row["usage"]["host"] == platform.node()
        assert state["rules"][0]["name"] == "Asynchronous"
        assert state["rules"][0]["pushes"] == sum(state["rules"][0]["histogram"]) == 6
        assert state["values"]["dashboard_loss"] == 0.25
        assert [row["index"] for row in state["workers"]] == [0, 1, 2]
        target = json.load(urllib.request.urlopen(f"{url}api/target", timeout=30))
        assert target["workers"] == 3
        assert target["text"] == state["advice"]


def test_a_trace_has_how_busy_what_workers_share_was(
    strategy: coordinator.ParameterServerStrategy, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "trace.json"

    def is_counted() -> bool:
        strategy.schedule(_nothing).result()
        return '"the client"' in path.read_text()

    with strategy.trace(path):
        wait_until(is_counted)
    load = calibration(path).load
    assert {"parameter server 0", "parameter server 1", "the client"} <= {each.name for each in load.resources}


def test_a_strategy_has_no_dashboard_unless_it_is_asked_for(strategy: coordinator.ParameterServerStrategy) -> None:
    assert strategy.dashboard_url is None


@tf.function
def _nothing() -> Any:
    return tf.constant(1)


def _subtract(variable: Any, gradient: Any, rate: Any) -> Any:
    return variable.assign_sub(rate * gradient)
