"""Tests of what users write in functions: training with Keras, replica contexts, datasets, loops and branches."""

import logging

import keras
import numpy as np
import tensorflow as tf

TIMEOUT = 60.0

RANDOM = np.random.default_rng(7)
FEATURES = RANDOM.normal(size=(256, 4)).astype(np.float32)
LABELS = FEATURES @ np.array([[1.0], [-2.0], [3.0], [0.5]], np.float32) + 0.7


def new_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def dataset_fn(_):
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(256).repeat().batch(16)


def test_several_steps_may_be_in_one_function(strategy):  # row 14
    with strategy.scope():
        model, optimizer = new_model(), keras.optimizers.RMSprop(0.05)
        metric, steps = keras.metrics.MeanSquaredError(), tf.Variable(0)
        optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def update(features, labels):
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = tf.reduce_mean((predictions - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(labels, predictions)

    @tf.function
    def ten_steps(iterator):
        for _ in tf.range(10):
            strategy.run(update, args=next(iterator))
            steps.assign_add(1)

    epochs = []
    for _ in range(3):
        metric.reset_state()
        iterator = iter(dataset)
        for _ in range(4):
            strategy.schedule(ten_steps, args=(iterator,))
        strategy.join(TIMEOUT)
        epochs.append(float(metric.result()))
    assert steps.numpy() == 120
    assert epochs[-1] < epochs[0] / 2


def test_an_optimizers_slots_are_on_the_servers_of_their_variables(strategy):  # row 128
    with strategy.scope():
        model = new_model()
        # The first one creates its slots in the first step.
        optimizers = [keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)]
        optimizers[1].build(model.trainable_variables)

    @tf.function
    def step(features, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features) - labels) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for optimizer in optimizers:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = []
    for count in range(1, 4):
        losses.append(strategy.schedule(step, args=(FEATURES, LABELS)).result(TIMEOUT))
        assert [optimizer.iterations.numpy() for optimizer in optimizers] == [count] * 2
    assert losses[2] < losses[0]
    weights = model.trainable_variables
    for optimizer in optimizers:
        slots = [variable for variable in optimizer.variables if "momentum" in variable.path]
        assert len(slots) == len(weights)
        for slot, weight in zip(slots, weights, strict=True):
            assert slot.value.device == weight.value.device
            assert weight.value.device.startswith("/job:ps/")
            assert np.any(slot.numpy())


def replica_id():
    """Returns the replica's number, which exists only inside of a replica context."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def test_run_outside_of_a_scheduled_function_works_and_warns_each_time(strategy, caplog):  # row 10
    for _ in range(2):
        caplog.clear()
        assert strategy.run(lambda x: x + replica_id(), args=(tf.constant(5),)) == 5
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "strategy.run was called outside of a scheduled function" in record.getMessage()

        caplog.clear()
        assert strategy.schedule(tf.function(lambda: strategy.run(replica_id))).result(TIMEOUT) == 0
        assert not caplog.records
    assert strategy.reduce("SUM", tf.constant([1, 2]), axis=0) == 3
    assert strategy.gather(tf.constant([3]), axis=0).numpy().tolist() == [3]
    for name in ("reduce", "gather"):
        assert f"strategy.{name} was called outside of a scheduled function" in caplog.text


def test_run_reduce_and_gather_work_in_a_scheduled_function(strategy):  # rows 11, 12, 18
    with strategy.scope():
        count, total = tf.Variable(0.0), tf.Variable(0.0)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors([1.0, 3.0]).repeat())

    @tf.function
    def step(iterator):
        def replica(x):
            assert tf.distribute.get_replica_context() is not None
            if replica_id() == 0:
                count.assign_add(1.0)
            return x * 2

        doubled = strategy.run(replica, args=(next(iterator),))
        mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, doubled, axis=0)
        total.assign_add(mean)
        return mean, strategy.reduce("SUM", doubled, axis=None), strategy.gather(doubled, axis=0)

    iterator = iter(dataset)
    futures = [strategy.schedule(step, args=(iterator,)) for _ in range(10)]
    with strategy.scope():
        futures.append(strategy.schedule(step, args=(iterator,)))
    strategy.join(TIMEOUT)
    for mean, summed, gathered in strategy.local_results(futures):
        assert (mean, summed.tolist(), gathered.tolist()) == (4.0, [2.0, 6.0], [2.0, 6.0])
    assert (count.numpy(), total.numpy()) == (11, 44)


def test_variables_that_aggregate_are_updated_by_every_call(strategy):  # rows 100, 102
    with strategy.scope():
        plain = tf.Variable(1.0)
        variables = [
            tf.Variable(1.0, aggregation=tf.VariableAggregation[name]) for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
        ]
    # There is one replica, so no wrapper is needed.
    assert {type(variable) for variable in variables} == {type(plain)}

    @tf.function
    def step():
        def update():
            for variable in variables:
                variable.assign(variable * 2.0)
            return [variable.assign_add(3.0) for variable in variables]

        return strategy.run(update)

    assert [strategy.schedule(step).result(TIMEOUT) for _ in range(2)] == [[5] * 3, [13] * 3]
    strategy.run(lambda: [variable.assign_sub(3.0) for variable in variables])
    assert [variable.numpy() for variable in variables] == [10] * 3


# More calls than it takes until the messages of a function that runs alone are packed.
CALLS = 20
NUMBERS, FACTORS = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0]


def pairs():
    return tf.data.Dataset.from_tensor_slices((NUMBERS, FACTORS))


def elements(dataset):
    """All of the dataset's elements, in one."""
    return next(iter(dataset.batch(100)))


def while_loop(factor, offset):
    return tf.while_loop(lambda number, _: number < offset, lambda number, x: (number + 1.0, x * factor), (0.0, 1.0))


# With 2.0 as the factor and 3.0 as the offset; they are on two parameter servers. All are used in one function.
USES = [
    (lambda a, b: elements(pairs().map(lambda x, y: x * a + b, num_parallel_calls=2)), [5.0, 7.0, 9.0]),
    (lambda a, b: elements(pairs().filter(lambda x, y: x * b > a + 1.0).map(lambda x, y: y)), [20.0, 30.0]),
    (lambda a, b: while_loop(a, b)[1], 8.0),
    (lambda a, b: tf.cond(a > 1.0, lambda: a + b, a.read_value), 5.0),
]


def test_functions_of_datasets_loops_and_branches_read_variables_on_servers(strategy):
    with strategy.scope():
        factor, offset = tf.Variable(2.0), tf.Variable(3.0)
    function = tf.function(lambda: [read(factor, offset) for read, _ in USES], autograph=False)
    futures = [strategy.schedule(function) for _ in range(CALLS)]
    for future in futures:
        for number, (found, (_, expected)) in enumerate(zip(future.result(TIMEOUT), USES, strict=True)):
            np.testing.assert_array_equal(found, expected, str(number))
