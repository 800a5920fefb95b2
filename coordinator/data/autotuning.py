"""Datasets whose iterators can be deleted at once.

TensorFlow tunes a dataset's parallelism on a thread of each iterator, which sleeps for 10 ms after the first attempt,
and twice as long after each further one, up to a minute. To delete the iterator TensorFlow wakes that thread (by a
callback of `CancellationManager::StartCancel`), and only then notes that it is to end. If the thread runs in between,
it sleeps on, and the deletion waits for it: until the iterator is about twice as old, for up to a minute. With
TensorFlow 2.21 that happened to 5 of 50 iterators on two cores, and to nearly all on one.

On a worker the deletion holds a lock meanwhile that each other call of the client needs, and one of the threads that
answer probes: the worker seems to be frozen. On the client it holds Python's lock.
"""

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset, options: tf.data.Options | None = None) -> tf.data.Dataset:
    """Returns a dataset whose iterators have no such thread, unless its options ask for autotuning.

    `tf.data.AUTOTUNE` as a number of parallel calls is then the number of threads, 16 at most; as the size of a buffer
    it grows by itself as before.

    Args:
      dataset: to be iterated.
      options: those of the dataset; None reads them, which TensorFlow can do outside of functions alone.
    """
    known = dataset.options() if options is None else options
    if known.autotune.enabled is not None:
        return dataset
    added = tf.data.Options()
    added.autotune.enabled = False
    return dataset.with_options(added)
