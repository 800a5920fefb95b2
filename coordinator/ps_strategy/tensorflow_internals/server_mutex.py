"""A mutex on one server, shared by the graphs of all workers and the client."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def operations_added() -> Iterator[list[Any]]:
    """Opens a scope and yields a list, which after the scope holds the operations added to the graph in it."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    operations: list[Any] = []
    yield operations
    operations += graph.get_operations()[before:]


def client_may_call(*signature: tf.TensorSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a method that adds operations to a graph: if the client calls it, it runs as a `tf.function`.

    Args:
      *signature: of the arguments of the client, without `self`.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(method)
        functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        @functools.wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            if not tf.executing_eagerly():
                return method(self, *arguments)
            if self not in functions:
                # For each object its own, with a partial function: of a method that is traced for several objects,
                # TensorFlow warns that it is traced too often. It must not keep the object alive.
                bound = functools.partial(_call_of, method, weakref.ref(self))
                functions[self] = tf.function(bound, input_signature=signature, autograph=False)
            given = parameters.bind(self, *arguments)
            given.apply_defaults()
            return functions[self](*given.args[1:])

        return call

    return decorate


def _call_of(method: Callable[..., Any], reference: Callable[[], Any], *arguments: Any) -> Any:
    return method(reference(), *arguments)


class ServerMutex:
    """A mutex under which operations of one graph at a time run.

    It is a TensorFlow mutex resource, looked up by name at each use, so that it exists on a restarted server too. A
    cancelled call, such as one of a dead worker, releases it. Operations under the mutex should be on its own server:
    otherwise a server that hangs blocks everyone.

    Args:
      name: shared by all users of the mutex. A new client may reuse the names of a client that died.
      device: the server's CPU.
    """

    def __init__(self, name: str, device: str) -> None:
        self._name = name
        self.device = device

    @contextlib.contextmanager
    def hold(self, after: Sequence[Any] = ()) -> Iterator[None]:
        """Opens a scope whose operations run under the mutex and, by default, on its server.

        Args:
          after: tensors and operations; the mutex is acquired once they are available.
        """
        with tf.device(self.device):
            # The inputs of a function cannot be waited for directly: the function may start before they are available.
            awaited = [tf.identity(each) if tf.is_tensor(each) else each for each in after]
            with tf.control_dependencies(awaited):
                lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name=self._name))
            with operations_added() as operations, tf.control_dependencies([lock]):
                yield
            with tf.control_dependencies(operations):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
