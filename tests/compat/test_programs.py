"""Programs as users write them for TensorFlow's coordinator: their parts run on the shared cluster."""

import pytest
import tensorflow as tf

# Keras saves models in a way that NumPy has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


EXAMPLES = 60


FEATURES = tf.random.stateless_normal((EXAMPLES, 4), seed=(1, 2)).numpy()


LABELS = (FEATURES.sum(axis=1) > 0).astype("int32")


def dense_model(classes=2):
    return tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(classes)])


def make_dataset(context=None):
    """Takes a context or none, as functions do that serve several strategies."""
    dataset = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))
    if context is not None:
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(EXAMPLES).repeat().batch(context.get_per_replica_batch_size(20))
    return dataset.shuffle(EXAMPLES).repeat().batch(20)


def test_a_step_returns_nothing_and_the_model_predicts_between_epochs(strategy, cluster_coordinator):
    with strategy.scope():
        model, optimizer = dense_model(), tf.keras.optimizers.RMSprop(0.05)

    @tf.function
    def train_step(iterator):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                per_example = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")(
                    labels, logits
                )
                loss = tf.nn.compute_average_loss(per_example, global_batch_size=20)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step_fn, args=(next(iterator),)), axis=None)

    @tf.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(make_dataset)

    iterator = iter(cluster_coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    accuracies = []
    for _ in range(2):
        values = [cluster_coordinator.schedule(train_step, args=(iterator,)) for _ in range(20)]
        cluster_coordinator.join()
        predicted = model.predict(FEATURES, verbose=0).argmax(axis=1)
        accuracies.append((predicted == LABELS).mean())
    assert values[0].fetch() is None
    assert accuracies[-1] > 0.8
    assert int(optimizer.iterations.numpy()) == 40


def test_fit_and_scheduled_functions_take_turns(strategy, cluster_coordinator):
    with strategy.scope():
        model = dense_model(1)
        model.compile(tf.keras.optimizers.SGD(0.01), "mse")
    dataset = cluster_coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(make_dataset)
    )
    history = model.fit(dataset, epochs=2, steps_per_epoch=5, verbose=0)
    assert len(history.history["loss"]) == 2

    @tf.function
    def predict_fn(iterator):
        features, _ = next(iterator)
        return model(features, training=False)

    assert cluster_coordinator.schedule(predict_fn, args=(iter(dataset),)).fetch().shape == (20, 1)
    assert int(model.optimizer.iterations.numpy()) == 10
