"""The process that local servers are forked from: it has TensorFlow loaded, and has not used it.

    python -m coordinator.launch.fork_server        its standard input is a socket; `zygote_process.py` has the other end

Loading TensorFlow is nearly all of what the start of a server takes; a server that is forked here starts in a fraction
of a second, and shares the memory that holds TensorFlow. The zygote promises

- that a forked server runs the same code as `coordinator serve` does;
- to fork no server from a process with several threads, which a fork would cut off in the middle of what they do, nor
  one with another environment than TensorFlow was loaded in: that server becomes a fresh process;
- to tell whoever asked for a server how it ended, and to end one that nobody waits for any more;
- to end, and all its servers with it, frozen ones too, as soon as the other end of the socket is closed.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import NoReturn

from coordinator.launch.command_line import main
from coordinator.launch.preload import load_for_forking
from coordinator.launch.spawned_process import SERVE_ARGUMENTS, SERVE_COMMAND

# Read by a server when it starts, and by CUDA when its first device is looked for.
_READ_LATE = frozenset({"TF_CONFIG", "CUDA_VISIBLE_DEVICES"})


@dataclasses.dataclass(frozen=True)
class _Child:
    """A server that was forked: its id, its descriptor, and where to tell of it."""

    pid: int
    descriptor: int
    report: socket.socket


class Zygote:
    """Forks servers until `control` is closed.

    Args:
      control: each message asks for one server, by descriptors: of its environment (a file, in JSON), of the folder to
        run in, its standard input, its log, and the socket for reports of it.
    """

    def __init__(self, control: socket.socket):
        self._control = control
        self._environment = dict(os.environ)
        self._children: list[_Child] = []
        self._poll = select.poll()
        self._may_serve = False
        self._found_handler = signal.getsignal(signal.SIGTERM)

    def run(self) -> NoReturn:
        """Loads TensorFlow, and forks; it ends the process."""
        self._may_serve = load_for_forking(self._control)
        # Until now it ended this process; from now on there are servers to be told of.
        self._found_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._poll.register(self._control, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            for child in tuple(self._children):
                if child.report.fileno() in ready:
                    # Closed at its other end: nobody waits for this server any more.
                    signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)
                elif child.descriptor not in ready:
                    continue
                self._bury(child)
            if self._control.fileno() in ready:
                self._take_request()

    def _take_request(self) -> None:
        _, descriptors, *_ = socket.recv_fds(self._control, 1, 5, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            self._end()
        request, folder, standard_input, log, report = descriptors
        with open(request, "rb") as file:
            environment = json.load(file)
        if child := self._forked(environment, folder, standard_input, log, report):
            self._watch(child)
        for descriptor in (folder, standard_input, log):
            os.close(descriptor)

    def _forked(
        self, environment: Mapping[str, str], folder: int, standard_input: int, log: int, report: int
    ) -> _Child | None:
        try:
            pid = os.fork()
        except OSError as error:
            # The report that says nothing, and this, tell what became of the server.
            os.write(log, f"coordinator: no process could be forked for this server: {error}.\n".encode())
            os.close(report)
            return None
        if pid == 0:
            os.close(report)
            self._become_server(environment, folder, standard_input, log)
        return _Child(pid, os.pidfd_open(pid), socket.socket(fileno=report))

    def _watch(self, child: _Child) -> None:
        self._children.append(child)
        self._poll.register(child.descriptor, select.POLLIN)
        self._poll.register(child.report, select.POLLIN)
        # If its other end is closed, the next look at the report finds that too.
        with contextlib.suppress(OSError):
            socket.send_fds(child.report, [str(child.pid).encode()], [child.descriptor])

    def _bury(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        with contextlib.suppress(OSError):
            child.report.send(str(os.waitstatus_to_exitcode(status)).encode())
        self._children.remove(child)
        self._poll.unregister(child.descriptor)
        self._poll.unregister(child.report)
        os.close(child.descriptor)
        child.report.close()

    def _end(self) -> NoReturn:
        for child in self._children:
            signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)
        # Python's own way out would first take apart all that was loaded.
        os._exit(0)

    def _become_server(self, environment: Mapping[str, str], folder: int, standard_input: int, log: int) -> NoReturn:
        """What a child does: all that a fresh process would be given, and then a server's work."""
        code = 1
        try:
            for descriptor, number in ((standard_input, 0), (log, 1), (log, 2)):
                os.dup2(descriptor, number)
            os.setsid()
            os.fchdir(folder)
            signal.signal(signal.SIGTERM, self._found_handler)
            for descriptor in (folder, standard_input, log):
                os.close(descriptor)
            for child in self._children:
                os.close(child.descriptor)
                child.report.close()
            if not (self._may_serve and _early(environment) == _early(self._environment)):
                os.execve(sys.executable, SERVE_COMMAND, environment)  # noqa: S606 - no shell is wanted
            for name in _READ_LATE:
                os.environ.pop(name, None)
            os.environ.update({name: environment[name] for name in _READ_LATE & environment.keys()})
            code = main(SERVE_ARGUMENTS)
        except BaseException:  # noqa: BLE001 - printed and ended with, as by a fresh process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment may be read when TensorFlow is loaded."""
    return {name: value for name, value in environment.items() if name not in _READ_LATE}


if __name__ == "__main__":
    Zygote(socket.socket(fileno=0)).run()
