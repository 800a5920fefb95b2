"""How processes on several machines find each other, without a fixed port and without a shared folder.

    first     listens on the first free port of a sequence that follows from the group's name
    others    try all ports of the same sequence on the first one's host, until one answers as the first of the group

    other -> first   {"group", "rank", "nonce"}
    first -> other   {"nonce", "proof"}     the proof is an HMAC of all that was said, by the key of the group
    other -> first   {"proof"}
    first -> other   {"accepted": true}

The connections stay open, and carry JSON objects, each with an HMAC by a key that follows from the key of the group and
both nonces. The end of one is the end of the process at its other end, however that ended. Promises:

- without the key of the group nobody is taken for one of its processes; an empty key is known to everybody;
- whatever else listens on one of the ports, or connects to one, is left alone, and delays nobody: all connections are
  made and answered at the same time, and the oldest of too many unanswered ones ends;
- every wait has a deadline, for all that is waited for; the port is closed when all have connected.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import queue
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

from coordinator.background_thread import start_once
from coordinator.errors import LaunchError
from coordinator.launch.local_servers import PORTS

_TRIED_PORTS = 32
# How long the other end of a connection may take to say who it is, in seconds. One that has connected waits for longer
# than the first process does: it is not to give up what the first one takes for connected.
_GREETING_TIMEOUT, _ANSWER_TIMEOUT = 10.0, 20.0
# How many may be about to say it, and how long each may take before it makes room for another one, in seconds.
_MOST_GREETINGS, _SHORTEST_GREETING = 256, 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_LONGEST_GREETING = 4096
_LONGEST_MESSAGE = 1_000_000
# What a greeting of another program, or by another protocol, leads to.
_STRANGE = (OSError, ValueError, LookupError, TypeError, RecursionError)


class Link:
    """A connection to another process of the group. One thread may send, and one receive.

    Args:
      connection: an established connection.
      key: of this connection.
      is_first: this end is that of the first process.
      received: what was received on it by now.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_first: bool, received: bytes = b"") -> None:
        self._connection = connection
        self._key = key
        self._own, self._others = ("first", "other") if is_first else ("other", "first")
        self._sent = self._received = 0
        self._buffer = bytearray(received)

    @property
    def host(self) -> str:
        """The IP address of this machine at which the other end reaches it."""
        address = ipaddress.ip_address(self._connection.getsockname()[0])
        return str(getattr(address, "ipv4_mapped", None) or address)

    def send(self, **message: Any) -> None:
        """Sends an object. Does nothing if the other process has ended."""
        text = json.dumps(message)
        line = f"{_proof(self._key, self._own, self._sent, text)} {text}\n"
        self._sent += 1
        with contextlib.suppress(OSError):
            self._connection.sendall(line.encode())

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next object; None if the other process has ended, or sends something else.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Raises:
          TimeoutError: none came in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while b"\n" not in self._buffer and len(self._buffer) < _LONGEST_MESSAGE:
                if deadline is not None and not _is_readable(self._connection, deadline - time.monotonic()):
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
        """Ends the connection; a thread that receives gets None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def accept(group: str, ranks: Collection[int], *, is_local: bool, timeout: float, key: bytes = b"") -> dict[int, Link]:
    """Waits for other processes, as the first one.

    Args:
      group: its name.
      ranks: the numbers of the others.
      is_local: all of them run on this machine.
      timeout: in seconds.
      key: of the group, which no other process knows.

    Returns:
      The link to each.

    Raises:
      LaunchError: the message says which did not connect.
    """
    with _listening(group, "127.0.0.1" if is_local else "") as listener:
        greetings = _Greetings(group, ranks, key)
        asyncio.run(greetings.take(listener, timeout))
    if missing := greetings.missing:
        for each in greetings.links.values():
            each.close()
        names = ", ".join(map(str, sorted(missing)))
        raise LaunchError(f"The tasks {names} did not start within {timeout:g} s.")
    return greetings.links


class _Greetings:
    """What the first process hears on its port.

    Args:
      group: its name.
      ranks: the numbers of the others.
      key: of the group.

    Attributes:
      links: to those that have connected, by number.
      missing: the numbers of the rest.
    """

    def __init__(self, group: str, ranks: Collection[int], key: bytes) -> None:
        self.links: dict[int, Link] = {}
        self.missing = set(ranks)
        self._group, self._key = group, key
        # Those that are not over, the oldest first, and when each began.
        self._tasks: dict[asyncio.Task[None], float] = {}
        self._complete = asyncio.Event()

    async def take(self, listener: socket.socket, timeout: float) -> None:
        """Accepts connections until nobody is missing, or for some seconds."""
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))
        if self.missing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), timeout)
        await _ended([accepting, *self._tasks])

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            while len(self._tasks) >= _MOST_GREETINGS:
                oldest, began = next(iter(self._tasks.items()))
                await asyncio.sleep(max(0.0, began + _SHORTEST_GREETING - time.monotonic()))
                oldest.cancel()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                # The peer has gone, or there are too many open files.
                await asyncio.sleep(_SHORTEST_PAUSE)
                continue
            task = asyncio.create_task(self._greet(connection))
            self._tasks[task] = time.monotonic()
            task.add_done_callback(self._tasks.pop)

    async def _greet(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as opened, contextlib.suppress(*_STRANGE):
            opened.enter_context(connection)
            connection.setblocking(False)
            async with asyncio.timeout(_GREETING_TIMEOUT):
                hello, _ = await _received(connection)
                rank, nonce = hello["rank"], secrets.token_hex()
                if hello["group"] != self._group or type(rank) is not int or rank not in self.missing:
                    return
                said = self._group, rank, str(hello["nonce"]), nonce
                await _send(connection, nonce=nonce, proof=_proof(self._key, "first", *said))
                answer, rest = await _received(connection)
                # Another one may have come in its place meanwhile.
                if not _is_proof(answer, self._key, "other", *said) or rank not in self.missing:
                    return
            connection.setblocking(True)
            opened.pop_all()
            link = Link(connection, _proof(self._key, "link", *said).encode(), is_first=True, received=rest)
            link.send(accepted=True)
            self.links[rank] = link
            self.missing.remove(rank)
            if not self.missing:
                self._complete.set()


def connect(group: str, rank: int, host: str, timeout: float, *, key: bytes = b"") -> Link:
    """Connects to the first process.

    Args:
      group: its name.
      rank: the number of this process.
      host: where the first process runs.
      timeout: in seconds.
      key: of the group, which no other process knows.

    Raises:
      LaunchError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout
    addresses = _addresses(host, deadline)
    link = asyncio.run(_connect(addresses, group, rank, key, deadline)) if addresses else None
    if link is None:
        raise LaunchError(f"The first task, on {host}, did not answer within {timeout:g} s. Is the host reachable?")
    return link


async def _connect(addresses: Collection[str], group: str, rank: int, key: bytes, deadline: float) -> Link | None:
    """Tries all ports at the same time, again and again."""

    async def find(address: str, port: int) -> Link:
        pause = _SHORTEST_PAUSE
        while True:
            # It may be in use by another program there, which may say anything or nothing.
            with contextlib.suppress(*_STRANGE):
                async with asyncio.timeout(_ANSWER_TIMEOUT):
                    return await _introduced(address, port, group, rank, key)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    tasks = [asyncio.create_task(find(address, port)) for address in addresses for port in _ports(group)]
    left = max(0.0, deadline - time.monotonic())
    done, rest = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    await _ended(rest)
    return done.pop().result() if done else None


async def _introduced(address: str, port: int, group: str, rank: int, key: bytes) -> Link:
    """Connects to a port as a process of the group.

    Raises:
      one of `_STRANGE`: the first process of the group does not listen there, or does not miss this one.
    """
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
        own = secrets.token_hex()
        await _send(connection, group=group, rank=rank, nonce=own)
        answer, _ = await _received(connection)
        said = group, rank, own, str(answer["nonce"])
        if not _is_proof(answer, key, "first", *said):
            raise ValueError("another program, or one with another key")
        await _send(connection, proof=_proof(key, "other", *said))
        line, rest = await _line(connection)
        own_key = _proof(key, "link", *said).encode()
        link = Link(connection, own_key, is_first=False, received=line + b"\n" + rest)
        if link.receive(0.0) != {"accepted": True}:
            raise ValueError("the first process does not miss this one")
        connection.setblocking(True)
        opened.pop_all()
        return link


def _proof(key: bytes, *said: object) -> str:
    return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()


def _is_proof(message: dict[str, Any], key: bytes, *said: object) -> bool:
    return hmac.compare_digest(str(message["proof"]).encode(), _proof(key, *said).encode())


async def _send(connection: socket.socket, **message: object) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(message).encode() + b"\n")


async def _received(connection: socket.socket) -> tuple[Any, bytes]:
    """Returns what the next line stands for, and what came after it."""
    line, rest = await _line(connection)
    return json.loads(line), rest


async def _line(connection: socket.socket) -> tuple[bytes, bytes]:
    received = b""
    while b"\n" not in received:
        chunk = await asyncio.get_running_loop().sock_recv(connection, _LONGEST_GREETING)
        received += chunk
        if not chunk or len(received) > _LONGEST_GREETING:
            raise ValueError("no line of a process of a group")
    line, _, rest = received.partition(b"\n")
    return line, rest


async def _ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancels tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))


def _addresses(host: str, deadline: float) -> list[str]:
    """Returns the addresses of a host; none if its name is not resolved in time."""
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    is_over = threading.Event()

    def resolve() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                found.put([str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)])
                return
            is_over.wait(_LONGEST_PAUSE)

    # Nothing else gives up in time.
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
