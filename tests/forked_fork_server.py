"""The fork server of a program's servers, forked from the program, which has loaded TensorFlow already.

`coordinator.launch.server_starter` starts an interpreter for it, which loads TensorFlow. In a program of a test that is
most of the work; nothing of TensorFlow runs yet when a program starts its cluster, so a fork does as well.
"""

import os
import signal
import socket
import subprocess
import types
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from coordinator.launch import fork_server, server_starter

_MOST_DESCRIPTORS = 1 << 20
# Of the environment, what each server has its own value of, and what TensorFlow does not read.
_MAY_CHANGE = {"TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "grpc_proxy", "PYTHONPATH"}


def fork_it(may_fork: Callable[[], bool]) -> None:
    """Makes this process fork its fork servers, if `may_fork` returns True and the environment is still the same."""

    def start(
        command: Sequence[str], *, stdin: int, stdout: IO[bytes], stderr: int, env: Mapping[str, str], **options: bool
    ) -> "subprocess.Popen[bytes] | _Forked":
        changed = {name for name in env.keys() | os.environ.keys() if env.get(name) != os.environ.get(name)}
        if changed - _MAY_CHANGE or not may_fork():
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, **options)
        pid = os.fork()
        if pid == 0:
            _serve(stdin, stdout.fileno(), env)
        return _Forked(pid)

    server_starter.subprocess = types.SimpleNamespace(
        Popen=start, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )


def _serve(control: int, log: int, environment: Mapping[str, str]) -> NoReturn:
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
