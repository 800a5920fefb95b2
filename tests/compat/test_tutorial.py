"""Whole programs for TensorFlow's names: its tutorial, one that starts again after a loss, one of Keras 2."""

import re
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner

TUTORIAL = Path(__file__).with_name("tutorial.py").read_text(encoding="utf-8")


# `test_programs.py` has its calls one by one.
@pytest.mark.long
@pytest.mark.cluster
def test_the_steps_of_the_tutorial_run_with_servers_in_the_same_process(
    run_program: ProgramRunner, tmp_path: Path
) -> None:
    printed = run_program(TUTORIAL, tmp_path, timeout=240, environment={"TF_USE_LEGACY_KERAS": "0"}).stdout
    assert "fit: 3 epochs, 60 steps" in printed
    assert len(re.findall(r"^epoch \d: accuracy \S+ of 160$", printed, re.MULTILINE)) == 8
    [last] = re.findall(r"^epoch 7: accuracy (\S+)", printed, re.MULTILINE)
    assert float(last) > 0.75
    assert re.search(r"^distributed evaluation: \S+ of 16$", printed, re.MULTILINE)
    assert "evaluated ckpt-1" in printed
    assert "parts of the embedding: 2" in printed


LOSS_OF_A_SERVER = """
import tensorflow as tf

from coordinator.compat import ClusterCoordinator, ParameterServerStrategy
from coordinator.testing import LocalCluster


def train(cluster, attempt):
    strategy = ParameterServerStrategy(cluster.resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = tf.Variable(0)

    @tf.function
    def step():
        count.assign_add(1)

    for _ in range(10):
        coordinator.schedule(step)
    coordinator.join()
    if not attempt:
        cluster.kill("ps", 0)
        value = coordinator.schedule(step)
        try:
            value.fetch()
        except tf.errors.UnavailableError as error:
            print("fetch:", error)
        coordinator.join()
    return strategy, int(count.numpy())


with LocalCluster(workers=2, ps=1) as cluster:
    for attempt in range(3):
        try:
            strategy, count = train(cluster, attempt)
        except tf.errors.UnavailableError as error:
            print("join:", error)
            cluster.restart("ps", 0)
        else:
            print("count:", count)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_a_lost_parameter_server_is_unavailable_and_a_new_strategy_continues(run_program: ProgramRunner) -> None:
    ended = run_program(LOSS_OF_A_SERVER, timeout=240)
    for verb in ("fetch", "join"):
        assert f"{verb}: The parameter server /job:ps/task:0" in ended.stdout
    # The second attempt's strategy is still in use when the third one's is created.
    assert ended.stdout.count("count: 10") == 2
    assert "This process already has a ParameterServerStrategy, which is closed now" in ended.stderr


KERAS_2 = """
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
    printed = run_program(KERAS_2, timeout=240, environment={"TF_USE_LEGACY_KERAS": "1"}).stdout
    steps, calls = map(int, re.findall(r"steps: (\d+) calls: (\d+)", printed)[0])
    assert steps == 20
    # The creation of an iterator on each worker is counted too.
    assert calls >= steps / 5
    exact, here = map(float, re.findall(r"exact: (\S+) here: (\S+)", printed)[0])
    assert exact == pytest.approx(here, rel=1e-5)
    assert "predicted: (40, 1)" in printed
