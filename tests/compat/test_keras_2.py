"""`fit` and exact evaluation of Keras 2 (the package tf_keras) run on the workers with `coordinator.compat`."""

import re

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
import tensorflow as tf

from coordinator.compat import ParameterServerStrategy
from coordinator.testing import LocalCluster


def dataset_fn(context):
    x, y = tf.random.uniform((10, 4)), tf.random.uniform((10, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(context.get_per_replica_batch_size(64))


with LocalCluster(workers=2, ps=1) as cluster:
    strategy = ParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("adam", "mse", steps_per_execution=5, pss_evaluation_shards="auto")
    creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
    model.fit(creator, epochs=2, steps_per_epoch=10, verbose=2)
    finished = strategy.cluster.statistics().finished
    print("steps:", int(model.optimizer.iterations), "calls:", finished)

    x, y = tf.random.uniform((40, 4)), tf.random.uniform((40, 1))
    loss = model.evaluate(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), verbose=0)
    print("exact:", float(loss), "here:", float(tf.reduce_mean((model(x) - y) ** 2)))
    print("predicted:", model.predict(x, verbose=0).shape)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_fit_and_evaluate_of_keras_2_schedule_their_steps(run_program: ProgramRunner) -> None:
    printed = run_program(PROGRAM, timeout=240, environment={"TF_USE_LEGACY_KERAS": "1"}).stdout
    steps, calls = map(int, re.findall(r"steps: (\d+) calls: (\d+)", printed)[0])
    assert steps == 20
    # The creation of an iterator on each worker is counted too.
    assert calls >= steps / 5
    exact, here = map(float, re.findall(r"exact: (\S+) here: (\S+)", printed)[0])
    assert exact == pytest.approx(here, rel=1e-5)
    assert "predicted: (40, 1)" in printed
