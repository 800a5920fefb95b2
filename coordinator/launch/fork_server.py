"""The process that local servers are forked from. It has loaded TensorFlow, but not used it.

    python -m coordinator.launch.fork_server    its standard input is a socket; `server_starter.py` has the other end

Loading TensorFlow takes nearly all the start time of a server. A forked server starts in a fraction of a second, and
shares the memory that holds TensorFlow. Guarantees of the fork server:

- A forked server runs the same code as `coordinator serve`.
- It never forks with several threads, which a fork would stop in the middle of their work, or for another environment
  than the one in which TensorFlow was loaded: such a server becomes a fresh process.
- It reports how each server ended, and forks none whose report was shut down, because nobody wants that server.
- When the other end of the socket is closed, it ends immediately with all its servers, frozen ones included.

The fork server of `multiprocessing` with `set_forkserver_preload` was tried, and cannot replace it. Each child imports
the `__main__` of the requesting process: a program without `if __name__ == "__main__"` fails ("An attempt has been made
to start a new process before the current process has finished its bootstrapping phase"), and any other runs its top
level in every server. It is one per process, with one environment, shared with the user's own `multiprocessing`. Its
resource tracker stays when the servers are closed.
"""

import contextlib
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from coordinator.background_thread import start_once
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch.serve import SERVE_COMMAND, UNUSABLE, load_tensorflow, serve, set_process_title

# `asyncio` returns the same for a child whose exit code is unknown.
UNKNOWN_EXIT_CODE = 255

# Not read when TensorFlow is loaded, but by a server at its start, by CUDA and TensorFlow when they look for GPUs, by
# gRPC with each connection, and by NumPy's linear algebra, which no server uses.
_READ_LATE = frozenset(
    {"TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "grpc_proxy", "OPENBLAS_NUM_THREADS"}
)

# The descriptors of a request: environment, folder, log and report.
_DESCRIPTORS = 4
# How long a joined thread may remain listed, in seconds.
_THREAD_END_TIMEOUT = 1.0
_POLL_INTERVAL = 0.001


class _Child(NamedTuple):
    """A forked server: its id, a pipe that it holds open, and its standard input, the socket for its report."""

    pid: int
    end: int
    report: socket.socket


class ForkServer:
    """Forks servers until `control` is closed.

    Each message on `control` requests one server, by descriptors: the environment (a file, in JSON), the folder to run
    in, the log, and the socket for reports about it.
    """

    def __init__(self, control: socket.socket):
        self._control = control
        self._environment = dict(os.environ)
        self._children: list[_Child] = []
        self._poll = select.poll()
        self._may_serve = False
        self._found_handler = signal.getsignal(signal.SIGTERM)

    def run(self) -> NoReturn:
        """Loads TensorFlow and forks servers on request; then ends the process."""
        self._may_serve = load_for_forking(self._control)
        # Before, SIGTERM ended this process; now the ends of servers must be reported.
        self._found_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._poll.register(self._control, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            for child in [child for child in self._children if child.end in ready]:
                self._reap(child)
            if self._control.fileno() in ready:
                self._take_request()

    def _take_request(self) -> None:
        message, descriptors, *_ = socket.recv_fds(self._control, 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            self._end()
        if len(descriptors) < _DESCRIPTORS:
            # The kernel drops descriptors for which there is no room. This server gets no report.
            for descriptor in descriptors:
                os.close(descriptor)
            print("coordinator: a request for a server was dropped: too many open files.", flush=True)
            return
        request, folder, log, report = descriptors
        with open(request, "rb") as file:
            environment = json.load(file)
        self.fork(environment, folder, log, socket.socket(fileno=report))
        os.close(folder)
        os.close(log)

    def fork(self, environment: Mapping[str, str], folder: int, log: int, report: socket.socket) -> None:
        """Forks a server, unless its report was shut down at its other end, or no process can be forked.

        `folder` and `log` are descriptors. `report` receives the message that the server begins, and its exit code, and
        is then closed. The server reads it, and ends when its other end is closed.
        """
        shutdown_poll = select.poll()
        shutdown_poll.register(report, select.POLLIN)
        if shutdown_poll.poll(0):
            _report_end(report, -signal.SIGKILL)
            return
        pipe: tuple[int, ...] = ()
        try:
            pipe = end, held = os.pipe()
            pid = os.fork()
        except OSError as error:
            for descriptor in pipe:
                os.close(descriptor)
            # The disk may be full.
            with contextlib.suppress(OSError):
                os.write(log, f"coordinator: no process could be forked for this server: {error}.\n".encode())
            _report_end(report, UNKNOWN_EXIT_CODE)
            return
        if pid == 0:
            os.close(end)
            self._become_server(environment, folder, log, report, held)
        os.close(held)
        self._children.append(_Child(pid, end, report))
        self._poll.register(end, select.POLLIN)

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._children.remove(child)
        self._poll.unregister(child.end)
        os.close(child.end)
        _report_end(child.report, os.waitstatus_to_exitcode(status))

    def _end(self) -> NoReturn:
        for child in self._children:
            os.kill(child.pid, signal.SIGKILL)
        for child in tuple(self._children):
            self._reap(child)
        # Python's own exit would first destroy everything that was loaded.
        os._exit(0)

    def _become_server(
        self, environment: Mapping[str, str], folder: int, log: int, report: socket.socket, held: int
    ) -> NoReturn:
        code = 1
        try:
            report.send(f"begun {os.getpid()}".encode())
            for descriptor, number in ((report.fileno(), 0), (log, 1), (log, 2)):
                os.dup2(descriptor, number)
            os.setsid()
            os.fchdir(folder)
            signal.signal(signal.SIGTERM, self._found_handler)
            os.close(folder)
            os.close(log)
            for child in self._children:
                os.close(child.end)
                child.report.close()
            changed = {name for name, _ in environment.items() ^ self._environment.items()}
            if not self._may_serve or changed - _READ_LATE:
                # Inherited only from here: processes that a forked server starts may outlive it.
                os.set_inheritable(held, True)
                os.execve(sys.executable, SERVE_COMMAND, environment)  # noqa: S606 - no shell is wanted
            for name in _READ_LATE:
                os.environ.pop(name, None)
            os.environ.update({name: environment[name] for name in _READ_LATE & environment.keys()})
            serve(os.environ, exit_with_parent=math.inf)
        except (ClusterSpecError, LaunchError) as error:
            print(f"coordinator serve: {error}", file=sys.stderr)
            code = UNUSABLE
        except BaseException:  # noqa: BLE001 - printed and ended with, as by a fresh process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _report_end(report: socket.socket, code: int) -> None:
    # The process that reads it may be gone.
    with report, contextlib.suppress(OSError):
        report.send(f"ended {code}".encode())


def load_for_forking(control: socket.socket) -> bool:
    """Loads TensorFlow, and nothing that would make a fork of this process unsafe or large.

    This process ends if the other end of `control` is closed during the loading. Returns True if the process may be
    forked to become a server: TensorFlow is loaded, and has started no thread.
    """
    # NumPy's linear algebra would start threads when it is loaded.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with _ended_with(control):
        try:
            load_tensorflow(os.environ)
        except Exception:  # noqa: BLE001 - an installation may be broken in any way
            # Every server then tries for itself, and has the error in its own log.
            traceback.print_exc()
            return False
    # Otherwise each server would print the buffered text again.
    sys.stdout.flush()
    # The collector does not write to frozen objects, so all servers share one copy.
    gc.collect()
    gc.freeze()
    return _is_single_threaded()


@contextlib.contextmanager
def _ended_with(control: socket.socket) -> Iterator[None]:
    """A scope in which this process ends if the other end of the socket is closed."""
    done = os.eventfd(0)

    def watch() -> None:
        poll = select.poll()
        # Only the socket's end, because requests wait in it.
        poll.register(control, 0)
        poll.register(done, select.POLLIN)
        if any(descriptor != done for descriptor, _ in poll.poll()):
            os._exit(0)

    watcher = start_once("coordinator-preload", watch)
    try:
        yield
    finally:
        os.eventfd_write(done, 1)
        watcher.join()
        os.close(done)


def _is_single_threaded() -> bool:
    """Returns True if this process has one thread; waits while a joined thread is still listed."""
    deadline = time.monotonic() + _THREAD_END_TIMEOUT
    pause = threading.Event()
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        pause.wait(_POLL_INTERVAL)
    return True


if __name__ == "__main__":
    # Before the title is set, which adds a variable to the environment.
    fork_server = ForkServer(socket.socket(fileno=0))
    set_process_title("coordinator fork server", "fork-server")
    fork_server.run()
