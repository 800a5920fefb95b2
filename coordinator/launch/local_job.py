"""Runs a cluster, here or on other machines, and the user's program in each of its roles, for `coordinator run`.

    main thread     calls `JobStateMachine` for each event in turn; the state machine calls `LocalJob`
    signals         reports signals
    server-output   reads the servers' logs
    servers-ready   waits until every server answers, also a restarted one
    server-end      one for each start of a server: waits for its end
    program-...     of each program: its end and its output (`program_process.py`)

Guarantee: when `run` returns or raises, none of its threads and processes is left.
"""

import collections
import os
import pathlib
import queue
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial

from coordinator.addresses import PageAddress, parse_address, parse_page_address
from coordinator.background_thread import start_once
from coordinator.errors import LaunchError
from coordinator.launch.job_state_machine import JobStateMachine, Role, State, run_to_end
from coordinator.launch.program_process import Console, LogFollower, ProgramProcess, log_file
from coordinator.launch.run_request import RunRequest
from coordinator.launch.serve import SignalReader
from coordinator.launch.server_process import (
    LocalServers,
    ServerProcess,
    free_addresses,
    free_cluster,
    program_environment,
)
from coordinator.launch.ssh import SshHost, connect
from coordinator.launch.task_config import VISIBLE, TaskConfig, divide_gpus, visible_gpus
from coordinator.options import DASHBOARD, RESTART_COUNT, TRACE

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class LocalJob:
    """One run. Only the main thread may create and run it, because Python handles signals in the main thread.

    `log_folder` must exist; all processes inherit `environment`. `is_log_needed` is True if a server failed, whose log
    should be kept. `dashboard` is the dashboard's address, the same for all starts of the program. Raises LaunchError
    if there are too few GPUs or ports, or a host cannot be used.
    """

    def __init__(self, request: RunRequest, log_folder: pathlib.Path, environment: Mapping[str, str], console: Console):
        self.is_log_needed = False
        self._request = request
        self._found = environment
        self._log_folder = log_folder
        self._environment = {**environment, **dict(request.env)}
        if request.verbose:
            self._environment.setdefault(_LOG_LEVEL, "0")
        self._console = console
        self._roles = roles = tuple(Role) if request.evaluator or request.evaluator_workers else (Role.CHIEF,)
        self._hosts: Mapping[tuple[str, int], SshHost] = {}
        self._evaluator_gpus: str | None = None
        self._servers = self._create_servers()
        self.dashboard: PageAddress | None = None
        if request.dashboard is not None:
            taken = {address for cluster in self._clusters.values() for job in cluster.values() for address in job}
            self.dashboard = dashboard_address(request.dashboard, taken)
        self._programs: dict[Role, ProgramProcess] = {}
        self._starts: collections.Counter[Role] = collections.Counter()
        limits = request.evaluator_timeout, request.restarts, request.server_restarts
        self._state_machine = JobStateMachine(self, roles, *limits)
        # Each event is a call of the state machine.
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()

    def _create_servers(self) -> LocalServers:
        request, roles = self._request, self._roles
        if request.hosts:
            names = [role.value for role in roles]
            addresses, self._hosts, worker_gpus = connect(request, names, self._environment, self._found)
            self._clusters = dict.fromkeys(roles, addresses)
        else:
            self._clusters, worker_gpus = _clusters(request, roles), []
            if (per_worker := request.gpus_per_worker) is not None:
                gpus, workers = visible_gpus(self._environment), request.workers + request.evaluator_workers
                worker_gpus, self._evaluator_gpus = divide_gpus(gpus, workers, per_worker, "this machine has")
        of_training, own_gpus = self._clusters[Role.CHIEF], worker_gpus[: request.workers]
        servers = LocalServers(of_training, self._log_folder, self._environment, own_gpus, self._hosts)
        if request.evaluator_workers:
            own = self._clusters[Role.EVALUATOR]
            servers.add_cluster(own, Role.EVALUATOR.value, worker_gpus[request.workers :])
        return servers

    def run(self) -> int:
        """Runs the job to its end; returns the exit code. Raises LaunchError if a process could not be started."""
        machine = self._state_machine
        try:
            with SignalReader(_SIGNALS, lambda number: self._events.put(partial(machine.signal_received, number))):
                self._run_to_end()
        except LaunchError:
            # An earlier signal may have caused the error, because Ctrl-C also ends a process that has no session yet.
            while machine.state is State.STARTING and not self._events.empty():
                self._events.get()()
            if machine.state is not State.ENDED:
                raise
        return machine.exit_code

    def _run_to_end(self) -> None:
        self._server_output = LogFollower(self._console.forward_error, is_complete=self._request.tee)
        try:
            self._servers.start()
            for server in self._servers:
                if self._request.tee:
                    self._follow_log(server)
                self._watch_server(server)
            self._start_thread("coordinator-servers-ready", self._wait_servers_ready)
            run_to_end(self._state_machine, self._events)
        finally:
            self._close()

    def report(self, text: str) -> None:
        self._console.say(text)

    def start(self, role: Role) -> None:
        """Starts the program in a role; restarts a program that has ended."""
        if role in self._programs:
            self._programs[role].close()
        environment = self._program_environment(role)
        log_path = log_file(self._log_folder, f"{role.value}-0", self._starts[role])
        self._starts[role] += 1
        if self._request.log_dir is None:
            # The terminal does not show TensorFlow's error logs either. The strategy reports the important errors, and
            # only the first line of an error log can be told from the program's output.
            environment[_LOG_LEVEL] = self._environment.get(_LOG_LEVEL, "3")
        if role is Role.EVALUATOR:
            # The evaluator writes to a pipe, for which Python would buffer blocks.
            environment["PYTHONUNBUFFERED"] = "1"
        self._programs[role] = ProgramProcess(
            self._request.command,
            environment,
            on_line=None if role is Role.CHIEF else partial(self._console.forward, role.value),
            on_error_text=self._console.show,
            is_filtered=environment[_LOG_LEVEL] == "3",
            log_path=None if self._request.log_dir is None else log_path,
            is_copied=self._request.tee,
            on_end=lambda code: self._events.put(partial(self._state_machine.program_ended, role, code)),
        )

    def start_server(self, name: str) -> None:
        """Restarts a server that has ended, on the same port."""
        [server] = [server for server in self._servers if server.name == name]
        try:
            server.start()
        except LaunchError as error:
            self._console.say(str(error))
        self._follow_log(server)
        # A server that could not be started counts as a server that ended immediately.
        self._watch_server(server)

    def send(self, number: signal.Signals) -> None:
        for program in self._programs.values():
            program.send(number)

    def suspend(self) -> None:
        """Stops the programs and this process until the terminal continues this process."""
        self.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.send(signal.SIGCONT)

    def commands(self) -> list[str]:
        """Returns the shell command of each process, with the variables that are added to its environment."""
        program = [sys.executable, *self._request.command]
        commands = []
        for server in self._servers:
            if host := self._hosts.get((server.config.job, server.config.index)):
                commands.append(shlex.join(host.command(server.environment)))
            else:
                commands.append(self._command(server.environment, [sys.executable, "-m", "coordinator", "serve"]))
        return commands + [self._command(self._program_environment(role), program) for role in self._roles]

    def _command(self, environment: Mapping[str, str], command: list[str]) -> str:
        changed = (f"{name}={value}" for name, value in environment.items() if self._found.get(name) != value)
        return shlex.join(["env", *changed, *command])

    def _program_environment(self, role: Role) -> dict[str, str]:
        environment = program_environment(self._environment, TaskConfig(self._clusters[role], role.value, 0))
        # TensorFlow takes nearly all memory of each GPU that it sees.
        if role is Role.CHIEF and self._request.gpus_per_worker is not None:
            # The chief computes nothing.
            environment[VISIBLE] = ""
        elif role is Role.EVALUATOR and self._evaluator_gpus is not None:
            environment[VISIBLE] = self._evaluator_gpus
        if self.dashboard is not None and role is Role.CHIEF:
            environment[DASHBOARD] = str(self.dashboard)
        if self._request.trace is not None and role is Role.CHIEF:
            environment[TRACE] = str(self._request.trace)
        environment[RESTART_COUNT] = str(self._starts[role])
        return environment

    def _wait_servers_ready(self) -> None:
        def is_given_up(server: ServerProcess) -> bool:
            return self._is_closing.is_set() or server.name in self._state_machine.given_up

        try:
            self._servers.wait_ready(self._request.start_timeout, is_given_up)
        except LaunchError as error:
            self._servers_failed(str(error))
        else:
            for server in self._servers:
                self._follow_log(server)
            self._events.put(self._state_machine.servers_ready)

    def _servers_failed(self, reason: str) -> None:
        # Servers that this job is closing do not answer either, and their logs are not needed.
        self.is_log_needed = not self._is_closing.is_set()
        self._events.put(partial(self._state_machine.servers_failed, reason))

    def _follow_log(self, server: ServerProcess) -> None:
        source = " ".join(filter(None, [server.owner, server.config.job, str(server.config.index)]))
        self._server_output.follow(source, server.log_path)

    def _watch_server(self, server: ServerProcess) -> None:
        self._start_thread("coordinator-server-end", partial(self._wait_server_ended, server))

    def _wait_server_ended(self, server: ServerProcess) -> None:
        server.wait_ended()
        if self._is_closing.is_set():
            return
        has_served = server.has_served()
        if not has_served and server.starts == 1:
            self._servers_failed(server.failure())
        else:
            self.is_log_needed = True
            # On this machine a failed start counts towards the limit of restarts, because it would fail again.
            has_served = has_served or not self._hosts
            self._events.put(partial(self._on_server_ended, server, server.ending, has_served=has_served))

    def _on_server_ended(self, server: ServerProcess, ending: str, *, has_served: bool) -> None:
        consequence, log = self._consequence(server), str(server.log_path)
        self._state_machine.server_ended(server.name, ending, consequence, log, has_served=has_served)

    def _consequence(self, ended: ServerProcess) -> str:
        if ended.config.job == "ps":
            return "its variables are lost with it, and it is not started again"
        program = ended.owner or "program"
        workers = (server for server in self._servers if server.owner == ended.owner and server.config.job == "worker")
        if not any(worker.is_alive() for worker in workers):
            return f"no worker is left, so the {program} can only wait, and Ctrl-C ends it"
        return f"the {program} continues without it"

    def _close(self) -> None:
        self._is_closing.set()
        for program in self._programs.values():
            program.close()
        self._servers.close()
        self._server_output.close()
        for thread in self._threads:
            thread.join()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:  # noqa: BLE001 - the main thread raises it
                self._events.put(partial(_raise, error))

        self._threads.append(start_once(name, run))


def _raise(error: Exception) -> None:
    raise error


def _clusters(request: RunRequest, roles: Collection[Role]) -> dict[Role, dict[str, list[str]]]:
    servers = {"worker": request.workers, "ps": request.ps}
    if not request.evaluator_workers:
        return dict.fromkeys(roles, free_cluster(servers | {role.value: 1 for role in roles}))
    cluster = free_cluster(servers | {Role.CHIEF.value: 1})
    taken = [address for addresses in cluster.values() for address in addresses]
    own = {"worker": request.evaluator_workers, "ps": 1, Role.EVALUATOR.value: 1}
    return {Role.CHIEF: cluster, Role.EVALUATOR: free_cluster(own, besides=taken)}


def dashboard_address(text: str, taken: Collection[str]) -> PageAddress:
    """Returns a dashboard's address for all starts of a program, with a token, and with a port not in `taken` for 0."""
    address = parse_page_address(text, "--dashboard")
    if not address.port:
        [free] = free_addresses(1, besides=taken)
        address = address._replace(port=parse_address(free).port)
    return address if address.token else address._replace(token=secrets.token_urlsafe(16))
