"""The dashboard of a strategy on real servers: what they use, what rules count, what is reported."""

import json
import pathlib
import platform
import urllib.request
from typing import Any

import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.dashboard_sources import dashboard_of
from coordinator.simulation.request import calibration
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import scheduler_of


@tf.function
def _nothing() -> Any:
    return tf.constant(1)


def _subtract(variable: Any, gradient: Any, rate: Any) -> Any:
    return variable.assign_sub(rate * gradient)


@pytest.mark.long
def test_what_the_servers_use_and_the_rules_count_and_the_program_reports_is_shown(
    strategy: coordinator.ParameterServerStrategy, tmp_path: pathlib.Path
) -> None:
    assert strategy.dashboard_url is None, "it was not asked for"
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
    trace, state = tmp_path / "trace.json", {}
    with (
        strategy.trace(trace),
        dashboard_of("127.0.0.1:0", scheduler_of(strategy), strategy.parameter_servers, [rule]) as url,
    ):

        def is_asked() -> bool:
            # Advice is about the time between two questions, in which something must finish.
            strategy.schedule(_nothing).result()
            state.update(json.load(urllib.request.urlopen(f"{url}api/state", timeout=30)))
            is_shown = state["rules"] and state["advice"] and all(row["receiving"] > 0 for row in state["servers"])
            return bool(is_shown) and '"the client"' in trace.read_text()

        wait_until(is_asked)
        target = json.load(urllib.request.urlopen(f"{url}api/target", timeout=30))
    check_usage([row["usage"] for row in state["servers"]])
    assert state["rules"][0]["name"] == "Asynchronous"
    assert state["rules"][0]["pushes"] == sum(state["rules"][0]["histogram"]) == 6
    assert state["values"]["dashboard_loss"] == 0.25
    assert [row["index"] for row in state["workers"]] == [0, 1]
    assert target["workers"] == 2
    assert target["text"] == state["advice"]
    load = calibration(trace).load
    assert {"parameter server 0", "parameter server 1", "the client"} <= {each.name for each in load.resources}


def check_usage(servers: list[dict[str, Any]]) -> None:
    assert [usage["task"] for usage in servers] == ["ps 0", "ps 1"]
    for usage in servers:
        # In bytes, seconds and bytes: a server has TensorFlow loaded, and has talked to this process.
        assert 50e6 < usage["memory"] < 50e9
        assert usage["machine_cpu"] > usage["cpu"] > 0
        assert usage["received"] > 1000
        assert 0 < usage["processors"] <= usage["machine_processors"]
        assert usage["machine"]
        assert usage["host"] == platform.node()
