"""Calls of functions on the client that schedule: their waits, errors, and how Ctrl-C ends them.

    user's thread    train(100) ──► TensorFlow ───────────────────────────────────────► KeyboardInterrupt, or the error
                                        │ runs the graph                        ▲
    TensorFlow's threads          begin_wait ─► dequeue, without a thread ─► end_wait
                                        │           ▲
    coordinator-client-wait             └──► join ──┘ enqueue
    coordinator-client-interrupts   a byte for each signal ──► cut the calls of the main thread

TensorFlow has as many threads for graphs as there are processors, and needs them to connect to a worker that returns.
So no graph waits on one of them: a thread of this library waits, and the graph waits for an element of a queue.
"""

import concurrent.futures
import contextlib
import itertools
import os
import re
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.background_thread import BackgroundThread
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.tensorflow_internals.client_functions import errors_raised_as

_NUMBER = re.compile(r"\[coordinator call (\d+)\]")


class CallError(Exception):
    """Ends a graph.

    Its text contains the number of the call, so that `ClientCalls.error_in` can return the call's own error, which is
    raised instead.
    """


class ClientCall:
    """One call of a function on the client that schedules.

    Args:
      number: identifies it.
      device: the client's, where its queue is.

    Attributes:
      is_of_main_thread: whether the main thread made it, which Ctrl-C is for.
      cut: is done once the call is to end.
      error: with which it ends; None if it has none.
    """

    def __init__(self, number: int, device: str) -> None:
        self.number = number
        self.is_of_main_thread = threading.current_thread() is threading.main_thread()
        self.cut = concurrent.futures.Future[None]()
        self.error: BaseException | None = None
        with tf.device(None), tf.device(device):
            self._wakeups = tf.queue.FIFOQueue(1, [tf.bool], [[]])
        self._outcome: concurrent.futures.Future[Any] | None = None

    @property
    def queue(self) -> Any:
        """The handle of the queue that gets an element when a wait has ended."""
        return self._wakeups.queue_ref

    def fail(self, error: BaseException) -> CallError:
        """Sets the error of the call, unless it has one, and returns what to raise in the graph."""
        self.error = self.error or error
        return CallError(f"{type(self.error).__name__}: {self.error} [coordinator call {self.number}]")

    def check(self) -> None:
        """Raises CallError if the call is to end."""
        if self.cut.done():
            raise self.fail(KeyboardInterrupt())

    def run(self, work: Callable[[], Any]) -> Any:
        """Returns what `work` returns; its error becomes that of the call."""
        self.check()
        try:
            return work()
        except BaseException as error:  # noqa: BLE001 - raised by the call
            raise self.fail(error) from None

    def begin_wait(self, work: Callable[[], Any]) -> None:
        """Calls `work`, which may wait, on another thread. It has to end when `cut` is done."""
        self.check()
        self._outcome = on_own_thread("coordinator-client-wait", work)
        # It waits for nothing: the queue is empty.
        self._outcome.add_done_callback(lambda _: self._wakeups.enqueue(True))

    def end_wait(self) -> Any:
        """Returns what the `work` of a wait has returned; None if there was no wait. Raises CallError."""
        outcome, self._outcome = self._outcome, None
        return None if outcome is None else self.run(outcome.result)


class ClientCalls:
    """The calls that are being made.

    Args:
      wake: has waits that were begun look at whether their call is to end.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        with tf.init_scope(), tf.device(None), tf.device("/device:CPU:0"):
            self.device = tf.constant(0).device
        self._wake = wake
        self._numbers = itertools.count()
        self._calls: dict[int, ClientCall] = {}
        self._interrupts = Interrupts(self._cut_calls, self._turn_error_into_interrupt)

    def __getitem__(self, number: Any) -> ClientCall:
        """Returns a call by its number."""
        return self._calls[int(number)]

    def begin(self) -> tuple[Any, Any]:
        """Begins a call by the calling thread; returns tensors with its number and its queue.

        It ends with an error that `error_in` has returned, or when the first is not referenced any more.
        """
        call = ClientCall(next(self._numbers), self.device)
        with tf.device(None), tf.device(self.device):
            number = tf.constant(np.int64(call.number))
        self._calls[call.number] = call
        weakref.finalize(number, self._end, call.number).atexit = False
        if call.is_of_main_thread:
            self._interrupts.watch()
        return number, call.queue

    def _end(self, number: int) -> ClientCall | None:
        call = self._calls.pop(number, None)
        if call is not None and call.is_of_main_thread:
            self._interrupts.unwatch()
        return call

    def error_in(self, message: str) -> BaseException | None:
        """Ends the call that a message of TensorFlow names, and returns its error."""
        found = _NUMBER.search(message)
        call = self._end(int(found[1])) if found else None
        return None if call is None else call.error

    def _of_main_thread(self) -> list[ClientCall]:
        return [call for call in list(self._calls.values()) if call.is_of_main_thread]

    def _cut_calls(self) -> None:
        for call in self._of_main_thread():
            if not call.cut.done():
                call.cut.set_result(None)
        self._wake()

    def _turn_error_into_interrupt(self) -> bool:
        ending = [call for call in self._of_main_thread() if call.error is not None]
        for call in ending:
            call.error = KeyboardInterrupt()
        return bool(ending)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A scope in which calls are made."""
        with contextlib.closing(self._interrupts), errors_raised_as(self.error_in):
            yield


class Interrupts:
    """Calls a function when Ctrl-C is pressed, on a thread, while the main thread is in TensorFlow.

    Python calls the handler of a signal on the main thread, once that runs Python again: after TensorFlow has returned.
    But it writes a byte for each signal at once. A handler other than Python's own, which raises `KeyboardInterrupt`,
    is left alone: what it is for is not known.

    Args:
      on_interrupt: the function.
      interrupt_ending_call: if a call of the main thread is ending with an error, replaces the error by
        `KeyboardInterrupt` and returns True.
    """

    def __init__(self, on_interrupt: Callable[[], None], interrupt_ending_call: Callable[[], bool]) -> None:
        self._on_interrupt = on_interrupt
        self._interrupt_ending_call = interrupt_ending_call
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        self._former = -1
        self._watching = 0
        self._thread = BackgroundThread("coordinator-client-interrupts", self._read)
        self._thread.start()

    def watch(self) -> None:
        """Begins, on the main thread."""
        self._watching += 1
        former = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        if former != self._sent.fileno():
            self._former = former
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def unwatch(self) -> None:
        """Ends what `watch` has begun, if it is called on the main thread; otherwise the next one does."""
        self._watching -= 1
        if not self._watching:
            self._restore()

    def _handle(self, number: int, frame: Any) -> None:
        # TensorFlow fails if Python raises while it converts a graph's error.
        if not self._interrupt_ending_call():
            signal.default_int_handler(number, frame)

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        present = signal.set_wakeup_fd(self._former, warn_on_full_buffer=False)
        if present != self._sent.fileno():
            # Set by other code meanwhile.
            signal.set_wakeup_fd(present)
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _read(self) -> None:
        while numbers := self._received.recv(64):
            if self._former != -1:
                with contextlib.suppress(OSError):
                    os.write(self._former, numbers)
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._handle:
                self._on_interrupt()

    def close(self) -> None:
        """Ends the thread."""
        self._restore()
        self._thread.stop()
        self._sent.shutdown(socket.SHUT_WR)
        self._thread.wait_stopped()
        self._received.close()
        self._sent.close()
