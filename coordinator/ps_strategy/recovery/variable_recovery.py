"""Brings lost parameter servers back: connects to them, makes their variables again, restores the latest checkpoint.

    reconnect --> renew every variable --> restore --> initialize what the checkpoint does not hold --> RolledBack
        |                 |                   |                         |
        '-----------------'-- a server is away, or saving is under way -'--> None: to be tried again

Promises: `recover` brings all variables of all parameter servers to what the checkpoint holds, or says that it must be
called again; what was traced before stays usable; no checkpoint is made of variables that are half restored.
"""

import logging
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.failure_table import UNREACHED
from coordinator.ps_strategy.recovery.checkpoint_restore import RestoreSource
from coordinator.ps_strategy.recovery.checkpoint_save import GuardedSave
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.saved_progress import SavedProgress
from coordinator.ps_strategy.tensorflow_runtime import TensorFlowRuntime
from coordinator.rolled_back import RolledBack

_logger = logging.getLogger("coordinator")

Step = Any  # An integer variable, of TensorFlow or Keras, or a function that returns an int.


class ParameterServerRecovery:
    """Recovers the parameter servers of one runtime.

    Args:
      runtime: connects to them.
      variables: those on the parameter servers.
      finished: how many scheduled functions have finished so far.
      wait_recovered: waits until the parameter servers are recovered, or for so many seconds (None: as long as it
        makes sense); returns whether they are. It is called on threads that save a checkpoint.
    """

    def __init__(
        self,
        runtime: TensorFlowRuntime,
        variables: VariableStore,
        finished: Callable[[], int],
        wait_recovered: Callable[[float | None], bool],
    ) -> None:
        self._runtime = runtime
        self._variables = variables
        self._progress = SavedProgress(finished)
        self._wait_recovered = wait_recovered
        self._source: RestoreSource | None = None
        self._step: Step | None = None
        self._on_rollback: Callable[[RolledBack], object] | None = None
        self._save: GuardedSave | None = None
        # Held while a checkpoint is saved, and while an attempt to recover is made. Nobody who holds it takes another.
        self._variables_in_use = Lock()
        # What the attempts since the last success have found.
        self._lost: set[str] = set()
        self._began: float | None = None
        self._is_half_restored = False

    def restore_from(
        self, source: Any, step: Step | None = None, on_rollback: Callable[[RolledBack], object] | None = None
    ) -> None:
        """Sets what is restored, and who is told; see `ParameterServerStrategy.restore_from`.

        Raises:
          TypeError: `source`, `step` or `on_rollback` is nothing that serves.
          ValueError: the manager's checkpoint is an asynchronous one.
        """
        found = RestoreSource(source)
        _check(step)
        if on_rollback is not None and not callable(on_rollback):
            raise TypeError(f"on_rollback must be a function that takes a RolledBack, got {on_rollback!r}.")
        self._on_rollback = on_rollback
        self.release_manager()
        self._save = None if found.manager is None else GuardedSave(found.manager, self._progress, self)
        self._source, self._step = found, step

    def release_manager(self) -> None:
        """Gives the checkpoint manager, if there is one, its own `save` back."""
        if self._save is not None:
            self._save.release()

    def hold_off(self) -> Lock:
        """A scope in which no recovery begins; entering it waits for the end of an attempt that is under way."""
        return self._variables_in_use

    def missing(self) -> ParameterServerLost | None:
        """The error that names a parameter server whose variables are gone or half restored, if there is one."""
        lost = self._runtime.lost_parameter_server()
        if lost is None and self._is_half_restored:
            name = min(self._lost)
            return ParameterServerLost(name, f"The parameter server {name} is back, but not yet all variables.")
        return lost

    def wait_recovered(self, timeout: float | None) -> bool:
        """Waits until nothing is missing; False if that is not to be expected any more."""
        return self._wait_recovered(timeout) and not self._is_half_restored

    def try_once(self) -> bool:
        """Makes one attempt, and tells what it cost; whether all variables are there. Raises what `recover` does."""
        rolled_back = self.recover()
        if rolled_back is None and self.missing() is not None:
            return False
        self._runtime.reach_parameter_servers()
        if rolled_back is None:
            return self.missing() is None
        _logger.warning("%s", rolled_back)
        if self._on_rollback is not None:
            try:
                self._on_rollback(rolled_back)
            except Exception:
                _logger.exception("on_rollback raised; training goes on all the same.")
        return True

    def recover(self) -> RolledBack | None:
        """Makes one attempt; to be called on a thread without an executor of its own, while no function runs.

        Returns:
          What was lost, or None. Then it must be tried again, unless `missing` is None too: a parameter server does not
          answer or was lost once more, or a checkpoint is being saved, which will fail soon.

        Raises:
          RuntimeError: `restore_from` was not called.
          Exception: no checkpoint can be restored, although all parameter servers answer; or what a function of the
            user's raised.
        """
        if self._source is None:
            raise RuntimeError("There is nothing to restore from: call restore_from first.")
        if not self._variables_in_use.acquire(blocking=False):
            return None
        try:
            if self.missing() is None:
                # What did not answer for a while is the server that it was before, with its variables.
                self._lost, self._began = set(), None
                return None
            return self._attempt(self._source)
        finally:
            self._variables_in_use.release()

    def _attempt(self, source: RestoreSource) -> RolledBack | None:
        self._lost.update(self._runtime.lost_parameter_servers())
        self._began = self._began or time.monotonic()
        try:
            with tensorflow_internals.own_executor():
                if not self._runtime.reconnect_parameter_servers():
                    return None
                self._is_half_restored = True
                checkpoint = source.restore(lambda: self._renew(source.may_read_variables))
                self._variables.initialize_rest()
                step = self._read_step()
        except Exception as error:
            if isinstance(error, UNREACHED) or self._runtime.lost_parameter_server() is not None:
                return None
            raise
        if self._runtime.lost_parameter_server() is not None:
            # Nothing had to be restored on it, so nobody noticed that it was lost once more.
            return None
        return self._rolled_back(source, checkpoint, step)

    def _renew(self, with_values: bool) -> None:
        self._variables.renew()
        if with_values:
            self._variables.initialize_rest()

    def _read_step(self) -> int | None:
        if self._step is None:
            return None
        return int(self._step() if callable(self._step) else self._step.numpy())

    def _rolled_back(self, source: RestoreSource, checkpoint: str | None, step: int | None) -> RolledBack:
        assert self._began is not None
        before: int | None = None
        after = step
        if source.manager is not None:
            before, finished = self._progress.roll_back(checkpoint)
            after = finished if step is None else step
            before += after - finished
        lost = tuple(sorted(self._lost))
        seconds = time.monotonic() - self._began
        self._lost, self._began, self._is_half_restored = set(), None, False
        return RolledBack(
            parameter_servers=lost, checkpoint=checkpoint, step_before=before, step_after=after, seconds=seconds
        )


def _check(step: Any) -> None:
    if step is None or callable(step):
        return
    if not (hasattr(step, "numpy") and tf.as_dtype(step.dtype).is_integer):
        raise TypeError(
            f"step must be an integer variable, or a function that returns an int, such as optimizer.iterations; "
            f"got {step!r}."
        )
