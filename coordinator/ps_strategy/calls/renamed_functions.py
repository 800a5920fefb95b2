"""Functions that are given another name after a recovery, because workers may keep outdated instances of them.

A worker prepares each function when it first runs, for the servers that are there, and keeps the prepared instance by
the name of the function. When a parameter server is replaced, TensorFlow makes workers drop all their instances. But
preparing cannot be cancelled:

    call --> worker prepares the function .............................. keeps the instance --> next calls fail
      |                     |                                |
      |       parameter server lost, call cancelled    instances are dropped
      '--> fails on the client                         (server replaced)

An instance that is kept too late is for the former server, and with it every call fails ("RecvTensor expects a
different device incarnation"). So a function of which a call has failed is called by a new name after the recovery.
"""

import concurrent.futures
import threading
from typing import Any

from coordinator.ps_strategy.tensorflow_internals.compilation import under_another_name


class RenamedFunctions:
    """Knows by which function each function is to be called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The captures with which a call failed, which are others after a recovery.
        self._failed: dict[Any, Any] = {}
        self._renamed: dict[Any, concurrent.futures.Future[Any]] = {}

    def record_failure(self, concrete: Any, captures: Any) -> None:
        """Records that a call has failed, so that it is not known whether a worker still prepares the function.

        Args:
          concrete: the function, as it was given to `present`.
          captures: another object after each recovery of a parameter server.
        """
        with self._lock:
            self._failed[concrete] = captures

    def present(self, concrete: Any, captures: Any) -> Any:
        """Returns the function to call: `concrete`, or an equal one under another name, the same for all workers.

        Raises:
          tf.errors.OpError: the servers could not be told of the new function.
        """
        with self._lock:
            failed = self._failed.get(concrete)
            must_rename = failed is not None and failed is not captures
            if must_rename:
                del self._failed[concrete]
                self._renamed[concrete] = concurrent.futures.Future()
            renamed = self._renamed.get(concrete)
        if renamed is None:
            return concrete
        if must_rename:
            try:
                renamed.set_result(under_another_name(concrete))
            except BaseException as error:  # noqa: BLE001 - raised by all that wait for the result
                self.record_failure(concrete, failed)
                renamed.set_exception(error)
        return renamed.result()
