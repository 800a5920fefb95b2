"""When functions are sent to the servers: not while TensorFlow is told which servers there are.

TensorFlow sends every function that is traced to all servers of its list, and refuses the function ("Client for target
... not found") if the list and the connections do not belong together, as for a moment of each change of the cluster.
So a worker that is lost while somebody traces a function, on whatever thread, would make that fail.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context


class FunctionRegistration:
    """Has the registration of functions in this process wait for changes of the cluster, and the other way round.

    Neither waits for longer than `longest_wait`: what holds up the one is no reason to hold up the other for ever.

    Args:
      longest_wait: in seconds.
    """

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._turn = threading.Condition()
        self._registering = 0
        self._changing: int | None = None
        self._context: Any = context.context()
        # Private: every trace, a user's own and a dataset's too, comes by here, and there is no public way to be asked.
        self._register = self._context.add_c_function
        self._context.add_c_function = self._register_in_turn

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """A scope in which no function is registered, but by the calling thread. One thread at a time may enter."""
        with self._turn:
            self._changing = threading.get_ident()
            self._turn.wait_for(lambda: not self._registering, self._longest_wait)
        try:
            yield
        finally:
            with self._turn:
                self._changing = None
                self._turn.notify_all()

    def close(self) -> None:
        """Leaves TensorFlow as it was before."""
        if self._context.__dict__.get("add_c_function") == self._register_in_turn:
            # What was there is TensorFlow's own, or another's of this class.
            self._context.add_c_function = self._register

    def _register_in_turn(self, function: Any) -> None:
        with self._turn:
            own = (None, threading.get_ident())
            self._turn.wait_for(lambda: self._changing in own, self._longest_wait)
            self._registering += 1
        try:
            self._register(function)
        finally:
            with self._turn:
                self._registering -= 1
                self._turn.notify_all()
