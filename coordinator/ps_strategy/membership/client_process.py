"""Makes this process the client of a cluster: a task with its own server, which the others call back."""

import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Collection

import portpicker

from coordinator.addresses import check_port_is_free, parse_address
from coordinator.heartbeat.listening import described_watches, loopback_of, reached_only_at
from coordinator.heartbeat.open_connections import OpenConnections, peer_of
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB, ClusterDefinition, client_server_def
from coordinator.ps_strategy.tensorflow_internals.process import (
    current_server_def,
    leave_calls_to_parent,
    set_server_def,
)

_logger = logging.getLogger("coordinator")


def join_as_client(definition: ClusterDefinition) -> str:
    """Makes this process the client, a cluster of one; returns the address of its own server.

    If that is an address that only this machine has, connections from other machines to the server are refused.

    TensorFlow cannot stop the server that a client has for its workers to call back, so a process keeps the one that
    its first strategy started, and says so if another address is reserved for it.

    Raises:
      RuntimeError: this process is connected to a cluster already.
      LaunchError: the address that the specification reserves for the client is in use.
    """
    current = current_server_def()
    if current is None:
        address = definition.client_address or f"localhost:{portpicker.pick_unused_port()}"
        check_port_is_free(f"This program, /job:{CLIENT_JOB}/task:0,", address)
        server_def = client_server_def(definition.protocol, address)
        host, port = parse_address(address)
        if (loopback := loopback_of(host)) is None:
            set_server_def(server_def)
            return address
        try:
            with reached_only_at(loopback, port):
                set_server_def(server_def)
        except OSError as error:
            _logger.warning(
                "This program accepts connections on port %d from every machine that reaches it, and the interface "
                "cannot be restricted: %s. See docs/security.md.",
                port,
                error,
            )
        return address
    jobs = {job.name: dict(job.tasks) for job in current.cluster.job}
    if current.job_name != CLIENT_JOB or set(jobs) != {CLIENT_JOB}:
        raise RuntimeError(
            "This process is connected to a cluster already. One process has one strategy at a time: close the first "
            "one (strategy.close()) before making another."
        )
    present = jobs[CLIENT_JOB][0]
    if definition.client_address not in (None, present):
        _logger.warning(
            "The cluster reserves %s for /job:%s/task:0, but this program keeps the server at %s, which its first "
            "strategy started: workers call back there. Start another program for another address.",
            definition.client_address,
            CLIENT_JOB,
            present,
        )
    return present


class Children:
    """Keeps the processes that are forked from this one from its connections to the servers.

    A child that ends in order deletes TensorFlow's objects. It would write to the sockets that it has in common with
    this process, in between what this process writes, and take them from what the threads of this process wait for.
    """

    def __init__(self) -> None:
        self._addresses: Callable[[], Collection[str]] | None = None

    def keep_from(self, addresses: Callable[[], Collection[str]]) -> None:
        """Keeps children from the connections from and to some addresses, `host:port` each, as they are by then."""
        if self._addresses is None:
            # For as long as the process lives: Python has no way to undo it.
            os.register_at_fork(after_in_child=self._replace_connections)
        self._addresses = addresses

    def _replace_connections(self) -> None:
        assert self._addresses is not None
        leave_calls_to_parent()
        # By their ports: a name is not looked up in a process that was just forked.
        ports = {parse_address(address).port for address in self._addresses()}
        dead, other = socket.socketpair()
        other.close()
        with dead:
            replaced = []
            for descriptor, duplicate in OpenConnections().sockets():
                with duplicate:
                    peer = peer_of(duplicate)
                    is_meant = peer is not None and not ports.isdisjoint((peer.port, duplicate.getsockname()[1]))
                if is_meant:
                    os.dup2(dead.fileno(), descriptor, inheritable=False)
                    replaced.append(descriptor)
        if sys.platform != "linux":
            return
        for each in {watch.epoll for descriptor in replaced for watch in described_watches(descriptor)}:
            with select.epoll() as fresh:
                os.dup2(fresh.fileno(), each, inheritable=False)


CHILDREN = Children()
