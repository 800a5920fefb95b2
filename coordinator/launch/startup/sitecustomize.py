"""Runs when Python starts a program of `coordinator run`, before the program itself.

    sys.stderr: tracebacks, progress bars, logging  -->  the command's standard error
    descriptor 2: C++ code, child processes         -->  the command, which omits TensorFlow's logs; or a file

While TensorFlow is imported, it logs regardless of `TF_CPP_MIN_LOG_LEVEL`. Python's own output therefore gets another
descriptor than these logs. `sys.stderr` and the prompts of `input` still go to the terminal. Guarantees:

- On Linux, the kernel kills the program when the command that started the program is gone.
- The program has the same environment, `sys.path` and user's own `sitecustomize` as without this module.
- If the program configures no logging, each event of the library is a line that begins with the time at the left edge.
"""

import builtins
import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import logging
import os
import pathlib
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1


class _EventLines(logging.Filter):
    """A filter of the library's loggers that writes each record as a line, unless the program has configured logging.

    A call of `logging.basicConfig()` without arguments does not count, because libraries make such calls.
    """

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True if the program's own handlers take the record; otherwise writes the record and returns False."""
        if logging.getLogger("coordinator").handlers or not all(map(_is_basic, logging.getLogger().handlers)):
            return True
        # A progress bar may occupy the line.
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        sys.stderr.write(f"{clear}{moment} coordinator: {self._formatter.format(record)}\n")
        return False


def _is_basic(handler: logging.Handler) -> bool:
    sample = logging.makeLogRecord({"levelname": "level", "name": "name", "msg": "message"})
    return type(handler) is logging.StreamHandler and handler.format(sample) == "level:name:message"


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended before `prctl` was called.
            os.kill(os.getpid(), signal.SIGKILL)


def _name_process() -> None:
    """Names the process after its role, because lists of processes show the same command line for all roles."""
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/comm").write_text(role)


def _move_stderr(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    stream = open(  # noqa: SIM115 - for as long as the program runs
        descriptor, "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors
    )
    sys.stderr = stream
    sys.__stderr__ = stream  # type: ignore[misc]


def _move_prompts() -> None:
    """Makes `input` write its prompt to standard output if Python would write it to descriptor 2."""
    read = builtins.input

    @functools.wraps(read)
    def prompt_and_read(prompt: object = "", /) -> str:
        if "readline" in sys.modules:
            # `readline` redraws the line with the prompt, on standard output.
            return read(prompt)
        print(prompt, end="", flush=True)
        return read()

    builtins.input = prompt_and_read


def _remove_from_path() -> None:
    folder = str(pathlib.Path(__file__).parent)
    sys.path.remove(folder)
    folders = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    if not folders:
        del os.environ["PYTHONPATH"]


def _run_next() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "COORDINATOR_STARTUP" in os.environ:
    _parent, *_descriptors = map(int, os.environ.pop("COORDINATOR_STARTUP").split())
    _end_with(_parent)
    _name_process()
    for _descriptor in _descriptors:
        _move_stderr(_descriptor)
        _move_prompts()
    # A logger's filters do not see the records of the loggers below it.
    for _name in ("coordinator", "coordinator.events"):
        logging.getLogger(_name).addFilter(_EventLines())
    _remove_from_path()
    _run_next()
