"""Recovers lost parameter servers: connects to them, recreates their variables, restores the latest checkpoint.

    reconnect --> renew every variable --> restore --> initialize what the checkpoint does not hold --> Rollback
        |                 |                   |                         |
        '-----------------'-- a server is lost, or a save is in progress '--> None: to be tried again

Promises:
- `recover` restores all variables of all parameter servers to the checkpoint, or reports that it must be called again.
  Functions that were traced before stay usable.
- The newest readable checkpoint in the manager's directory is restored. A checkpoint that is damaged, or that another
  client has written, is skipped with a warning; variables keep no value of a skipped checkpoint.
- A checkpoint is a snapshot, because the replaced `save` of the manager saves while no scheduled function runs and no
  variable is being recovered. If a save fails because a parameter server was lost or does not yet reach another server,
  the save is repeated, and its caller does not notice.
- A failed save leaves the latest checkpoint unchanged, because TensorFlow declares a checkpoint the latest only after
  all of it is written. Asynchronous saves are refused.
- The client that began last to use a directory owns the directory; see `checkpoint_owner`. A former owner neither saves
  nor recovers.
"""

import abc
import contextlib
import copy
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.addresses import checkpoint_path
from coordinator.errors import CheckpointsTakenOver, ParameterServerLost, Rollback, add_note
from coordinator.events.event_stream import EventStream
from coordinator.options import Options
from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.membership.membership import Membership
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.recovery.variable_store import States, VariableStore
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import (
    asynchronous_saves_refused,
    forget_last_saved_step,
    saves_asynchronously,
)
from coordinator.ps_strategy.tensorflow_internals.functions import own_executor
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

_logger = logging.getLogger("coordinator")

# Errors that a lost server causes. They are no sign of a damaged checkpoint.
_SERVER_LOST = (*UNREACHED, tf.errors.CancelledError)


class SaveServices(NamedTuple):
    """The services of a strategy for a `CheckpointSource`.

    Attributes:
      save: takes a function, which saves a checkpoint and returns its path, and the directory. Calls the function in
        `quiet()`, and again after a recovery if a parameter server was lost during the call; returns the path.
      steps: returns the number of the training step, or None while a server does not answer.
      begins_at_zero: whether `steps` counts from the beginning of this program.
      memory: `Options.checkpoint_memory`.
      events: records the saved checkpoints.
      owner: knows whether the directory still belongs to this client.
    """

    save: Callable[[Callable[[], str], str], str | None]
    steps: Callable[[], int | None]
    begins_at_zero: bool
    memory: int
    events: EventStream
    owner: CheckpointOwner = CheckpointOwner()


class CheckpointSource(abc.ABC):
    """An object that saves checkpoints in a directory, like a `tf.train.CheckpointManager`. The strategy calls it.

    The class is abstract, because `coordinator.Checkpoints` is in a higher layer than the recovery.
    """

    checkpoint: tf.train.Checkpoint
    directory: str

    @abc.abstractmethod
    def begin(self, services: SaveServices) -> None:
        """Allows saves; the strategy restores from this object from now on."""

    @abc.abstractmethod
    def end(self) -> None:
        """Ends saves in progress, in bounded time; nothing is saved afterwards."""

    @abc.abstractmethod
    def to_restore(self) -> list[str]:
        """Returns the paths of the complete checkpoints, newest first; gives up a checkpoint that is being saved."""

    @abc.abstractmethod
    def restored(self, path: str | None) -> None:
        """Records that this checkpoint was restored, and newer ones could not be; None if initial values were set."""


class CheckpointRestore:
    """The restoring of variables from a checkpoint.

    `source` is a `tf.train.CheckpointManager`, a `CheckpointSource`, or a function without arguments that restores a
    checkpoint and returns its path (None if there is none). Raises TypeError for any other source, and ValueError if
    the manager's checkpoint was used asynchronously or TensorFlow does not find checkpoints in its directory.
    """

    def __init__(self, source: Any, owner: CheckpointOwner | None = None) -> None:
        self._owner = owner or CheckpointOwner()
        self._source = source
        self.manager = source if isinstance(source, tf.train.CheckpointManager | CheckpointSource) else None
        if self.manager is not None:
            checkpoint_path(self.manager.directory)
            if saves_asynchronously(self.manager.checkpoint):
                raise ValueError(
                    "restore_from was given a manager whose checkpoint was saved or restored with "
                    "tf.train.CheckpointOptions(enable_async=True) before, which does not survive the loss of a "
                    "parameter server. Give it a manager of a new tf.train.Checkpoint of the same objects, and leave "
                    "enable_async out."
                )
        elif isinstance(source, type) or not callable(source):
            advice = (
                " Pass a manager of it: coordinator.Checkpoints(checkpoint, directory)."
                if isinstance(source, tf.train.Checkpoint)
                else ""
            )
            raise TypeError(
                "restore_from takes coordinator.Checkpoints, a tf.train.CheckpointManager, or a function without "
                f"arguments that restores a checkpoint and returns its path; got {source!r}.{advice}"
            )

    def checkpoints(self) -> list[str]:
        """Returns the paths of the checkpoints in the manager's directory, newest first."""
        assert self.manager is not None
        if isinstance(self.manager, CheckpointSource):
            return self.manager.to_restore()
        state = tf.train.get_checkpoint_state(self.manager.directory)
        paths = [] if state is None else [*state.all_model_checkpoint_paths, state.model_checkpoint_path]
        # The newest first, each path once.
        return list(dict.fromkeys(path for path in reversed([*self.manager.checkpoints, *paths]) if path))

    def restore(self, prepare: Callable[[], None]) -> str | None:
        """Restores the latest checkpoint. `prepare` is called before each attempt, to give variables new resources.

        Returns the path of the restored checkpoint; None if there was none, or if a user's function returned no path.
        Raises OpError if a server was lost, the newest checkpoint's error if none can be read, or the function's error.
        """
        if self.manager is None:
            prepare()
            path = self._source()
            return os.fspath(path) if isinstance(path, str | os.PathLike) else None
        damage: Exception | None = None
        for path in self.checkpoints():
            if not self._owner.has(path):
                _logger.warning("The checkpoint %s is not restored: another client has written it.", path)
                continue
            prepare()
            try:
                # Variables that are created later, such as an optimizer's, are restored when they are created.
                self.manager.checkpoint.restore(path).expect_partial()
            except _SERVER_LOST:
                raise
            except Exception as error:  # noqa: BLE001 - a damaged file makes TensorFlow raise anything, IndexError too
                _logger.warning("The checkpoint %s cannot be restored; the previous one is tried: %s", path, error)
                add_note(error, f"Raised while restoring the checkpoint {path}.")
                damage = damage or error
            else:
                self._note_restored(path)
                return path
        if damage is not None:
            raise damage
        prepare()
        self._note_restored(None)
        return None

    def _note_restored(self, path: str | None) -> None:
        if isinstance(self.manager, CheckpointSource):
            self.manager.restored(path)
        else:
            forget_last_saved_step(self.manager)


# The number of checkpoints in `_saved`. Older checkpoints are restored only if all of these are damaged.
_REMEMBERED = 100
# How often a save is repeated if a server does not reach another server, although no server is lost.
_UNREACHED_SAVES = 3

Step = Any  # An integer variable, of TensorFlow or Keras, or a function that returns an int.


class VariableRecovery:
    """The recovery of the parameter servers of one cluster.

    Args:
      membership: connects to the parameter servers.
      variables: the variables and tables on the parameter servers.
      finished: returns how many of the user's functions have finished so far, including undone functions.
      wait_recovered: waits until the parameter servers are recovered, or a recovery cannot be expected; returns whether
        they are recovered. Threads that save a checkpoint call it.
      quiet: returns a scope in which no scheduled function runs.
      memory, events, owner: see `SaveServices`.
    """

    def __init__(
        self,
        membership: Membership,
        variables: VariableStore,
        finished: Callable[[], int],
        wait_recovered: Callable[[], bool],
        quiet: Callable[[], contextlib.AbstractContextManager[None]],
        memory: int = Options.checkpoint_memory,
        events: EventStream | None = None,
        owner: CheckpointOwner | None = None,
    ) -> None:
        self._events = events or EventStream()
        self._owner = owner or CheckpointOwner()
        self._memory = memory
        self._membership = membership
        self._variables = variables
        self.states_held = variables.states_held
        self._finished = finished
        self._wait_recovered = wait_recovered
        self._quiet = quiet
        self._source: CheckpointRestore | None = None
        self._step: Step | None = None
        self._on_rollback: Callable[[Rollback], object] | None = None
        # How many finished functions were undone by recoveries: the variables lack the effect of these functions.
        self._undone = 0
        # By path, for the latest checkpoints: how many functions had finished and were not undone when the save began,
        # and the states that were saved. A checkpoint that is missing here is very old, or older than this training. A
        # state that was added after the save is reset, because the checkpoint lacks the work since then.
        self._saved: dict[str, tuple[int, States]] = {}
        self._replaced_of_manager = contextlib.ExitStack()
        # Held while a checkpoint is saved, and during an attempt to recover. A thread that holds this lock may take the
        # lock of the membership; a thread that holds the lock of the membership must not take this lock.
        self.variables_in_use = Lock()
        # The servers that were found lost since the last successful recovery.
        self._lost: set[str] = set()
        self._began: float | None = None
        self._is_half_restored = False
        # The connections with which the parameter servers had all variables last.
        self._complete = membership.parameter_server_connections

    def restore_from(
        self, source: Any, step: Step | None = None, on_rollback: Callable[[Rollback], object] | None = None
    ) -> None:
        """Sets the source of checkpoints, the step and the callback; see `ParameterServerStrategy.restore_from`."""
        restore = CheckpointRestore(source, self._owner)
        if not (step is None or callable(step) or (hasattr(step, "numpy") and tf.as_dtype(step.dtype).is_integer)):
            raise TypeError(
                "step must be an integer variable, or a function that returns an int, such as optimizer.iterations; "
                f"got {step!r}."
            )
        if on_rollback is not None and not callable(on_rollback):
            raise TypeError(f"on_rollback must be a function that takes a Rollback, got {on_rollback!r}.")
        self._on_rollback = on_rollback
        self._variables.note_tables()
        self._variables.is_restored = True
        self.release_manager()
        if restore.manager is not None:
            self._owner.take(restore.manager.directory, restore.checkpoints())
        if isinstance(restore.manager, CheckpointSource):
            self._step = step
            services = self._save_quietly, self._steps, step is None, self._memory, self._events, self._owner
            restore.manager.begin(SaveServices(*services))
            self._replaced_of_manager.callback(restore.manager.end)
        elif restore.manager is not None:
            save = functools.partial(self._save, restore.manager.save, restore.manager.directory)
            self._replaced_of_manager.enter_context(attribute_replaced(restore.manager, "save", save))
            self._replaced_of_manager.enter_context(
                asynchronous_saves_refused(restore.manager.checkpoint, _asynchronous_refused)
            )
        self._source, self._step = restore, step

    def release_manager(self) -> None:
        """Restores the checkpoint manager's own `save`, unless other code has replaced it; undoes the other changes."""
        self._replaced_of_manager.close()
        self._owner.leave()

    def missing(self) -> ParameterServerLost | None:
        """Returns an error that names a parameter server whose variables are gone or half restored, or None."""
        lost = self._membership.lost_parameter_server()
        if lost is None and self._is_half_restored:
            name = min(self._lost, default="/job:ps")
            return ParameterServerLost(
                name, f"The parameter server {name} is reconnected; its variables are being restored."
            )
        return lost

    def try_once(self) -> Rollback | bool:
        """Calls `recover`; reports and returns the rollback, or returns whether no variable is missing."""
        rollback = self.recover()
        if rollback is None and self.missing() is not None:
            return False
        self._membership.reach_parameter_servers()
        if rollback is None:
            return self.missing() is None
        _logger.warning("%s", rollback)
        if self._on_rollback is not None:
            try:
                self._on_rollback(rollback)
            except Exception:
                _logger.exception("on_rollback raised; training continues.")
        return rollback

    def recover(self) -> Rollback | None:
        """Makes one attempt to recover. Call it on a thread without its own executor, while no function runs.

        Returns the rollback, or None. If it returns None and `missing` returns an error, call it again: a parameter
        server does not answer or was lost once more, or a checkpoint is being saved, which will fail soon.

        Raises:
          RuntimeError: `restore_from` was not called.
          CheckpointsTakenOver: another client uses the directory of the checkpoints.
          Exception: no checkpoint can be restored, although all servers answer; or the error of the user's function.
        """
        if self._source is None:
            raise RuntimeError("There is nothing to restore from: call restore_from first.")
        if not self.variables_in_use.acquire(blocking=False):
            return None
        try:
            if self.missing() is None:
                # The server only did not answer for a while, and is the same process with its variables.
                self._forget_loss()
                return None
            return self._attempt(self._source)
        finally:
            self.variables_in_use.release()

    def _attempt(self, source: CheckpointRestore) -> Rollback | None:
        def renew() -> None:
            self._variables.renew()
            if source.manager is None:  # The user's function may read variables before it restores them.
                self._variables.initialize_rest()

        self._lost.update(self._membership.lost_parameter_servers())
        self._began = self._began or time.monotonic()
        try:
            self._owner.require()
            with own_executor():
                if not self._reconnect():
                    return None
                connections = self._membership.parameter_server_connections
                self._is_half_restored = True
                checkpoint = source.restore(renew)
                self._variables.initialize_rest()
                _, states = self._saved.get(checkpoint or "", (0, States()))
                for state, saved in states.items():
                    if state.serialize() != saved:
                        state.deserialize(saved)
                step = self._read_step()
        except CheckpointsTakenOver:
            raise
        except Exception as error:
            if isinstance(error, UNREACHED) or self._membership.lost_parameter_server() is not None:
                return None
            raise
        if self._membership.lost_parameter_server() is not None:
            # The loss of another server raises no error if nothing had to be restored on that server.
            return None
        self._complete = connections
        return self._rollback(source, checkpoint, step)

    def _reconnect(self) -> bool:
        """Reconnects to the parameter servers; returns whether all are connected and variables are missing there."""
        if not self._membership.reconnect_parameter_servers():
            return False
        if self._is_half_restored or self._membership.parameter_server_connections != self._complete:
            return True
        # The servers that did not answer before do so now, and still have their variables.
        self._forget_loss()
        return False

    def _forget_loss(self) -> None:
        self._lost, self._began = set(), None

    def _read_step(self) -> int | None:
        if self._step is None:
            return None
        return int(self._step() if callable(self._step) else self._step.numpy())

    def _steps(self) -> int | None:
        if self._step is None:
            return self._progress()
        try:
            return self._read_step()
        except tf.errors.OpError:
            if self.missing() is None:
                raise
            return None

    def _progress(self) -> int:
        """Returns how many functions have finished and were not undone."""
        return self._finished() - self._undone

    def _rollback(self, source: CheckpointRestore, checkpoint: str | None, step: int | None) -> Rollback:
        assert self._began is not None
        before, after = None, step
        if source.manager is not None:
            progress = self._progress()
            saved, _ = self._saved.get(checkpoint or "", (0, None))
            undone = max(0, progress - saved)
            self._undone += undone
            after = progress - undone if step is None else step
            before = after + undone
        lost = tuple(sorted(self._lost))
        seconds = time.monotonic() - self._began
        self._is_half_restored = False
        self._forget_loss()
        return Rollback(
            parameter_servers=lost, checkpoint=checkpoint, step_before=before, step_after=after, seconds=seconds
        )

    def _save(self, save: Callable[..., str | None], directory: str, *args: Any, **kwargs: Any) -> str | None:
        """Calls `save`, the manager's original method, while no function runs and no recovery is attempted.

        Raises ParameterServerLost if a lost parameter server does not return, CheckpointsTakenOver if another client
        owns the directory, RuntimeError on a worker's thread, ValueError for an asynchronous save, or the save's error.
        """
        arguments = (*args, *kwargs.values())
        if any(isinstance(value, tf.train.CheckpointOptions) and value.enable_async for value in arguments):
            # This error is raised before the manager increments the number of the checkpoint.
            raise _asynchronous_refused()
        began = time.monotonic()
        bound = inspect.signature(save).bind(*args, **kwargs)
        options = bound.arguments["options"] = copy.copy(bound.arguments.get("options") or tf.train.CheckpointOptions())
        # The options get a new list, because TensorFlow would add a function to the caller's list at each save.
        options.experimental_write_callbacks = [self._note_written, *(options.experimental_write_callbacks or ())]
        try:
            path = self._save_quietly(functools.partial(save, *bound.args, **bound.kwargs), directory)
        except (tf.errors.OpError, CheckpointsTakenOver) as error:
            seconds = time.monotonic() - began
            self._events.record("checkpoint_failed", name=directory, seconds=seconds, detail=type(error).__name__)
            raise
        if path is not None:
            self._events.record("checkpoint_saved", name=path, seconds=time.monotonic() - began)
        return path

    def _note_written(self, path: str) -> None:
        """Records a written checkpoint before the manager lists it and deletes older ones."""
        self._owner.require()
        self._owner.record(path)

    def _save_quietly(self, save: Callable[[], str | None], directory: str) -> str | None:
        """Calls `save` while no function runs, and again after a recovery; see `SaveServices`."""
        with self._quiet():
            return self._save_repeatedly(save, directory)

    def _save_repeatedly(self, save: Callable[[], str | None], directory: str) -> str | None:
        unreached = 0
        while True:
            with self.variables_in_use:
                missing = self.missing()
                if missing is None:
                    count = self._progress()
                    try:
                        self._owner.require()
                        states = self._variables.copied_states()
                        path = save()
                    except tf.errors.OpError as error:
                        # The cause may be another client that owns the directory and has deleted the files.
                        self._owner.require()
                        missing = self.missing()
                        if missing is not None:
                            missing.original_exception = error
                        elif not isinstance(error, UNREACHED) or unreached == _UNREACHED_SAVES:
                            raise
                    else:
                        if path is not None:
                            self._saved = dict([*self._saved.items(), (path, (count, states))][-_REMEMBERED:])
                        return path
            if missing is None:
                unreached += 1
                _logger.info("A checkpoint in %s is saved again: a server did not reach another one.", directory)
                self._wait_recovered()
                self._membership.reach_parameter_servers()
                continue
            _logger.warning("A checkpoint in %s is saved after the recovery: %s", directory, missing)
            if not self._wait_recovered() or self._is_half_restored:
                raise missing


def _asynchronous_refused() -> ValueError:
    return ValueError(
        "The checkpoint that restore_from restores cannot be saved or restored with "
        "tf.train.CheckpointOptions(enable_async=True): TensorFlow's asynchronous checkpoint keeps using the "
        "variables of a parameter server that was lost, so that no later save would succeed. Leave enable_async out."
    )
