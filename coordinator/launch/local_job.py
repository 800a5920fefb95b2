"""A local cluster, and the user's program in each of its roles.

    main thread     takes one event after the other, asks `JobCourse` what to do, and does it
    signals         reports signals
    servers-ready   waits until every server answers
    server-end      one for each server: waits for its end
    program-end     one for each program: waits for its end
    program-output  forwards what the evaluator prints

It promises that no thread and no process that it started is left when `run` returns or raises.
"""

import os
import pathlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coordinator.errors import LaunchError
from coordinator.launch import job_events as events
from coordinator.launch.child_environment import program_environment
from coordinator.launch.console import Console
from coordinator.launch.free_addresses import free_addresses
from coordinator.launch.job_events import Role
from coordinator.launch.job_state_machine import JobCourse, State
from coordinator.launch.local_servers import LocalServers
from coordinator.launch.program_process import ProgramProcess
from coordinator.launch.run_request import RunRequest
from coordinator.launch.server_process import ServerProcess
from coordinator.launch.signal_reader import SignalReader
from coordinator.launch.task_config import TaskConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class LocalJob:
    """One run. It must be made and run in the main thread, which is where Python handles signals.

    Args:
      request: what is to be run.
      log_folder: an existing folder for the servers' logs.
      environment: the environment that all processes inherit.
      console: where to tell the user what happens.

    Attributes:
      is_log_needed: whether a server failed, so that its log is worth keeping.
    """

    def __init__(self, request: RunRequest, log_folder: pathlib.Path, environment: Mapping[str, str], console: Console):
        self.is_log_needed = False
        self._request = request
        self._environment = environment
        self._console = console
        self._roles = tuple(Role) if request.evaluator else (Role.CHIEF,)
        self._cluster = _cluster(request, self._roles)
        configs = [self._task(job, index) for job in ("worker", "ps") for index in range(len(self._cluster[job]))]
        self._servers = LocalServers(configs, log_folder, environment)
        self._programs: dict[Role, ProgramProcess] = {}
        self._course = JobCourse(frozenset(self._roles), request.evaluator_timeout, request.restarts)
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()

    def run(self) -> int:
        """Runs the job to its end; returns the exit code of the command.

        Raises:
          LaunchError: a process could not be started at all.
        """
        try:
            with SignalReader(_SIGNALS, lambda number: self._events.put(events.SignalReceived(number))):
                self._run_course()
        except LaunchError:
            if not self._is_ended_by_signal():
                raise
        return self._course.exit_code

    def _run_course(self) -> None:
        try:
            self._servers.start()
            self._start_thread("coordinator-servers-ready", self._wait_servers_ready)
            while self._course.state is not State.ENDED:
                for action in self._course.advance(self._next_event(), time.monotonic()):
                    self._carry_out(action)
        finally:
            self._close()

    def _is_ended_by_signal(self) -> bool:
        """Whether a signal came before the failure: Ctrl-C ends a server that has no session of its own yet, too."""
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, events.SignalReceived):
                self._course.advance(event, time.monotonic())
        return self._course.state is State.ENDED

    def _next_event(self) -> events.Event:
        deadline = self._course.deadline
        try:
            return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return events.TimePassed()

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Say(text):
                self._console.say(text)
            case events.StartPrograms():
                self._start_programs()
            case events.StartAgain(role):
                self._programs[role].close()
                self._programs[role] = self._start_program(role)
            case events.SendSignal(number):
                self._send(number)
            case events.Suspend():
                self._send(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._send(signal.SIGCONT)

    def _start_programs(self) -> None:
        for server in self._servers:
            self._start_thread("coordinator-server-end", partial(self._wait_server_ended, server))
        for role in self._roles:
            self._programs[role] = self._start_program(role)

    def _start_program(self, role: Role) -> ProgramProcess:
        environment = program_environment(self._environment, self._task(role.value, 0))
        if role is Role.EVALUATOR:
            # Its output is a pipe, which Python would fill by the block.
            environment["PYTHONUNBUFFERED"] = "1"
        return ProgramProcess(
            [str(self._request.program), *self._request.arguments],
            environment,
            on_line=None if role is Role.CHIEF else partial(self._console.forward, role.value),
            on_end=lambda code: self._events.put(events.ProgramEnded(role, code)),
        )

    def _send(self, number: signal.Signals) -> None:
        for program in self._programs.values():
            program.send(number)

    def _wait_servers_ready(self) -> None:
        try:
            self._servers.wait_ready(self._request.start_timeout)
        except LaunchError as error:
            # Servers that are being ended do not answer either.
            self.is_log_needed = not self._is_closing.is_set()
            self._events.put(events.ServersFailed(str(error)))
        else:
            self._events.put(events.ServersReady())

    def _wait_server_ended(self, server: ServerProcess) -> None:
        server.wait_ended()
        if not self._is_closing.is_set():
            self.is_log_needed = True
            self._events.put(events.ServerEnded(server.config.name, str(server.log_path)))

    def _close(self) -> None:
        self._is_closing.set()
        for program in self._programs.values():
            program.close()
        self._servers.close()
        for thread in self._threads:
            thread.join()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _task(self, job: str, index: int) -> TaskConfig:
        return TaskConfig(self._cluster, job, index)


def _cluster(request: RunRequest, roles: Sequence[Role]) -> dict[str, list[str]]:
    counts = {"worker": request.workers, "ps": request.ps, **{role.value: 1 for role in roles}}
    addresses = iter(free_addresses(sum(counts.values())))
    return {job: [next(addresses) for _ in range(count)] for job, count in counts.items()}
