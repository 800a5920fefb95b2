"""Tests of an evaluator with a cluster of its own, of which servers are killed while they evaluate."""

import ast
import re
from pathlib import Path

import pytest

from tests.program_runner import COORDINATOR, ProgramRunner

PROGRAM = '''
import json
import os
import pathlib
import sys

import keras
import numpy as np
import psutil
import tensorflow as tf

import coordinator
from coordinator.embeddings import Embedding, Table
from coordinator.evaluation import latest_result, mark_training_finished, mark_training_started
from tests.deadline import wait_until

directory = sys.argv[1]
keys = np.arange(2000) % 500
target = np.sin(keys)


class Total(keras.metrics.Sum):
    def update_state(self, target, outputs, sample_weight=None):
        return super().update_state(outputs)


def build_model():
    """Returns a model with a table, a variable that the strategy divides, and others."""
    inputs = keras.Input((1,), dtype="int64")
    table = Table("table", 2, 1000, keras.optimizers.SGD(1.0))
    rows = keras.layers.Concatenate()([Embedding(table)(inputs), keras.layers.Embedding(500, 2)(inputs)])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.SGD(1.0), "mae", metrics=[Total(name="total")])
    return model


class Kill(keras.callbacks.Callback):
    """Kills servers when the first batches of an evaluation are done; the last time its checkpoint is gone, too."""

    servers = [[], [("ps", 0)], [("worker", 1), ("ps", 0)]]

    def on_test_begin(self, logs=None):
        self.next = self.servers.pop()

    def on_test_batch_end(self, batch, logs=None):
        if self.next:
            job, index = self.next.pop()
            address = json.loads(os.environ["TF_CONFIG"])["cluster"][job][index]
            own = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
            [server] = {each.pid for each in own if each.laddr.port == int(address.rpartition(":")[2])}
            if len(self.servers) == 1:
                for file in pathlib.Path(directory).glob("ckpt-2.*"):
                    file.unlink()
            psutil.Process(server).kill()
            print("killed", job, flush=True)


def train():
    mark_training_started(directory)
    model = build_model()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=model.optimizer), directory, 3)
    for number in (1, 2):
        model.fit(keys[:, None], target, batch_size=100, verbose=0)
        truth = model.evaluate(keys[:, None], target, verbose=0, return_dict=True)
        print("truth", int(model.optimizer.iterations), truth, flush=True)
        path = pathlib.Path(manager.save() + ".index")
        if number == 2:
            wait_until(lambda: not path.exists(), 200)
            manager.save()
        wait_until(lambda: (found := latest_result(directory)) and found.step == 20 * number, 200)
    mark_training_finished(directory)


def evaluate():
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    with coordinator.ParameterServerStrategy(resolver, partitioner) as strategy:
        with strategy.scope():
            model = build_model()
        source = coordinator.data.arrays(keys[:, None], target)
        numbers = []
        evaluator = coordinator.SidecarEvaluator(model, source, directory, batch_size=1, callbacks=[Kill()])
        for result in evaluator.start(300):
            print("result", result.step, result.metrics, flush=True)
            numbers.append(result.number)
        assert numbers == [1, 3]


resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
evaluate() if resolver.task_type == "evaluator" else train()
'''


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(400)
def test_each_example_counts_once_while_servers_of_the_evaluator_are_killed(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    ended = run_program(COORDINATOR, "run", "--evaluator-workers", "2", path, str(tmp_path / "saved"), timeout=360)
    truth, found = (
        {int(step): ast.literal_eval(metrics) for step, metrics in re.findall(rf"{what} (\d+) (.*)", ended.stdout)}
        for what in ("truth", "result")
    )
    assert list(truth) == [20, 40]
    assert found == {step: pytest.approx(metrics, rel=1e-5) for step, metrics in truth.items()}
    assert re.findall(r"killed (\w+)", ended.stdout) == ["ps", "worker", "ps"]
    assert "the evaluator's /job:ps/task:0 ended unexpectedly" in ended.stderr
