"""Workers with two logical CPU devices each train as one device does with twice the batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.devices import fit_program, loop_program
from tests.ps_strategy.devices.client import STEPS

TOLERANCE = 1e-5
DEVICES = ["/device:CPU:0", "/device:CPU:1"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def observed(run_program: ProgramRunner, program: Any, folder: Path, *scenarios: str, workers: int = 1) -> dict:
    """Returns what a program printed about each of some scenarios."""
    ran = run_program(Path(program.__file__).read_text(), folder, workers, *scenarios, timeout=280)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(interpreter, tmp_path_factory) -> dict:
    """Runs the scenarios that take little in one program."""
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))
    scenarios = ("combining", "aggregating", "datasets", "loop", "refused_calls")
    return observed(run_program, loop_program, tmp_path_factory.mktemp("checkpoints"), *scenarios)


def test_each_device_is_a_replica_and_replicas_combine_their_values(seen):
    found = seen["combining"]
    assert found["replicas"] == 2
    assert found["number"] == [1.0, 2.0]
    assert found["summed"] == [3.0, 3.0]
    assert found["rows"] == [[[1.0], [2.0]]] * 2
    assert found["gathered"] == [[1.0, 2.0]] * 2
    assert found["combined"] == [[6.0], [1.5], [[1.0, 1.0, 2.0, 2.0]]]
    assert "the same for all replicas" in found["same for all"]


def test_a_variable_is_changed_by_what_its_aggregation_makes_of_all_replicas(seen):
    found = seen["aggregating"]
    # 1 + (1 + 2) - (10 + 20); the first replica's 3; 1 - (1 + 2) / 2; (1 + 0) / 2.
    assert found["changed"] == [-26.0, 3.0, [-0.5, 1.0], [0.5]]
    assert found["read"] == [-26.0, -26.0]
    assert found["metric"] == [1.5, 2.0]
    assert found["seeds"] == [[7, 0], [7, 1]]


def test_replicas_cannot_change_a_variable_in_a_way_that_has_no_one_meaning(seen):
    found = seen["aggregating"]
    assert "created without an aggregation" in found["refused"]
    assert "call assign of the variable" in found["refused weight"]
    assert "outside of strategy.run" in found["refused rows"]
    assert "not its value plus something" in found["refused metric"]


def test_datasets_have_an_element_for_each_replica(seen):
    found = seen["datasets"]
    assert found["context"] == [2, 3]
    assert found["values"] == [0, 5]
    assert found["function"] == [{"x": [[0, 1, 2], [3, 4, 5]]}, {"x": [[6, 7], []]}]
    assert found["dataset"] == [[[0, 1], [2]], [[3, 4], [5]], [[6], [7]]]


def test_a_loop_on_two_devices_equals_one_device_with_twice_the_batch(seen):
    found = seen["loop"]
    assert found["difference"] < TOLERANCE
    assert found["updates"] == STEPS
    assert found["batches"] == 2 * STEPS
    assert found["devices"] == DEVICES


def test_a_variable_is_read_and_changed_once_for_all_devices(seen):
    found = seen["loop"]
    assert (found["reads"], found["reads in loops and calls"], found["changes"]) == (4, 0, 4)


def test_what_is_done_once_for_a_worker_is_refused_on_each_of_its_devices(seen):
    found = seen["refused_calls"]
    assert "rule.pull() is used once for all devices of a worker" in found["pull"]
    assert "rule.push() is used once for all devices of a worker" in found["push"]
    assert "differs between the replicas" in found["update"]
    assert "was called on the client" in found["eager"]


@pytest.mark.long
def test_rules_take_gradients_that_were_summed_on_the_worker(run_program, tmp_path):
    for name, found in observed(run_program, loop_program, tmp_path, "rules")["rules"].items():
        assert found["difference"] < TOLERANCE, name
        assert found["updates"] == STEPS, name
        assert found["devices"] == DEVICES, name


def test_the_mean_loss_of_keras_2_is_refused_as_by_other_strategies(seen):
    found = seen["refused_calls"]
    assert "Please use `tf.keras.losses.Reduction.SUM`" in found["reduction"]
    assert found["reduction"] == found["reduction of MirroredStrategy"]


@pytest.mark.long
def test_two_workers_with_two_devices_each_equal_one_device(run_program, tmp_path):
    found = observed(run_program, loop_program, tmp_path, "two_workers", workers=2)["two_workers"]
    for name in ("loop", "fit"):
        assert found[name]["difference"] < TOLERANCE, name
        assert found[name]["updates"] == STEPS, name
    # Each device of each worker has had a part of each batch; the loop says which worker runs which step.
    assert found["loop"]["batches"] == 4 * STEPS
    assert found["loop"]["devices"] == DEVICES
    assert len(found["fit"]["clocks"]) == 2
    assert all(found["fit"]["clocks"].values())


@pytest.mark.long
def test_fit_on_two_devices_equals_one_device_whatever_the_data(run_program, tmp_path):
    fits = observed(run_program, fit_program, tmp_path, "fits")["fits"]
    assert len(fits) == 9
    for name, found in fits.items():
        assert found["difference"] < TOLERANCE, name
        assert found["difference of logs"] < TOLERANCE, name
        assert found["difference of validation"] < TOLERANCE, name
        assert found["updates"] == STEPS, name


@pytest.mark.long
def test_loops_on_two_devices_share_one_read_of_each_variable(run_program, tmp_path):
    found = observed(run_program, loop_program, tmp_path, "recurrent")["recurrent"]
    assert found["difference"] < TOLERANCE
    assert found["before"]["reads in loops and calls"] == 2 * 3
    # Those of the LSTM are read in front of the loops of both devices, which read none.
    assert found["reads"] == found["variables read"] == 5
    assert found["loops"] == 2


@pytest.mark.long
def test_models_of_any_kind_are_trained_on_two_devices_or_refused(run_program, tmp_path):
    found = observed(run_program, fit_program, tmp_path, "own_steps", "tables", "optimizers")
    assert max(found["optimizers"].values()) < TOLERANCE
    own = found["own_steps"]
    assert own["own step"] > 0
    assert own["predictions"] == [5, 3]
    assert own["seeds drawn"] == 10
    assert own["moving averages are finite"]
    assert "gradient_accumulation_steps accumulates in each replica" in own["accumulation"]
    one, two = (found["tables"][each] for each in ("on one device", "on two devices"))
    assert two["loss"] == pytest.approx(one["loss"], abs=TOLERANCE)
    assert (one["steps"], one["size"]) == (two["steps"], two["size"]) == (STEPS, 7)


@pytest.mark.long
def test_servers_are_lost_and_a_worker_with_other_devices_takes_no_part(run_program, tmp_path):
    ran = run_program(Path(fit_program.__file__).read_text(), tmp_path, 1, "failures", timeout=280)
    found = json.loads(ran.stdout.splitlines()[-1])["failures"]
    assert found["results"] == [[3] * 20] * 3
    # Those since the checkpoint are lost with the parameter server. What was run again counts again.
    assert found["count"] >= 80
    assert "has 1 CPU device, and the other workers have 2 CPU devices" in ran.stderr


@pytest.mark.long
def test_a_cluster_whose_workers_have_different_devices_is_refused(run_program):
    assert "refused: /job:worker/task:1" in run_program(MIXED).stdout


MIXED = """
import coordinator, tensorflow as tf
from coordinator.testing import LocalCluster

with LocalCluster(workers=1, ps=1, devices_per_worker=2) as cluster:
    spec = {**cluster.spec, "worker": [*cluster.spec["worker"], cluster.start_worker(devices=3)]}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(spec), rpc_layer="grpc")
    try:
        coordinator.ParameterServerStrategy(resolver)
    except coordinator.DeviceMismatchError as error:
        print("refused:", error)
"""
