"""An interpreter that has loaded TensorFlow, has not used it, and becomes the programs of tests by forking itself.

    python -m tests.preloaded_interpreter    its standard input is a socket; `program_runner.py` has the other end

    this process -- forks --> a supervisor of each program -- forks --> the program

Loading TensorFlow is most of what a short program takes. A forked program begins as a fresh one does: with its own
arguments, folder, environment, `__main__` and output; and it ends like one, with the interpreter. One that must be
fresh, or whose environment TensorFlow was not loaded in, replaces its copy by a new interpreter. The fork server of its
cluster is forked from the program, too.

The supervisor promises to report how its program ended, and to end as soon as no process of the program is left:
whatever a process of the program does, the kernel makes it a child of the supervisor when its own parent has ended.
"""

import builtins
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from typing import IO, Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
# Differs from test to test; nothing reads it.
_READ_BY_NOTHING = {"PYTEST_CURRENT_TEST"}
_MOST_DESCRIPTORS = 1 << 20
# Of the environment, what each server has its own value of, and what TensorFlow does not read.
_MAY_CHANGE = {
    "TF_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "GRPC_POLL_STRATEGY",
    "grpc_proxy",
    "PYTHONPATH",
}


class Request:
    """A program to become, as the JSON in the file `request` says.

    `report` is a socket for the messages `begun SUPERVISOR PID` and `ended CODE`; closed when no process is left.
    """

    def __init__(self, loaded_in: Mapping[str, str], request: int, output: int, errors: int, report: int):
        with open(request, encoding="utf-8") as file:
            self._wanted: dict[str, Any] = json.load(file)
        self._output = output
        self._errors = errors
        self._report = socket.socket(fileno=report)

        changed = {name for name, _ in set(self._wanted["environment"].items()) ^ set(loaded_in.items())}
        self._is_fresh = self._wanted["is_fresh"] or bool(changed - _READ_BY_NOTHING) or not load()

    def supervise(self) -> None:
        """Forks the program, and returns in the forked process; in this one, stays until all its processes ended."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program = os.fork()
        if program == 0:
            return
        os.close(0)
        self._report.send(f"begun {os.getpid()} {program}".encode())
        while True:
            try:
                process, status = os.wait()
            except ChildProcessError:
                os._exit(0)
            if process == program:
                self._report.send(f"ended {os.waitstatus_to_exitcode(status)}".encode())

    def begin(self) -> tuple[str, list[str]]:
        """Gives this process what a fresh one would have; returns the program's path and its arguments.

        If it needs a fresh interpreter, this does not return.
        """
        path, arguments, environment = (self._wanted[name] for name in ("path", "arguments", "environment"))
        self._report.close()
        with open(os.devnull, encoding="utf-8") as nothing:
            for descriptor, number in ((nothing.fileno(), 0), (self._output, 1), (self._errors, 2)):
                os.dup2(descriptor, number)
        os.close(self._output)
        os.close(self._errors)
        os.chdir(self._wanted["folder"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_fresh:
            os.execve(sys.executable, [sys.executable, path, *arguments], environment)  # noqa: S606 - no shell
        # What TensorFlow has set when it was loaded stays.
        os.environ.update(environment)
        return path, arguments

    def close(self) -> None:
        """Closes this process's copies of what the program has."""
        os.close(self._output)
        os.close(self._errors)
        self._report.close()


def wait_program(control: socket.socket) -> Request:
    """Forks a supervisor for each request, and returns in each of their programs; ends when `control` is closed."""
    # Ctrl-C on the terminal is for the tests and the programs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody waits for a supervisor: its report is closed when it ends.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    environment = dict(os.environ)
    while True:
        _, descriptors, *_ = socket.recv_fds(control, 1, 4, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            os._exit(0)
        request = Request(environment, *descriptors)
        if os.fork() == 0:
            # It is standard input, which the program gets another one in the place of.
            control.detach()
            request.supervise()
            return request
        request.close()


def load() -> bool:
    """Loads what most programs do, unless that is done; returns True if this process may be forked then."""
    if "tensorflow" not in sys.modules:
        # Otherwise NumPy's linear algebra starts threads.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        import pytest  # noqa: F401
        import tensorflow as tf  # noqa: F401

        import coordinator.testing
        import coordinator.updates

        del os.environ["OPENBLAS_NUM_THREADS"]
        _fork_fork_servers()
        for package in (coordinator, coordinator.testing, coordinator.updates):
            for name in package.__all__:
                getattr(package, name)
        # What the collector does not look at is not written to, and stays one copy for all programs.
        gc.collect()
        gc.freeze()
    return len(os.listdir("/proc/self/task")) == 1


def _fork_fork_servers() -> None:
    """Makes this process fork its fork servers, which have TensorFlow loaded then, instead of starting interpreters."""
    from coordinator.launch import server_starter

    def start(
        command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: int, env: Mapping[str, str], **options: bool
    ) -> "subprocess.Popen[bytes] | _Forked":
        changed = {name for name in env.keys() | os.environ.keys() if env.get(name) != os.environ.get(name)}
        if changed - _MAY_CHANGE or not load():
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, **options)
        pid = os.fork()
        if pid == 0:
            _serve_forks(stdin, stdout.fileno(), env)
        return _Forked(pid)

    server_starter.subprocess = types.SimpleNamespace(
        Popen=start, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )


def _serve_forks(control: int, log: int, environment: Mapping[str, str]) -> NoReturn:
    from coordinator.launch import fork_server

    try:
        for descriptor, number in ((control, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, number)
        os.closerange(3, _MOST_DESCRIPTORS)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        fork_server.ForkServer(socket.socket(fileno=0)).run()
    finally:
        os._exit(1)


class _Forked:
    """What `server_starter` uses of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def run(path: str, arguments: Sequence[str]) -> None:
    """Runs a program as the interpreter does that is started with it."""
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(path)
    loader = SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)  # noqa: S102 - what this process is for


if __name__ == "__main__":
    run(*wait_program(socket.socket(fileno=0)).begin())
