"""The options of a dataset that is made in a function."""

import tensorflow as tf


def options_in_graph(dataset: tf.data.Dataset) -> tf.data.Options:
    """Returns the options that the function has set, as far as they are known while it is traced."""
    # Private: `Dataset.options()` returns the same here, but warns that the graph may have other options.
    options: tf.data.Options = dataset._options_attr
    return options
