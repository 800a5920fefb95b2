"""A program for TensorFlow's names that takes the steps of TensorFlow's tutorial on parameter-server training.

It is written as such programs are: the servers are threads of this process, nothing is closed, and only the import of
two names differs. Its argument is a folder.
"""

import os
import random
import sys
from pathlib import Path

import portpicker
import tensorflow as tf

from coordinator.compat import ClusterCoordinator, ParameterServerStrategy

WORKERS, SERVERS = 3, 2
FEATURES = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
LABELS = ["yes", "no"]
FOLDER = Path(sys.argv[1])


def start_servers():
    """Starts all servers in this process."""
    addresses = [f"localhost:{portpicker.pick_unused_port()}" for _ in range(WORKERS + SERVERS)]
    spec = tf.train.ClusterSpec({"worker": addresses[:WORKERS], "ps": addresses[WORKERS:]})
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=WORKERS + 1)
    for job, count in (("worker", WORKERS), ("ps", SERVERS)):
        for index in range(count):
            tf.distribute.Server(spec, job_name=job, task_index=index, config=config, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


os.environ["GRPC_FAIL_FAST"] = "use_caller"
partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=SERVERS)
strategy = ParameterServerStrategy(start_servers(), variable_partitioner=partitioner)

# model.fit, with the callbacks that need a strategy's support
images, targets = tf.random.uniform((10, 10)), tf.random.uniform((10, 10))
with strategy.scope():
    fitted = tf.keras.Sequential([tf.keras.layers.Input((10,)), tf.keras.layers.Dense(10)])
    fitted.compile(tf.keras.optimizers.SGD(), loss="mse", steps_per_execution=10)
callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir=str(FOLDER / "log")),
    tf.keras.callbacks.ModelCheckpoint(filepath=str(FOLDER / "model.keras")),
    tf.keras.callbacks.BackupAndRestore(backup_dir=str(FOLDER / "backup")),
]
endless = tf.data.Dataset.from_tensor_slices((images, targets)).shuffle(10).repeat().batch(64).prefetch(2)
history = fitted.fit(endless, epochs=3, steps_per_epoch=20, callbacks=callbacks, verbose=2)
losses = history.history["loss"]
assert losses[-1] < losses[0], losses
assert (FOLDER / "model.keras").exists()
print("fit:", len(losses), "epochs,", int(fitted.optimizer.iterations.numpy()), "steps")

# Preprocessing, and the data of a custom loop
with strategy.scope():
    feature_lookup = tf.keras.layers.StringLookup(vocabulary=FEATURES, mask_token=None)
    label_lookup = tf.keras.layers.StringLookup(vocabulary=LABELS, num_oov_indices=0, mask_token=None)
    feature_text = tf.keras.layers.Input(shape=(3,), dtype=tf.string, name="feature")
    feature_stage = tf.keras.Model({"features": feature_text}, feature_lookup(feature_text))
    label_text = tf.keras.layers.Input(shape=(1,), dtype=tf.string, name="label")
    label_stage = tf.keras.Model({"label": label_text}, label_lookup(label_text))


def make_examples(count=200):
    """Returns features, three to an example, and whether the first feature is among them."""
    features = [random.sample(FEATURES, 3) for _ in range(count)]
    return {"features": features, "label": [["yes" if "avenger" in three else "no"] for three in features]}


def preprocess(batch):
    return {"features": feature_stage({"features": batch["features"]})}, label_stage({"label": batch["label"]})


examples = make_examples()


def dataset_fn(context):
    assert context.num_input_pipelines == context.num_replicas_in_sync == 1
    return tf.data.Dataset.from_tensor_slices(examples).shuffle(200).repeat().batch(32).map(preprocess)


# The model, and a step
with strategy.scope():
    ids = tf.keras.layers.Input(shape=(3,), dtype=tf.int64, name="model_input")
    embedding = tf.keras.layers.Embedding(input_dim=len(feature_lookup.get_vocabulary()), output_dim=16384)
    pooled = tf.keras.layers.GlobalAveragePooling1D()(embedding(ids))
    regularizer = tf.keras.regularizers.L2(1e-4)
    output = tf.keras.layers.Dense(1, activation="sigmoid", kernel_regularizer=regularizer)(pooled)
    model = tf.keras.Model({"features": ids}, output)
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.1)
    accuracy = tf.keras.metrics.Accuracy()


@tf.function
def step_fn(iterator):
    def replica_fn(batch, labels):
        with tf.GradientTape() as tape:
            predicted = model(batch, training=True)
            per_example = tf.keras.losses.BinaryCrossentropy(reduction="none")(labels, predicted)
            loss = tf.nn.compute_average_loss(per_example)
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, tf.cast(predicted > 0.5, tf.int64))
        return loss

    batch, labels = next(iterator)
    replica_losses = strategy.run(replica_fn, args=(batch, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, replica_losses, axis=None)


[table] = [each for each in model.trainable_variables if each.shape[0] == len(feature_lookup.get_vocabulary())]
print("parts of the embedding:", len(table.value.variables))

# Dispatching
coordinator = ClusterCoordinator(strategy)
# Libraries look for these classes, and create the coordinator again.
assert isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
assert tf.distribute.coordinator.ClusterCoordinator(strategy) is coordinator


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
# With a rate this high it learns nothing at first, for longer if the workers' steps are more stale.
for epoch in range(8):
    accuracy.reset_state()
    for _ in range(5):
        coordinator.schedule(step_fn, args=(iterator,))
    coordinator.join()
    print(f"epoch {epoch}: accuracy {accuracy.result().numpy():.3f} of {int(accuracy.count.numpy())}")
loss = coordinator.schedule(step_fn, args=(iterator,))
print(f"loss {loss.fetch():.4f}")
while not coordinator.done():
    pass
assert int(optimizer.iterations.numpy()) == 41

# Evaluation on the client
direct = tf.keras.metrics.Accuracy()
for batch, labels in tf.data.Dataset.from_tensor_slices(make_examples(16)).batch(8).map(preprocess):
    direct.update_state(labels, tf.cast(model(batch, training=False) > 0.5, tf.int64))
print(f"direct evaluation: {direct.result().numpy():.3f}")

# Evaluation on the workers
with strategy.scope():
    distributed = tf.keras.metrics.Accuracy()


@tf.function
def eval_step(iterator):
    def replica_fn(batch, labels):
        distributed.update_state(labels, tf.cast(model(batch, training=False) > 0.5, tf.int64))

    batch, labels = next(iterator)
    strategy.run(replica_fn, args=(batch, labels))


def eval_dataset_fn():
    return tf.data.Dataset.from_tensor_slices(make_examples(16)).shuffle(16).repeat().batch(8).map(preprocess)


eval_iterator = iter(coordinator.create_per_worker_dataset(eval_dataset_fn))
for _ in range(2):
    coordinator.schedule(eval_step, args=(eval_iterator,))
coordinator.join()
print(f"distributed evaluation: {distributed.result().numpy():.3f} of {int(distributed.count.numpy())}")

# Checkpoints, a restart from one, and evaluation of one beside training
saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
manager = tf.train.CheckpointManager(saved, str(FOLDER / "checkpoints"), max_to_keep=3)
manager.save()
saved.restore(manager.latest_checkpoint).assert_existing_objects_matched()
for latest in tf.train.checkpoints_iterator(str(FOLDER / "checkpoints"), timeout=0):
    tf.train.Checkpoint(model=model).restore(latest).expect_partial()
    print("evaluated", Path(latest).name)
