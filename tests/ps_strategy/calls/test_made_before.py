"""Tests of what a program made before the strategy, and of datasets that stay on the client."""

import pytest
import tensorflow as tf

PROGRAM = """
    import keras
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    x, y = tf.ones([8, 2]), tf.ones([8, 1])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    variable, generator = tf.Variable(1.0), tf.random.Generator.from_seed(1)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), -1.0)
    layer = keras.layers.StringLookup(vocabulary=["a"])
    numbers = tf.data.Dataset.range(3)

    def refused(kind, use):
        try:
            use()
        except kind as error:
            text = str(error)
            assert "made before the strategy" in text and "make it after the strategy" in text, text
            assert text.count("made before the strategy") == 1, text
        else:
            raise AssertionError("It was not refused.")

    with LocalCluster(workers=1, ps=1) as cluster:
        init = tf.errors.InvalidArgumentError.__init__
        with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            of_tensorflow = tf.errors.InvalidArgumentError
            refused(of_tensorflow, lambda: model.fit(data, verbose=0))
            refused(of_tensorflow, lambda: strategy.experimental_distribute_dataset(data))
            refused(of_tensorflow, lambda: coordinator.data.client(numbers))
            refused(of_tensorflow, lambda: tf.data.Dataset.from_tensors("a").map(layer))
            refused(of_tensorflow, lambda: generator.normal([1]))
            refused(of_tensorflow, lambda: variable.numpy())
            refused(of_tensorflow, tf.function(lambda: variable + 1.0))
            refused(ValueError, lambda: strategy.schedule(tf.function(lambda: variable + 1.0)))
            refused(ValueError, lambda: strategy.schedule(tf.function(lambda: table.lookup(tf.constant("a")))))
            refused(ValueError, lambda: strategy.schedule(tf.function(lambda: numbers.reduce(0, lambda a, _: a))))
            assert strategy.schedule(tf.function(lambda x: tf.reduce_sum(x + x)), (x,)).result(60) == 32.0
            assert strategy.schedule(tf.function(lambda: tf.reduce_sum(x))).result(60) == 16.0
        assert tf.errors.InvalidArgumentError.__init__ is init
"""


@pytest.mark.long
@pytest.mark.cluster
def test_what_was_made_before_the_strategy_is_refused_in_a_sentence_or_works(run_program):
    run_program(PROGRAM)


def test_a_function_that_reads_a_dataset_of_the_client_is_refused_when_traced(strategy):
    data = tf.data.Dataset.range(5)

    def in_a_loop():
        found = tf.constant(0, tf.int64)
        for number in data:
            found += number
        return found

    reduced = tf.function(lambda: data.reduce(tf.constant(0, tf.int64), lambda a, b: a + b))
    for read in (tf.function(in_a_loop), reduced, tf.function(lambda: reduced() + 1)):
        with pytest.raises(ValueError, match=r"reads a tf\.data\.Dataset of the client.*distribute_dataset"):
            strategy.schedule(read)
