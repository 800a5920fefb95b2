"""Makes a TensorFlow server of this process listen at one address of the machine instead of all addresses.

TensorFlow listens at every address of the machine, even if the server's own address names one host, and has no
authentication. So each client that reaches the server can run functions in its process, and read and write its files.
The address is an argument of `bind` deep inside TensorFlow. This module therefore replaces the listening socket after
the start by a socket that is bound to one address. The new socket has the same file descriptor, by which TensorFlow
knows the socket, and the same entries in epoll instances:

    descriptor 7    [::]:2222  --->  a socket without a network  --->  127.0.0.1:2222
    epoll           7, its data      nothing                           7, its data

The socket in between frees the port for the next `bind`. Threads of TensorFlow may use the descriptor at any time, and
find nothing to accept. Connections that TensorFlow has accepted at other addresses before are shut down.

From before TensorFlow listens until the replacement, a socket at each other address of the machine takes the
connections to that address, since the kernel prefers it to a socket for all addresses. Nothing accepts them.

The replacement needs no privileges. (A socket filter, SO_ATTACH_FILTER, needs privileges on Linux 6.18, for example.)
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

import psutil

from coordinator.errors import LaunchError
from coordinator.heartbeat.open_connections import Endpoint, OpenConnections, shut_down

# TensorFlow reads this environment variable when it starts a server.
_REUSE_PORT = "TF_GRPC_REUSE_PORT"
_EPOLL = "anon_inode:[eventpoll]"
# The format of epoll entries in /proc; all numbers but the first are hexadecimal.
_WATCHED = re.compile(r"^tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+)", re.MULTILINE)
# The options that an accepted connection inherits from its listening socket.
_INHERITED = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 0)),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
)
_EPOLL_ADD, _EPOLL_DELETE = 1, 2
# A freed port may stay in use for `_BIND_TIMEOUT` seconds, and is tried every `_BIND_INTERVAL` seconds.
_BIND_TIMEOUT, _BIND_INTERVAL = 5.0, 0.005


class _EpollEvent(ctypes.Structure):
    """`struct epoll_event`; packed only on x86-64."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class _Watch(NamedTuple):
    """An entry of a descriptor in an epoll instance: the instance's descriptor, the events, and the user data."""

    epoll: int
    events: int
    data: int

    def change(self, operation: int, descriptor: int) -> None:
        """Adds or deletes the entry of a descriptor. Raises OSError if the kernel refuses."""
        event = _EpollEvent(self.events, self.data)
        if ctypes.CDLL(None, use_errno=True).epoll_ctl(self.epoll, operation, descriptor, ctypes.byref(event)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def loopback_of(host: str) -> str | None:
    """Returns the IP address to listen at for the host `localhost` or a loopback address; None for other hosts.

    Another host name may mean the loopback interface on this machine and another interface elsewhere.
    """
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        return host if ipaddress.ip_address(host).is_loopback else None
    return None


def own_address(address: str) -> str:
    """Returns `address` if it is an IP address of this machine; raises LaunchError if not."""
    try:
        with socket.socket(_family(address)) as trial:
            trial.bind((address, 0))
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"--interface must be an IP address of this machine, such as 10.0.0.5; got {address!r}: {error}."
        ) from None
    return address


def listen_only_at(address: str, port: int, besides: Collection[int] = ()) -> None:
    """Makes this process, which listens on a port, listen on that port at one IP address of the machine only.

    Sockets with descriptors in `besides` stay. Raises OSError, and changes nothing, if the kernel is not Linux or hides
    epoll entries, or no socket listens on the port. Raises LaunchError if another process took the port during the
    change; this process then no longer listens.
    """
    if sys.platform != "linux":
        raise OSError(f"it is not known how to replace a listening socket on {sys.platform}")
    with contextlib.ExitStack() as opened:
        former = {}
        for descriptor, duplicate in _sockets_at(port):
            opened.enter_context(duplicate)
            if _is_listening(duplicate) and descriptor not in besides:
                former[descriptor] = duplicate
        if not former:
            raise OSError(f"no socket of this process listens on port {port}")
        first = next(iter(former))
        options = [(*option, former[first].getsockopt(*option)) for option in _INHERITED]
        watches = [(descriptor, watch) for descriptor in former for watch in _watches(descriptor)]
        between = {descriptor: opened.enter_context(_without_network()) for descriptor in former}
        # The following steps change the server. Everything that the system may refuse was created before.
        deleted = [watch for watch in watches if _delete(*watch)]
        for descriptor, without_network in between.items():
            _replace(descriptor, without_network)
    replacement = _bound(address, port)
    for option in options:
        replacement.setsockopt(*option)
    _replace(first, replacement)
    for descriptor, watch in deleted:
        watch.change(_EPOLL_ADD, descriptor)
    wanted = ipaddress.ip_address(address)
    for _, duplicate in _sockets_at(port):
        with duplicate:
            own = Endpoint.of(duplicate.getsockname()[0], port).ip
            if not _is_listening(duplicate) and own != wanted and not (own.is_loopback and wanted.is_loopback):
                shut_down(duplicate)


@contextlib.contextmanager
def reached_only_at(address: str, port: int) -> Iterator[None]:
    """A scope to start a TensorFlow server that cannot be reached at addresses other than `address`.

    Leaving the scope calls `listen_only_at`, which may raise errors.
    """
    with contextlib.ExitStack() as opened:
        decoys = []
        if sys.platform == "linux":
            for other in _other_addresses(address):
                # An error means that the address is gone, or that another program listens there.
                with contextlib.suppress(OSError):
                    decoys.append(opened.enter_context(_decoy(other, port)).fileno())
        if decoys and _can_share(port):
            opened.enter_context(_shared_ports())
        else:
            opened.close()
            decoys.clear()
        yield
        listen_only_at(address, port, decoys)


def _other_addresses(address: str) -> list[str]:
    """Returns this machine's other addresses; for a loopback address, those that other machines can reach."""
    own = ipaddress.ip_address(address)
    try:
        addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    except OSError:
        # Some sandboxes refuse the query.
        return []
    others = []
    for text in addresses:
        # The entry may be the address of a network card.
        with contextlib.suppress(ValueError):
            other = ipaddress.ip_address(text)
            if other != own and not (other.is_loopback and own.is_loopback):
                others.append(text)
    return others


def _decoy(address: str, port: int) -> socket.socket:
    """Returns a socket that takes the connections to an address from sockets that listen at all addresses."""
    [(family, kind, protocol, _, endpoint)] = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    decoy = socket.socket(family, kind, protocol)
    try:
        decoy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        decoy.bind(endpoint)
        decoy.listen(0)
    except OSError:
        decoy.close()
        raise
    return decoy


def _can_share(port: int) -> bool:
    """Returns True if another socket of this user can listen at all addresses, which some sandboxes refuse."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as trial:
        try:
            if trial.family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            trial.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _shared_ports() -> Iterator[None]:
    """A scope in which TensorFlow can listen on ports where other sockets of this user listen."""
    before = os.environ.get(_REUSE_PORT)
    os.environ[_REUSE_PORT] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_REUSE_PORT]
        else:
            os.environ[_REUSE_PORT] = before


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6


def _sockets_at(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Yields the descriptor and a duplicate, which the caller closes, of each TCP socket of this process at a port."""
    for descriptor, duplicate in OpenConnections().sockets():
        is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
        if is_tcp and duplicate.getsockname()[1] == port:
            yield descriptor, duplicate
        else:
            duplicate.close()


def _is_listening(duplicate: socket.socket) -> bool:
    return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _watches(descriptor: int) -> list[_Watch]:
    """Returns a descriptor's entries in this process's epoll instances; raises OSError if the kernel hides them."""
    with select.epoll() as trial:
        trial.register(descriptor, 0)
        watches = list(described_watches(descriptor))
        # Some sandboxes hide such entries. Nothing would then ever wait for a replaced socket.
        if not any(watch.epoll == trial.fileno() for watch in watches):
            raise OSError("/proc/self/fdinfo does not say what is waited for")
        return [watch for watch in watches if watch.epoll != trial.fileno()]


def described_watches(descriptor: int) -> Iterator[_Watch]:
    """Yields a descriptor's entries in this process's epoll instances that the kernel shows."""
    for name in os.listdir("/proc/self/fd"):
        # The descriptor may have been closed.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:
                with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as described:
                    entries = _WATCHED.findall(described.read())
                for watched, events, data in entries:
                    if int(watched) == descriptor:
                        yield _Watch(int(name), int(events, 16), int(data, 16))


def _delete(descriptor: int, watch: _Watch) -> bool:
    """Deletes an entry; returns False if the entry is gone, for example because the instance has two descriptors."""
    try:
        watch.change(_EPOLL_DELETE, descriptor)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def _without_network() -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Linux chooses a free name.
    listening.bind("")
    listening.listen()
    return listening


def _bound(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address. Raises LaunchError if the port stays in use."""
    deadline = time.monotonic() + _BIND_TIMEOUT
    while True:
        try:
            return socket.create_server((address, port), family=_family(address), backlog=socket.SOMAXCONN)
        except OSError as error:
            # Another thread, or a process that the thread started, may hold a duplicate of the former socket briefly.
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise LaunchError(
                    f"Nothing listens on port {port} any more, since it cannot be bound to {address}: {error.strerror}."
                ) from None
        threading.Event().wait(_BIND_INTERVAL)


def _replace(descriptor: int, replacement: socket.socket) -> None:
    with replacement:
        replacement.setblocking(False)
        os.dup2(replacement.fileno(), descriptor, inheritable=os.get_inheritable(descriptor))
