"""Tests that a program with one worker gives the same results as in one process."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 6)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")
    start = [rng.normal(scale=0.3, size=shape).astype("float32") for shape in ((6, 12), (12,), (12, 2), (2,))]


    def train(strategy, **options):
        with strategy.scope():
            hidden, scaled = keras.layers.Dense(12, "tanh"), keras.layers.BatchNormalization()
            model = keras.Sequential([keras.Input((6,)), hidden, scaled, keras.layers.Dense(2)])
            model.layers[0].set_weights(start[:2])
            model.layers[2].set_weights(start[2:])
            model.compile(
                keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 20, 0.9), clipnorm=1.0),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1)],
                **options,
            )
        history = model.fit(
            x, y, batch_size=32, epochs=4, shuffle=False, validation_split=0.2, class_weight={0: 1.0, 1: 2.0}, verbose=0
        ).history
        values = {name: np.array(value) for name, value in history.items()}
        values["evaluated"] = np.array(model.evaluate(x, y, verbose=0))
        values["predicted"] = model.predict(x, batch_size=7, verbose=0)
        state = [*model.weights, *model.optimizer.variables, *model.metrics_variables]
        # Layers are named by counters that continue from model to model.
        values |= {f"variable {number}": variable.numpy() for number, variable in enumerate(state)}
        return values


    def compare(first, second):
        assert first.keys() == second.keys() and len(first) > 30
        for name, value in first.items():
            np.testing.assert_allclose(second[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


    expected = train(tf.distribute.get_strategy())
    compare(expected, train(tf.distribute.MirroredStrategy(["/cpu:0"])))
    with LocalCluster(workers=1, ps=2) as cluster:
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            compare(expected, train(strategy))
            compare(expected, train(strategy, steps_per_execution=3))
    print("equal")
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(300)
# row 180: like one process
def test_fit_with_one_worker_equals_fit_in_one_process_and_under_mirrored_strategy(run_program: ProgramRunner) -> None:
    assert run_program(PROGRAM, timeout=280).stdout.endswith("equal\n")
