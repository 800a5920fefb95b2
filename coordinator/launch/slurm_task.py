"""What each task of `srun coordinator slurm` does.

    chief        waits until each server answers, then runs the program, and tells all others how that ended
    ps, worker   runs `coordinator serve`, and starts it again when it ends, until the program has ended
    evaluator    runs the program as evaluator; may continue for a while after the chief's has ended

Each has a link to the chief's task (`rendezvous.py`), whose end ends it too. Slurm sends a signal to all processes of a
step. It reaches the program directly; these tasks ignore it, and so do servers, so that the program can still save a
checkpoint. Promises: the chief's task ends with the code of the program, a server's with 0, once training has begun.
"""

import contextlib
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from coordinator.background_thread import start_once
from coordinator.errors import LaunchError
from coordinator.heartbeat.task_probe import TaskProbe
from coordinator.launch import rendezvous
from coordinator.launch.console import Console
from coordinator.launch.job_state_machine import RestartDelays
from coordinator.launch.local_job import dashboard_address
from coordinator.launch.local_servers import free_addresses
from coordinator.launch.program_process import ProgramProcess
from coordinator.launch.rendezvous import Link
from coordinator.launch.run_request import RunRequest
from coordinator.launch.serve import UNUSABLE, serving_line
from coordinator.launch.server_process import program_environment, server_environment
from coordinator.launch.slurm_step import KEY, SlurmStep, role_of
from coordinator.launch.task_config import TaskConfig
from coordinator.program_settings import DASHBOARD, RESTART_COUNT, TRACE

# Those that Slurm sends to a step: by `scancel`, at its time limit, and by `--signal`.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# How long the evaluator may take to end on SIGTERM, in seconds.
_TERMINATE_GRACE = 5.0
_PROBE_INTERVAL = 0.2
# How often another port is tried, if one is taken just before the server listens there.
_MOST_PORTS = 5


class SlurmTask:
    """One task. The main thread must create it and run it.

    Args:
      step: the step that it is a task of.
      request: what to run. Its workers are those of the step.
      environment: of this process.
      console: reports to the user what happens.
    """

    def __init__(self, step: SlurmStep, request: RunRequest, environment: Mapping[str, str], console: Console):
        self._step = step
        self._request = request
        self._environment = {
            **{name: value for name, value in environment.items() if name != KEY},
            # The chief's and the evaluator's output is a pipe, which Python would fill by the block.
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "3"),
            RESTART_COUNT: environment.get("SLURM_RESTART_COUNT", "0"),
        }
        self._console = console
        self._job, self._index = role_of(step.rank, request.workers, request.ps)
        # All tasks run on this machine, on however many nodes of Slurm.
        self._is_local = step.nodes == 1
        self._restarts, self._delays = request.server_restarts, RestartDelays()
        # The server has said that it serves.
        self._has_served = threading.Event()
        # Exit codes of the process, and messages of the chief; None for its end.
        self._events: queue.SimpleQueue[int | dict[str, Any] | None] = queue.SimpleQueue()

    def run(self) -> int:
        """Runs the task to its end; returns its exit code.

        Raises:
          LaunchError: the others were not found, or a process could not be started at all.
        """
        if self._job == "chief":
            return self._run_chief()
        step, timeout = self._step, self._request.start_timeout
        host = step.first_host()
        deadline = time.monotonic() + timeout
        with contextlib.closing(rendezvous.connect(step.name, step.rank, host, timeout, key=step.key)) as link:
            message = self._first_message(link, deadline)
            if "ended" in message:
                return int(message["ended"])
            self._is_local = bool(message["is_local"])
            start_once("coordinator-slurm-link", partial(self._read, link), lambda _: self._events.put(None))
            return self._run_evaluator() if self._job == "evaluator" else self._run_server(link)

    def _first_message(self, link: Link, deadline: float) -> dict[str, Any]:
        """Waits until the chief's task, which has a connection to each, says whether all are on one machine.

        Returns:
          `is_local`, or `ended` with an exit code if the chief's task cannot run the program, and has said why.
        """
        try:
            message = link.receive(max(0.01, deadline - time.monotonic()))
        except TimeoutError:
            message = None
        if message is None:
            raise LaunchError("The first task ended, or found no other one in time; it says above why.")
        return message

    def _run_chief(self) -> int:
        step, timeout = self._step, self._request.start_timeout
        deadline = time.monotonic() + timeout
        if not step.key:
            self._console.say(
                f"{KEY} is not set: until all tasks have started, others who reach the nodes can pose as one of them. "
                "docs/slurm.md says how to set it."
            )
        with contextlib.ExitStack() as opened:
            ranks = range(1, step.tasks)
            links = rendezvous.accept(step.name, ranks, is_local=self._is_local, timeout=timeout, key=step.key)
            for link in links.values():
                opened.callback(link.close)
            try:
                self._request.check_files()
            except LaunchError as error:
                # All others wait for this task.
                self._console.say(str(error))
                for link in links.values():
                    link.send(ended=UNUSABLE)
                return UNUSABLE
            self._is_local = all(_is_loopback(link.host) for link in links.values())
            for link in links.values():
                link.send(is_local=self._is_local)
            cluster = self._gathered(links, deadline)
            for link in links.values():
                link.send(cluster=cluster)
            code = self._run_program(cluster)
            for link in links.values():
                link.send(ended=code)
        return code

    def _gathered(self, links: Mapping[int, Link], deadline: float) -> dict[str, list[str]]:
        """Waits until all servers answer; returns the cluster."""
        host = self._host(*links.values())
        cluster: dict[str, list[str]] = {"chief": [_free_address(host)], "ps": [], "worker": []}
        for rank, link in sorted(links.items()):
            job, index = role_of(rank, self._request.workers, self._request.ps)
            if job == "evaluator":
                # It does not serve; the address is a formality.
                cluster[job] = [_free_address(host)]
                continue
            what = f"/job:{job}/task:{index} (task {rank} of the step)"
            try:
                message = link.receive(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                raise LaunchError(f"{what} does not serve {self._request.start_timeout:g} s after the start.") from None
            if message is None:
                raise LaunchError(f"{what} ended before it served; it says above why.")
            cluster[job].append(message["address"])
        return cluster

    def _run_program(self, cluster: Mapping[str, list[str]]) -> int:
        """Runs the program in the role of this task; returns its code, as a shell does."""
        received: list[int] = []
        for number in _SIGNALS:
            # Not ignored: the program would inherit that.
            signal.signal(number, lambda number, _: received.append(number))
        environment = program_environment(self._environment, TaskConfig(cluster, self._job, self._index))
        if self._request.dashboard is not None:
            page = dashboard_address(self._request.dashboard, taken=cluster["chief"])
            environment[DASHBOARD] = str(page)
            self._console.say(f"the dashboard is at {page.url} once the program has created its strategy.")
        if self._request.trace is not None:
            environment[TRACE] = str(self._request.trace)
        program = self._start_program(environment)
        if received:
            program.send(signal.Signals(received[0]))
        code = None
        while not isinstance(code, int):
            code = self._events.get()
        program.close()
        _ignore_signals()
        return 128 - code if code < 0 else code

    def _run_evaluator(self) -> int:
        cluster = self._events.get()
        if not isinstance(cluster, dict):
            return 0
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        environment = program_environment(self._environment, TaskConfig(cluster["cluster"], "evaluator", 0))
        program = self._start_program(environment)
        own: int | None = None
        chief: int | None = None
        while chief is None:
            event = self._events.get()
            if isinstance(event, int):
                own = event
                if own:
                    self._console.say(f"the evaluator ended with code {own}; training continues without it.")
            else:
                # Without a message, the chief's task was killed.
                chief = 1 if event is None else event["ended"]
        if chief == 0 and own is None:
            own = self._wait_ended(self._request.evaluator_timeout)
        if own is None:
            program.send(signal.SIGTERM)
            self._wait_ended(_TERMINATE_GRACE)
        program.close()
        _ignore_signals()
        if chief or own is None:
            return 0
        return 128 - own if own < 0 else own

    def _run_server(self, link: Link) -> int:
        # The server inherits that.
        _ignore_signals()
        server, address = self._start_server(link)
        link.send(address=address)
        # When the server is to be started again.
        due: float | None = None
        while True:
            try:
                event = self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = None
                server.close()
                server = self._serve(address)
                continue
            if event is None or (isinstance(event, dict) and "ended" in event):
                break
            if isinstance(event, int):
                due = self._time_of_restart(event)
        server.close()
        return 0

    def _time_of_restart(self, code: int) -> float | None:
        """Reports that the server has ended; returns when it is to be started again, or None."""
        name = f"/job:{self._job}/task:{self._index}"
        if self._restarts == 0:
            self._console.say(f"{name} ended with code {code}, and is not started again.")
            return None
        self._restarts -= 1
        delay = self._delays.next(name)
        when = f" in {delay:g} s" if delay else ""
        self._console.say(f"{name} ended with code {code}: starting it again{when}; {self._restarts} more restarts.")
        return time.monotonic() + delay

    def _start_server(self, link: Link) -> tuple[ProgramProcess, str]:
        """Starts the server on a free port; returns it, and its address, when it answers.

        One that has served and has ended by then is returned as well: its exit code is the next event.

        Raises:
          LaunchError: it ended before it served, or did not answer in time.
        """
        deadline = time.monotonic() + self._request.start_timeout
        for _ in range(_MOST_PORTS):
            address = _free_address(self._host(link))
            server = self._serve(address)
            with TaskProbe(address) as probe:
                code: int | None = None
                while code is None and time.monotonic() < deadline:
                    if probe.status(1.0) is not None:
                        return server, address
                    with contextlib.suppress(queue.Empty):
                        event = self._events.get(timeout=_PROBE_INTERVAL)
                        if event is None:
                            raise LaunchError("The first task ended while the servers started; it says why.")
                        code = event if isinstance(event, int) else code
            if code is not None and self._has_served.is_set():
                self._events.put(code)
                return server, address
            server.close()
            if code != UNUSABLE:
                break
        seconds = self._request.start_timeout
        reason = f"ended with code {code} before it served"
        if code is None:
            reason = f"does not answer {seconds:g} s after its start"
        raise LaunchError(f"/job:{self._job}/task:{self._index} {reason}.")

    def _serve(self, address: str) -> ProgramProcess:
        config = TaskConfig({self._job: {self._index: address}}, self._job, self._index)
        task = ["--job", self._job, "--index", str(self._index), "--address", address]
        label, begin = f"{self._job} {self._index}", serving_line(config)

        def on_line(line: str) -> None:
            if line.startswith(begin):
                self._has_served.set()
            self._console.forward(label, line)

        environment = server_environment(self._environment, config)
        return self._start(["-m", "coordinator", "serve", *task], environment, on_line)

    def _start_program(self, environment: Mapping[str, str]) -> ProgramProcess:
        is_plain = self._job == "chief" and os.isatty(sys.stdout.fileno())
        on_line = None if is_plain else partial(self._console.forward, self._job)
        return self._start(self._request.command, environment, on_line)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None] | None
    ) -> ProgramProcess:
        return ProgramProcess(
            command,
            environment,
            on_line=on_line,
            on_error_text=self._console.show,
            is_filtered=environment["TF_CPP_MIN_LOG_LEVEL"] == "3",
            log_path=None,
            on_end=self._events.put,
        )

    def _wait_ended(self, seconds: float) -> int | None:
        """Waits for the end of the process; returns its code, or None if it did not end."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=left)
                if isinstance(event, int):
                    return event
        return None

    def _read(self, link: Link) -> None:
        while (message := link.receive()) is not None:
            self._events.put(message)
        self._events.put(None)

    def _host(self, *links: Link) -> str:
        """Returns the host by which the others reach this one: the address of its links, if that says it."""
        if self._is_local:
            return "127.0.0.1"
        return next((link.host for link in links if not _is_loopback(link.host)), socket.gethostname())


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _free_address(host: str) -> str:
    [address] = free_addresses(1)
    return address.replace("127.0.0.1", host)
