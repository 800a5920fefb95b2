"""Which TensorFlow a server runs, and whether it is the client's.

A client and servers of different releases can connect and even train, until an operation that one of them knows
otherwise, or not at all, fails in words that do not say why. So each server is asked right after connecting to it.

No request of TensorFlow's tells its release. But every graph that a server writes carries the version of the graph
format that its TensorFlow was built with (`tf.version.GRAPH_DEF_VERSION`), a number that grows from release to release;
so a server is made to write one, of a data set of nothing. Patch releases share their number, and are taken as equal.
"""

import logging

import tensorflow as tf

from coordinator.errors import VersionMismatchError

_logger = logging.getLogger("coordinator")


def check_version(device: str, address: str, *, is_error: bool) -> None:
    """Compares the TensorFlow of a server that we are connected to with ours.

    Args:
      device: the server's name, such as `/job:ps/replica:0/task:0`.
      address: its `host:port`.
      is_error: whether a difference is raised; otherwise it is a warning in the log.

    Raises:
      VersionMismatchError: it is another release.
      tf.errors.UnavailableError: the server is gone.
    """
    difference = difference_of(graph_version(device), tf.version.GRAPH_DEF_VERSION)
    if difference is None:
        return
    message = (
        f"{device} ({address}) runs {difference} than this program, which runs {tf.version.VERSION}. Install the same "
        'TensorFlow on both, or make the strategy with Options(version_mismatch="warn") to try it as it is.'
    )
    if is_error:
        raise VersionMismatchError(message)
    _logger.warning(message)


def graph_version(device: str) -> int | None:
    """The version of the graphs that a server writes; None if its TensorFlow does not do that as ours does.

    Raises:
      tf.errors.UnavailableError: the server is gone.
    """
    zero, one = (tf.constant(number, tf.int64) for number in (0, 1))
    try:
        with tf.device(f"{device}/device:CPU:0"):
            dataset = tf.raw_ops.RangeDataset(
                start=zero, stop=zero, step=one, output_types=[tf.int64], output_shapes=[[]]
            )
            written = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset).numpy()
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return None
    return tf.compat.v1.GraphDef.FromString(written).versions.producer


def difference_of(theirs: int | None, ours: int) -> str | None:
    """What is different between two versions of the graph format, in words; None if nothing is.

    Args:
      theirs: the server's, or None if it has no such version.
      ours: the client's.
    """
    if theirs == ours:
        return None
    if theirs is None:
        return "another TensorFlow, whose graphs cannot be read here,"
    return f"{'an older' if theirs < ours else 'a newer'} TensorFlow (graph version {theirs}, not {ours})"
