"""Runs one task of `srun coordinator slurm`. The role of a task follows from its number in the step of the Slurm job.

    task 0                  chief: waits until each server answers, runs the program, tells the others its exit code
    1 .. ps, the rest       parameter servers and workers: run `coordinator serve`, and start it again when it ends
    the last, if wanted     evaluator: runs the program as evaluator, which may continue for a while after the chief

Each task has its own `JobStateMachine`, and a link to the chief's task. When the chief's task ends, all other tasks
end, the evaluator after a while. Slurm sends a signal to all processes of a step. The program receives the signal
directly. Tasks and servers ignore the signal, so that the program can still save a checkpoint. The chief's task exits
with the program's code, and a server's task with 0 once training has begun.

The tasks find each other without a fixed port and without a shared folder:

    first     listens on the first free port of a sequence that follows from the group's name
    others    try all ports of the same sequence on the first one's host, until one answers as the first of the group

    other -> first   {"group", "rank", "nonce"}
    first -> other   {"nonce", "proof"}     the proof is an HMAC of all that was said, by the key of the group
    other -> first   {"proof"}
    first -> other   {"accepted": true}

The connections stay open, and carry JSON objects. Each object has an HMAC by a key that follows from the group's key
and both nonces. However a process ends, its connections end too. Guarantees:

- No process without the group's key is accepted. An empty key gives no protection.
- Other programs that use one of the ports are not disturbed, and delay no task. All connections are made and answered
  at the same time. If too many connections are unanswered, the oldest one is closed.
- Every wait has one deadline in all. The first task closes the port when all tasks have connected.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import os
import queue
import random
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from coordinator.background_thread import start_once
from coordinator.errors import LaunchError
from coordinator.launch.job_state_machine import Job, JobStateMachine, Role, run_to_end
from coordinator.launch.local_job import dashboard_address
from coordinator.launch.program_process import Console, ProgramProcess
from coordinator.launch.run_request import RunRequest
from coordinator.launch.serve import UNUSABLE, serving_line
from coordinator.launch.server_process import (
    PORTS,
    free_addresses,
    program_environment,
    server_environment,
    wait_answer,
)
from coordinator.launch.server_starter import ending_of
from coordinator.launch.task_config import TaskConfig
from coordinator.options import DASHBOARD, RESTART_COUNT, TRACE
from coordinator.time_limit import time_limit

# The environment variable with the group's key, a secret that only the user's own processes can read.
KEY = "COORDINATOR_SLURM_KEY"
# The maximum number of ports on which a server is started. Another program may take a port before the server listens.
_MOST_PORTS = 5
_TRIED_PORTS = 32
# How long the first process, and another process, wait for a greeting on a new connection, in seconds. The first
# process gives up earlier, so that no other process gives up a connection that the first process has accepted.
_GREETING_TIMEOUT, _ANSWER_TIMEOUT = 10.0, 20.0
# The maximum number of unfinished greetings, and after how many seconds a new greeting may replace an unfinished one.
_MOST_GREETINGS, _SHORTEST_GREETING = 256, 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_LONGEST_GREETING = 4096
_LONGEST_MESSAGE = 1_000_000
# Errors that greetings of other programs or protocols cause.
_STRANGE = (OSError, ValueError, LookupError, TypeError, RecursionError)


class TaskLink:
    """A connection to another process of the group. One thread may send, and one thread may receive.

    `key` is for this connection only. `is_first` is True in the first process. `received` has bytes already read.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_first: bool, received: bytes = b"") -> None:
        self._connection = connection
        self._key = key
        self._own, self._others = ("first", "other") if is_first else ("other", "first")
        self._sent = self._received = 0
        self._buffer = bytearray(received)

    @property
    def host(self) -> str:
        """The IP address at which the other process reaches this machine."""
        address = ipaddress.ip_address(self._connection.getsockname()[0])
        return str(getattr(address, "ipv4_mapped", None) or address)

    def send(self, **message: Any) -> None:
        """Sends an object; does nothing if the other process has ended."""
        text = json.dumps(message)
        line = f"{_proof(self._key, self._own, self._sent, text)} {text}\n"
        self._sent += 1
        with contextlib.suppress(OSError):
            self._connection.sendall(line.encode())

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next object; None if the other process has ended or sends something else. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while b"\n" not in self._buffer and len(self._buffer) < _LONGEST_MESSAGE:
                if deadline is not None:
                    poll = select.poll()
                    poll.register(self._connection, select.POLLIN)
                    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                        raise TimeoutError
                if not (chunk := self._connection.recv(65_536)):
                    return None
                self._buffer += chunk
            line, _, rest = bytes(self._buffer).partition(b"\n")
            self._buffer = bytearray(rest)
            proof, _, text = line.decode().partition(" ")
            is_genuine = hmac.compare_digest(proof, _proof(self._key, self._others, self._received, text))
            self._received += 1
            message = json.loads(text) if is_genuine else None
        except TimeoutError:
            raise
        except (OSError, ValueError, TypeError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the connection; a receiving thread gets None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def accept(
    group: str, ranks: Collection[int], *, is_local: bool, timeout: float, key: bytes = b""
) -> dict[int, TaskLink]:
    """Waits, as the first process of a group, for the other processes `ranks`; returns the link to each.

    `is_local` is True if all processes run on this machine. `timeout` is in seconds. No process outside the group knows
    the `key`. Raises a LaunchError that names the processes that did not connect.
    """
    with _listening(group, "127.0.0.1" if is_local else "") as listener:
        greetings = _Greetings(group, ranks, key)
        asyncio.run(greetings.take(listener, timeout))
    if missing := greetings.missing:
        for link in greetings.links.values():
            link.close()
        raise LaunchError(f"The tasks {', '.join(map(str, sorted(missing)))} did not start within {timeout:g} s.")
    return greetings.links


class _Greetings:
    """Answers the processes that connect to the first process.

    `links` has the link to each connected process, by its number. `missing` has the numbers of the other processes.
    """

    def __init__(self, group: str, ranks: Collection[int], key: bytes) -> None:
        self.links: dict[int, TaskLink] = {}
        self.missing = set(ranks)
        self._group, self._key = group, key
        # Unfinished greeting -> the time at which it began, oldest first.
        self._tasks: dict[asyncio.Task[None], float] = {}
        self._complete = asyncio.Event()

    async def take(self, listener: socket.socket, timeout: float) -> None:
        """Accepts connections until no process is missing, or for `timeout` seconds."""
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))
        if self.missing:
            with contextlib.suppress(TimeoutError):
                async with time_limit(timeout):
                    await self._complete.wait()
        # A cancelled `sock_accept` may lose a connection without closing it. After `shutdown`, `sock_accept` fails.
        self._complete.set()
        listener.shutdown(socket.SHUT_RDWR)
        await accepting
        await _ended(self._tasks)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            while len(self._tasks) >= _MOST_GREETINGS:
                oldest, began = next(iter(self._tasks.items()))
                await asyncio.sleep(max(0.0, began + _SHORTEST_GREETING - time.monotonic()))
                oldest.cancel()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                if self._complete.is_set():
                    return
                # The peer is gone, or this process has too many open files.
                await asyncio.sleep(_SHORTEST_PAUSE)
                continue
            task = asyncio.create_task(self._greet(connection))
            self._tasks[task] = time.monotonic()
            task.add_done_callback(self._tasks.pop)

    async def _greet(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(*_STRANGE):
            opened.enter_context(connection)
            connection.setblocking(False)
            async with time_limit(_GREETING_TIMEOUT):
                hello = json.loads((await _received(connection))[0])
                rank, nonce = hello["rank"], secrets.token_hex()
                if hello["group"] != self._group or type(rank) is not int or rank not in self.missing:
                    return
                said = self._group, rank, str(hello["nonce"]), nonce
                await _send(connection, nonce=nonce, proof=_proof(self._key, "first", *said))
                line, rest = await _received(connection)
                # Another connection of the same rank may have been accepted before.
                if not _is_proof(json.loads(line), self._key, "other", *said) or rank not in self.missing:
                    return
            connection.setblocking(True)
            opened.pop_all()
            link = TaskLink(connection, _proof(self._key, "link", *said).encode(), is_first=True, received=rest)
            link.send(accepted=True)
            self.links[rank] = link
            self.missing.remove(rank)
            if not self.missing:
                self._complete.set()


def connect(group: str, rank: int, host: str, timeout: float, *, key: bytes = b"") -> TaskLink:
    """Connects, as the process `rank`, to the first process, on `host`. Raises LaunchError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    addresses = _addresses(host, deadline)
    link = asyncio.run(_connect(addresses, group, rank, key, deadline)) if addresses else None
    if link is None:
        raise LaunchError(f"The first task, on {host}, did not answer within {timeout:g} s. Is the host reachable?")
    return link


async def _connect(addresses: Collection[str], group: str, rank: int, key: bytes, deadline: float) -> TaskLink | None:
    """Tries all ports at the same time, repeatedly, until the deadline."""

    async def find(address: str, port: int) -> TaskLink:
        pause = _SHORTEST_PAUSE
        while True:
            # Another program may use the port, and send anything or nothing.
            with contextlib.suppress(*_STRANGE):
                async with time_limit(_ANSWER_TIMEOUT):
                    return await _introduced(address, port, group, rank, key)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    tasks = [asyncio.create_task(find(address, port)) for address in addresses for port in _ports(group)]
    left = max(0.0, deadline - time.monotonic())
    done, rest = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    await _ended(rest)
    return done.pop().result() if done else None


async def _introduced(address: str, port: int, group: str, rank: int, key: bytes) -> TaskLink:
    """Connects to a port as a process of the group.

    Raises an error of `_STRANGE` if the first process does not listen there, or does not expect this process.
    """
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
        own = secrets.token_hex()
        await _send(connection, group=group, rank=rank, nonce=own)
        answer = json.loads((await _received(connection))[0])
        said = group, rank, own, str(answer["nonce"])
        if not _is_proof(answer, key, "first", *said):
            raise ValueError("another program, or one with another key")
        await _send(connection, proof=_proof(key, "other", *said))
        line, rest = await _received(connection)
        own_key = _proof(key, "link", *said).encode()
        link = TaskLink(connection, own_key, is_first=False, received=line + b"\n" + rest)
        if link.receive(0.0) != {"accepted": True}:
            raise ValueError("the first process does not expect this one")
        connection.setblocking(True)
        opened.pop_all()
        return link


def _proof(key: bytes, *said: object) -> str:
    return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()


def _is_proof(message: dict[str, Any], key: bytes, *said: object) -> bool:
    return hmac.compare_digest(str(message["proof"]).encode(), _proof(key, *said).encode())


async def _send(connection: socket.socket, **message: object) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(message).encode() + b"\n")


async def _received(connection: socket.socket) -> tuple[bytes, bytes]:
    """Returns the next line, and the bytes after it."""
    received = b""
    while b"\n" not in received:
        chunk = await asyncio.get_running_loop().sock_recv(connection, _LONGEST_GREETING)
        received += chunk
        if not chunk or len(received) > _LONGEST_GREETING:
            raise ValueError("no line of a process of a group")
    line, _, rest = received.partition(b"\n")
    return line, rest


async def _ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _addresses(host: str, deadline: float) -> list[str]:
    """Returns the addresses of a host, or an empty list if the host's name is not resolved by the deadline."""
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    is_over = threading.Event()

    def resolve() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                found.put([str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)])
                return
            is_over.wait(_LONGEST_PAUSE)

    # The name is resolved on a thread, because `getaddrinfo` cannot be interrupted.
    start_once("coordinator-resolver", resolve, lambda _: found.put([]))
    try:
        return found.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return []
    finally:
        is_over.set()


def _ports(group: str) -> list[int]:
    return random.Random(group).sample(PORTS, _TRIED_PORTS)


def _listening(group: str, host: str) -> socket.socket:
    for port in _ports(group):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), backlog=1024)
    raise LaunchError(f"None of {_TRIED_PORTS} ports between {PORTS.start} and {PORTS.stop} is free on this host.")


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """A task of a Slurm step, as Slurm's environment variables describe it.

    `name` is unique in the cluster; `rank` is the number of this task; `tasks` and `nodes` are counts, `node_list` has
    the nodes' names in Slurm's abbreviation. The tasks recognize each other by `key`, which may be empty.
    """

    name: str
    rank: int
    tasks: int
    nodes: int
    node_list: str
    key: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "SlurmStep":
        """Reads the variables of `srun`, and the key; raises LaunchError if this process is not a task of a step."""
        try:
            names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            return cls(
                name=".".join(environment.get(name, "") for name in names),
                rank=int(environment["SLURM_PROCID"]),
                tasks=int(environment["SLURM_STEP_NUM_TASKS"]),
                nodes=int(environment["SLURM_STEP_NUM_NODES"]),
                node_list=environment["SLURM_STEP_NODELIST"],
                key=os.fsencode(environment.get(KEY, "")),
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"This is no task of a Slurm step ({error} is not set as srun does it). Start it by srun: "
                "srun --ntasks 6 coordinator slurm --ps 2 program.py"
            ) from None

    def workers(self, ps: int, *, evaluator: bool) -> int:
        """Returns how many tasks are workers; raises LaunchError if none is left for a worker."""
        others = 1 + ps + evaluator
        if self.tasks <= others:
            roles = f"a chief, {ps} parameter servers and {'an evaluator' if evaluator else 'no evaluator'}"
            raise LaunchError(
                f"The step has {self.tasks} tasks. {roles.capitalize()} leave none for a worker: give srun --ntasks "
                f"{others + 1} or more."
            )
        return self.tasks - others

    def first_host(self) -> str:
        """Returns the host of task 0: a name that resolves, or an IP address."""
        if self.nodes == 1:
            return "127.0.0.1"
        node = _scontrol("hostnames", self.node_list).split()[0]
        try:
            socket.getaddrinfo(node, None)
        except OSError:
            # Slurm's name of a node may differ from the name of its host.
            address = re.search(r"NodeAddr=(\S+)", _scontrol("node", node))
            return address[1] if address else node
        return node


def role_of(rank: int, workers: int, ps: int) -> tuple[str, int]:
    if rank == 0:
        return "chief", 0
    if rank <= ps:
        return "ps", rank - 1
    return ("worker", rank - 1 - ps) if rank <= ps + workers else ("evaluator", 0)


def _scontrol(*what: str) -> str:
    command = ["scontrol", "show", *what]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{' '.join(command)}` failed: {error}. It is part of Slurm's client commands.") from None


class SlurmTask(Job):
    """One task of the step. Only the main thread may create and run it. `request` has the step's number of workers."""

    def __init__(self, step: SlurmStep, request: RunRequest, environment: Mapping[str, str], console: Console):
        self._step = step
        self._request = request
        self._environment = {
            **{name: value for name, value in environment.items() if name != KEY},
            # The chief and the evaluator may write to a pipe, for which Python would use block buffering.
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "3"),
            RESTART_COUNT: environment.get("SLURM_RESTART_COUNT", "0"),
        }
        self._console = console
        self._job, self._index = role_of(step.rank, request.workers, request.ps)
        self._is_local = step.nodes == 1
        roles = [Role.CHIEF, Role.EVALUATOR] if self._job == "evaluator" else [Role.CHIEF]
        self._machine = JobStateMachine(self, roles, request.evaluator_timeout, 0, request.server_restarts)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._process: ProgramProcess | None = None
        self._address = ""
        self._has_served = False
        self._server_code: int | None = None
        self._chief_code: int | None = None
        # Set when `_server_code` or `_chief_code` is set.
        self._has_ended = threading.Event()
        self._cluster: Mapping[str, list[str]] = {}
        self._received_signals: list[int] = []
        self._is_terminated = False

    def run(self) -> int:
        """Runs the task to its end; returns its exit code. Raises LaunchError if tasks or processes are missing."""
        if self._job == "chief":
            return self._run_chief()
        step, timeout = self._step, self._request.start_timeout
        host = step.first_host()
        deadline = time.monotonic() + timeout
        with contextlib.closing(connect(step.name, step.rank, host, timeout, key=step.key)) as link:
            try:
                # The chief's task sends this message when it has a connection to each task.
                message = link.receive(max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                message = None
            if message is None:
                raise LaunchError("The first task ended, or found no other one in time; it says above why.")
            if "ended" in message:
                # The chief's task cannot run the program, and has said why.
                return int(message["ended"])
            self._is_local = bool(message["is_local"])
            return self._run_evaluator(link) if self._job == "evaluator" else self._run_server(link)

    def _run_chief(self) -> int:
        step, timeout = self._step, self._request.start_timeout
        deadline = time.monotonic() + timeout
        if not step.key:
            self._console.say(
                f"{KEY} is not set: until all tasks have started, others who reach the nodes can pose as one of them. "
                "docs/slurm.md says how to set it."
            )
        links = accept(step.name, range(1, step.tasks), is_local=self._is_local, timeout=timeout, key=step.key)
        with contextlib.ExitStack() as opened:
            for link in links.values():
                opened.callback(link.close)
            try:
                self._request.check_files()
            except LaunchError as error:
                # The other tasks wait for a message of this task, and end with the code in it.
                self._console.say(str(error))
                _send_all(links, ended=UNUSABLE)
                return UNUSABLE
            self._is_local = all(_is_loopback(link.host) for link in links.values())
            _send_all(links, is_local=self._is_local)
            self._cluster = self._gathered(links, deadline)
            _send_all(links, cluster=self._cluster)
            # The signals get handlers, because the program would inherit ignored signals.
            _handle_signals(lambda number, _: self._received_signals.append(number))
            self._run_to_end()
            _send_all(links, ended=self._machine.exit_code)
        return self._machine.exit_code

    def _gathered(self, links: Mapping[int, TaskLink], deadline: float) -> dict[str, list[str]]:
        """Waits until all servers answer; returns the cluster."""
        host = self._host(*links.values())
        cluster: dict[str, list[str]] = {"chief": [_free_address(host)], "ps": [], "worker": []}
        for rank, link in sorted(links.items()):
            job, index = role_of(rank, self._request.workers, self._request.ps)
            if job == "evaluator":
                # The evaluator does not serve; the address is a formality.
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

    def _run_evaluator(self, link: TaskLink) -> int:
        message = link.receive()
        if message is None:
            return 0
        self._cluster = message["cluster"]
        # The signals get handlers, because the program would inherit ignored signals.
        _handle_signals(lambda *_: None)
        self._follow_chief(link)
        self._run_to_end()
        # With code 0, a step does not fail when this task has ended the evaluator.
        return 0 if self._chief_code or self._is_terminated else self._machine.exit_code

    def _run_server(self, link: TaskLink) -> int:
        # The server inherits the ignored signals.
        _handle_signals(signal.SIG_IGN)
        self._follow_chief(link)
        self._start_answering(link)
        link.send(address=self._address)
        self._run_to_end()
        return 0

    def _run_to_end(self) -> None:
        self._machine.servers_ready()
        run_to_end(self._machine, self._events)
        if self._process is not None:
            self._process.close()
        _handle_signals(signal.SIG_IGN)

    def _follow_chief(self, link: TaskLink) -> None:
        def follow() -> None:
            code = None
            while code is None and (message := link.receive()) is not None:
                code = message.get("ended")
            # If the link has ended without a code, the chief's task was killed.
            end(1 if code is None else code)

        def end(code: int) -> None:
            self._chief_code = code
            self._has_ended.set()
            self._events.put(partial(self._machine.program_ended, Role.CHIEF, code))

        start_once("coordinator-slurm-link", follow, lambda _: end(1))

    def _start_answering(self, link: TaskLink) -> None:
        """Starts the server on a free port, and waits until it answers; raises LaunchError if it does not.

        A server that has served and then ended counts as started, because its end is the next event.
        """
        deadline = time.monotonic() + self._request.start_timeout
        for _ in range(_MOST_PORTS):
            self._address = _free_address(self._host(link))
            self._server_code = None
            config = self._serve()
            try:
                if wait_answer(config, deadline, self._wait_ended):
                    return
                if self._chief_code is not None:
                    raise LaunchError("The first task ended while the servers started; it says why.")
                if self._has_served:
                    return
                reason = f"ended with code {self._server_code} before it served"
                # Drops the event of the server's end, because the server has not served.
                self._events.get()
            except TimeoutError:
                reason = f"does not answer {self._request.start_timeout:g} s after its start"
            if self._server_code != UNUSABLE:
                break
        if self._process is not None:
            self._process.close()
        raise LaunchError(f"{config.name} {reason}.")

    def _wait_ended(self, seconds: float) -> bool:
        self._has_ended.wait(seconds)
        return self._server_code is not None or self._chief_code is not None

    def _serve(self) -> TaskConfig:
        config = TaskConfig({self._job: {self._index: self._address}}, self._job, self._index)
        label, begin = f"{self._job} {self._index}", serving_line(config)

        def on_line(line: str) -> None:
            self._has_served = self._has_served or line.startswith(begin)
            self._console.forward(label, line)

        def on_end(code: int) -> None:
            ending, consequence = ending_of(code), "it is not started again"
            self._events.put(partial(self._machine.server_ended, config.name, ending, consequence))
            self._server_code = code
            self._has_ended.set()

        self._has_ended.clear()
        task = ["--job", self._job, "--index", str(self._index), "--address", self._address]
        environment = server_environment(self._environment, config)
        self._start(["-m", "coordinator", "serve", *task], environment, on_line, on_end)
        return config

    def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None,
        on_end: Callable[[int], None],
    ) -> None:
        if self._process is not None:
            self._process.close()
        self._process = ProgramProcess(
            command,
            environment,
            on_line=on_line,
            on_error_text=self._console.show,
            is_filtered=environment["TF_CPP_MIN_LOG_LEVEL"] == "3",
            log_path=None,
            on_end=on_end,
        )

    def report(self, text: str) -> None:
        self._console.say(text)

    def start(self, role: Role) -> None:
        """Starts the program if this is the task of the role."""
        if role.value != self._job:
            return
        environment = program_environment(self._environment, TaskConfig(self._cluster, self._job, 0))
        if role is Role.CHIEF and self._request.dashboard is not None:
            page = dashboard_address(self._request.dashboard, taken=self._cluster["chief"])
            environment[DASHBOARD] = str(page)
            self._console.say(f"the dashboard is at {page.url} once the program has created its strategy.")
        if role is Role.CHIEF and self._request.trace is not None:
            environment[TRACE] = str(self._request.trace)
        is_plain = role is Role.CHIEF and os.isatty(sys.stdout.fileno())
        on_line = None if is_plain else partial(self._console.forward, self._job)
        end = partial(self._machine.program_ended, role)
        self._start(self._request.command, environment, on_line, lambda code: self._events.put(partial(end, code)))
        if self._received_signals:
            self.send(signal.Signals(self._received_signals[0]))

    def start_server(self, name: str) -> None:  # noqa: ARG002 - a task has one server
        self._serve()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program of this task. Slurm sends its own signals to every process of the step."""
        if self._process is not None:
            self._is_terminated = True
            self._process.send(number)

    def suspend(self) -> None:
        """Does nothing: no terminal suspends a step."""

    def _host(self, *links: TaskLink) -> str:
        """Returns the host at which others reach this one: a link's address if it is not loopback, or its name."""
        if self._is_local:
            return "127.0.0.1"
        return next((link.host for link in links if not _is_loopback(link.host)), socket.gethostname())


def _send_all(links: Mapping[int, TaskLink], **message: Any) -> None:
    for link in links.values():
        link.send(**message)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _handle_signals(handler: Any) -> None:
    """Sets the handler of the signals that Slurm sends to a step for `scancel`, `--signal` and the time limit."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, handler)


def _free_address(host: str) -> str:
    return free_addresses(1)[0].replace("127.0.0.1", host)
