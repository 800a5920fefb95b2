"""Forks local servers from this process, which has loaded TensorFlow but never used it.

    python -m coordinator.launch.fork_server    its standard input is a socket; `server_starter.py` has the other end

Loading TensorFlow takes nearly all the start time of a server. A forked server starts in a fraction of a second, and
shares the memory of TensorFlow with the fork server. Guarantees of the fork server:

- A forked server runs the same code as `coordinator serve`.
- If the fork server has several threads, or a server needs another environment than the one in which TensorFlow was
  loaded, the forked process starts a new interpreter. A fork would stop the other threads in the middle of their work.
- It reports how each server ended. A requester that no longer wants a server shuts down the report of the server, which
  is then not forked.
- When the other end of its standard input is closed, the fork server kills all its servers, even frozen ones, and ends
  immediately.

The fork server of `multiprocessing` with `set_forkserver_preload` was tried, and cannot replace this fork server. Each
of its children imports the `__main__` of the requesting process. So a program without `if __name__ == "__main__"` fails
("An attempt has been made to start a new process before the current process has finished its bootstrapping phase"), and
any other program runs its top level in every server. A process has only one such fork server, with one environment, and
the user's own `multiprocessing` uses the same one. Its resource tracker keeps running when the servers are closed.
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

# The exit code that means an unknown exit code, as in `asyncio`.
UNKNOWN_EXIT_CODE = 255

# Variables that are not needed while TensorFlow is loaded. A server reads them at its start, CUDA and TensorFlow when
# they look for GPUs, gRPC when it begins and with each connection, and NumPy's linear algebra, which no server uses.
_READ_LATE = frozenset(
    {
        "TF_CONFIG",
        "CUDA_VISIBLE_DEVICES",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "GRPC_POLL_STRATEGY",
        "grpc_proxy",
        "OPENBLAS_NUM_THREADS",
    }
)

# The number of descriptors of a request: environment, folder, log and report.
_DESCRIPTORS = 4
# How long the kernel may still list a thread that has been joined, in seconds.
_THREAD_END_TIMEOUT = 1.0
_POLL_INTERVAL = 0.001


class _Child(NamedTuple):
    """A forked server: its id, the read end of a pipe that the server holds open, and the socket for its report."""

    pid: int
    end: int
    report: socket.socket


class ForkServer:
    """Forks servers until `control` is closed.

    Each message on `control` requests one server. The message carries descriptors: a file with the environment in JSON,
    the folder to run in, the log, and the socket for reports about the server.
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
        # SIGTERM could end this process until now. From now on this process must report the ends of its servers.
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
            # The kernel drops descriptors if this process has too many open files. The requester gets no report then.
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
        """Forks a server, unless the requester has shut down its report, or no process can be forked.

        `folder` and `log` are descriptors. `report` gets the message that the server begins, and later the server's
        exit code, and is then closed. `report` is also the server's standard input, so that closing the other end ends
        the server.
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
            # The write fails if the disk is full.
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
        # Python's own exit would first destroy all loaded modules.
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
                # Only the new interpreter inherits `held`, because processes that a forked server starts may outlive
                # the server.
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
    # The process that reads the report may be gone.
    with report, contextlib.suppress(OSError):
        report.send(f"ended {code}".encode())


def load_for_forking(control: socket.socket) -> bool:
    """Loads TensorFlow, and nothing that would make a fork of this process unsafe or large.

    This process ends if the other end of `control` is closed during the loading. Returns True if a fork of this process
    can serve, because TensorFlow is loaded and has started no thread.
    """
    # With any other number, NumPy's linear algebra would start threads when it is loaded.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with _ended_with(control):
        try:
            load_tensorflow(os.environ)
        except Exception:  # noqa: BLE001 - an installation may be broken in any way
            # Every server then loads TensorFlow itself, and has the error in its own log.
            traceback.print_exc()
            return False
    # If text stayed in the buffer, each forked server would print that text again.
    sys.stdout.flush()
    # The garbage collector does not write to frozen objects, so all servers share one copy of their memory.
    gc.collect()
    gc.freeze()
    return _is_single_threaded()


@contextlib.contextmanager
def _ended_with(control: socket.socket) -> Iterator[None]:
    """A scope in which this process ends if the other end of the socket is closed."""
    done = os.eventfd(0)

    def watch() -> None:
        poll = select.poll()
        # With an event mask of 0, `poll` reports only the end of the socket, and no requests that wait there.
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
    # The fork server copies the environment here, before `set_process_title` adds a variable.
    fork_server = ForkServer(socket.socket(fileno=0))
    set_process_title("coordinator fork server", "fork-server")
    fork_server.run()
