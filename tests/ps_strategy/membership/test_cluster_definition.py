"""Tests of which descriptions of a cluster are accepted, and of the messages about the others."""

import json

import pytest
import tensorflow as tf

import coordinator
from coordinator.errors import ClusterSpecError
from coordinator.ps_strategy.membership.cluster_definition import (
    MAX_WORKERS,
    ClusterDefinition,
    PolledClusterResolver,
    Task,
    client_server_def,
    server_def,
)

SPEC = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}


def simple_resolver(jobs, task_type="chief", task_id=0):
    return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(jobs), "", task_type, task_id)


def define(jobs, *own_task):
    return ClusterDefinition.from_resolver(simple_resolver(jobs, *own_task))


def refusal(jobs, *own_task):
    with pytest.raises(ClusterSpecError) as caught:
        define(jobs, *own_task)
    return str(caught.value)


def test_a_resolver_and_tf_config_are_read(monkeypatch):
    definition = define({**SPEC, "chief": ["c:1"]})
    assert definition.addresses == {Task("worker", 0): "w0:1", Task("worker", 1): "w1:1", Task("ps", 0): "p0:1"}
    assert (definition.client_address, definition.protocol) == ("c:1", "grpc")
    config = {"cluster": {**SPEC, "chief": ["c:1"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert ClusterDefinition.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver()) == definition
    for config in ("{not json", '{"cluster": {"worker": 3}}'):
        monkeypatch.setenv("TF_CONFIG", config)
        with pytest.raises(ClusterSpecError, match="must be JSON like"):
            ClusterDefinition.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())


def test_the_client_need_not_be_listed_and_task_numbers_may_have_gaps():
    assert define(SPEC, "", None).client_address is None
    assert define(SPEC, None, None) == define(SPEC)
    definition = define({"worker": {3: "w3:1", 1: "w1:1"}, "ps": {0: "p0:1"}})
    assert definition.tasks("worker") == (Task("worker", 1), Task("worker", 3))


def test_an_evaluator_is_left_out_or_the_client_of_a_cluster_of_its_own():  # row 133
    assert define({**SPEC, "evaluator": ["e:1"]}) == define(SPEC)
    own = define({**SPEC, "evaluator": ["e:1"]}, "evaluator", 0)
    assert (own.client_address, own.addresses) == ("e:1", define(SPEC).addresses)
    assert "is task 1 of the job 'evaluator'; the client is task 0" in refusal(
        {**SPEC, "evaluator": ["e:1", "f:1"]}, "evaluator", 1
    )
    assert "--evaluator-workers" in refusal({**SPEC, "chief": ["c:1"], "evaluator": ["e:1"]}, "evaluator", 0)


def test_an_unusable_cluster_is_refused_with_a_clear_message():  # row 133
    for jobs, words in (
        ({}, "is empty. Set TF_CONFIG"),
        ({"worker": ["w:1"]}, "no task in the job 'ps', which holds the variables"),
        ({"worker": [], "ps": ["p:1"]}, "no task in the job 'worker', which runs the steps"),
        ({**SPEC, "master": ["m:1"]}, "names the job 'master'; only 'chief', 'worker', 'ps' and 'evaluator'"),
        ({**SPEC, "chief": ["a:1", "b:1"]}, "names 2 'chief' tasks; there is one client"),
        ({**SPEC, "ps": ["p0:1", "w1:1"]}, "have the same address w1:1"),
    ):
        assert words in refusal(jobs)


def test_an_invalid_address_is_refused():  # row 133
    for address in ("host", "host:", ":80", "host:port", "host:0", "host:65536", ""):
        message = refusal({"worker": ["w:1", address], "ps": ["p:1"]})
        assert "/job:worker/task:1" in message, address
        assert "'host:port'" in message, address


def test_a_process_that_is_not_the_client_is_refused():  # row 133
    for own_task, words in (
        (("worker", 0), "this task's type is 'worker'. Run `coordinator serve`"),
        (("evaluator", 0), "this task's type is 'evaluator'. Use coordinator.SidecarEvaluator there without"),
        (("coordinator", 0), "Set the task's type to 'chief'"),
        (("chief", 1), "the client is task 0"),
    ):
        assert words in refusal(SPEC, *own_task)


def test_wrong_arguments_are_refused_before_connecting():
    for resolver in (None, SPEC, "localhost:1", tf.train.ClusterSpec(SPEC)):
        with pytest.raises(TypeError, match=r"TFConfigClusterResolver\(\)"):
            coordinator.ParameterServerStrategy(resolver)
    with pytest.raises(TypeError, match=r"must be a coordinator\.Options"):
        coordinator.ParameterServerStrategy(simple_resolver(SPEC), options={"probe_timeout": 1})
    with pytest.raises(TypeError, match="variable_partitioner must be one of"):
        coordinator.ParameterServerStrategy(simple_resolver(SPEC), variable_partitioner=2)
    with pytest.raises(ClusterSpecError, match="/job:worker/task:1024 is one too many: a cluster has at most 1024"):
        coordinator.ParameterServerStrategy(simple_resolver({**SPEC, "worker": {0: "w0:1", 1024: "w1:1"}}))
    assert define({**SPEC, "worker": {0: "w0:1", 1023: "w1:1"}}).tasks("worker")[-1] == Task("worker", 1023)


def test_a_server_definition_has_the_given_tasks_and_workers_do_not_see_each_other():
    definition = server_def("grpc", "c:1", {Task("worker", 2): "w2:1", Task("ps", 0): "p0:1"})
    jobs = {job.name: dict(job.tasks) for job in definition.cluster.job}
    assert jobs == {"chief": {0: "c:1"}, "ps": {0: "p0:1"}, "worker": {2: "w2:1"}}
    assert (definition.job_name, definition.task_index, definition.protocol) == ("chief", 0, "grpc")
    filters = client_server_def("grpc", "c:1").cluster_device_filters
    expected = {"worker": ["/job:ps", "/job:chief"], "ps": ["/job:worker", "/job:chief"]}
    for index in (0, MAX_WORKERS - 1):
        assert {job.name: list(job.tasks[index].device_filters) for job in filters.jobs} == expected


def test_a_polled_file_is_read_each_time_and_named_if_that_fails(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(SPEC))
    resolver = PolledClusterResolver(path)
    assert resolver.cluster_spec().as_dict() == SPEC
    path.write_text(json.dumps({**SPEC, "worker": ["w0:1"]}))
    assert resolver.worker_addresses() == ["w0:1"]
    for break_it in (lambda: path.write_text("{not json"), path.unlink):
        break_it()
        with pytest.raises(ClusterSpecError, match=r"cannot be read from .*cluster\.json"):
            PolledClusterResolver(path).cluster_spec()


def test_a_polled_description_that_is_not_valid_raises():
    for later, words in (
        ({"ps": ["p0:1"]}, "no longer has a 'worker'"),
        ({"worker": ["w0:1"], "ps": ["p1:1"]}, "they hold the variables and cannot change"),
        ([], "A cluster is a dict of addresses by job"),
    ):
        resolver = PolledClusterResolver([later, SPEC].pop)
        resolver.worker_addresses()
        with pytest.raises(ClusterSpecError, match=words):
            resolver.worker_addresses()
    with pytest.raises(TypeError, match="a function or the path of a JSON file"):
        PolledClusterResolver(3)
    with pytest.raises(ValueError, match="interval must be a positive number of seconds"):
        PolledClusterResolver(dict, interval=0)
