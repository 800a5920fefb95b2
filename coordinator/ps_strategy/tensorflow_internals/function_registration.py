"""When functions are sent to the servers, and taken from them: not while TensorFlow is told which servers there are.

TensorFlow sends every function that is traced to all servers of its list, and refuses the function ("Client for target
... not found") if the list and the connections do not belong together, as for a moment of each change of the cluster.
So a worker that is lost while somebody traces a function, on whatever thread, would make that fail; and a function that
nobody has any more would stay on the servers.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


class FunctionRegistration:
    """Has the registration of functions in this process wait for changes of the cluster, and the other way round.

    Neither waits for longer than `longest_wait`: what holds up the one is no reason to hold up the other for ever. The
    removal of a function, which Python's garbage collection asks for on any thread, never waits: it is put off.

    Args:
      longest_wait: in seconds.
    """

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._turn = threading.Condition()
        self._under_way = 0
        self._changing: int | None = None
        self._put_off: collections.deque[Any] = collections.deque()
        self._context: Any = context.context()
        # Private: every trace, a user's own and a dataset's too, comes by here, and there is no public way to be asked.
        self._register = self._context.add_c_function
        self._context.add_c_function = self._register_in_turn
        # Private: every function that is dropped comes by here, and an error there is printed, as nobody can catch it.
        self._remove = self._context.remove_function
        self._context.remove_function = self._remove_in_turn

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """A scope in which no function is registered, but by the calling thread. One thread at a time may enter."""
        with self._turn:
            self._changing = threading.get_ident()
            self._turn.wait_for(lambda: not self._under_way, self._longest_wait)
        try:
            yield
        finally:
            while not self._is_over():
                self._remove_connected(self._put_off.popleft())

    def close(self) -> None:
        """Leaves TensorFlow as it was before."""
        # What was there is TensorFlow's own, or another's of this class.
        if self._context.__dict__.get("add_c_function") == self._register_in_turn:
            self._context.add_c_function = self._register
            self._context.remove_function = self._remove

    def _register_in_turn(self, function: Any) -> None:
        with self._turn:
            own = (None, threading.get_ident())
            self._turn.wait_for(lambda: self._changing in own, self._longest_wait)
            self._under_way += 1
        try:
            self._register(function)
        finally:
            self._end_one()

    def _is_over(self) -> bool:
        """Ends the change, unless there are functions to be removed first: one of the same name may wait its turn."""
        with self._turn:
            if self._put_off:
                return False
            self._changing = None
            self._turn.notify_all()
            return True

    def _remove_in_turn(self, name: Any) -> None:
        with self._turn:
            if self._changing is not None:
                self._put_off.append(name)
                return
            self._under_way += 1
        try:
            self._remove_connected(name)
        finally:
            self._end_one()

    def _remove_connected(self, name: Any) -> None:
        # After a change that failed there may be servers without a connection: these forget what they had anyway.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            self._remove(name)

    def _end_one(self) -> None:
        with self._turn:
            self._under_way -= 1
            self._turn.notify_all()
