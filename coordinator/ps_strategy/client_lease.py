"""Keeps on every server what this client made there, for as long as the client lives.

A server frees a client's variables when it has not heard of the client for `Options.client_timeout`. Steps are not
enough to be heard: a client may be idle, or one step may take longer. TensorFlow's own keep-alive thread reaches only
the servers that were named when the process joined the cluster, none in our case.

    thread coordinator-lease    four times in each `client_timeout`, asks every held server to note that we live

It promises that no server frees anything while this process runs and can reach it, unless both stood still for three
quarters of the time; and that a server which does not answer keeps no other from being asked.
"""

import threading
from collections.abc import Callable, Collection

from coordinator.options import Options
from coordinator.ps_strategy.server_context import Answer, ServerContext

_RENEWALS_PER_TIMEOUT = 4


class ClientLease:
    """A lease on servers that may come and go.

    Args:
      context_id: the number that servers know this client by.
      options: `client_timeout` is how long a server keeps things without hearing of the client; `probe_timeout` is how
        long it may take to answer.
    """

    def __init__(self, context_id: int, options: Options) -> None:
        self._context_id = context_id
        self._answer_timeout = options.probe_timeout
        self._interval = options.client_timeout / _RENEWALS_PER_TIMEOUT
        self._held: dict[str, ServerContext] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_on_time, name="coordinator-lease", daemon=True)
        self._thread.start()

    def hold(self, addresses: Collection[str]) -> None:
        """Renews the lease on exactly these servers from now on."""
        with self._lock:
            dropped = [self._held.pop(address) for address in set(self._held) - set(addresses)]
            for address in set(addresses) - set(self._held):
                self._held[address] = ServerContext(address, self._context_id)
        for context in dropped:
            context.close()

    def is_forgotten(self, address: str) -> bool:
        """Whether a held server says that it has nothing of this client any more. No answer says nothing.

        Where it has, this renews the lease.
        """
        with self._lock:
            context = self._held.get(address)
            renewal = context.begin_renewal(self._answer_timeout) if context is not None else None
        return renewal is not None and renewal() is Answer.UNKNOWN

    def close(self) -> None:
        """Ends the thread and the connections; what the servers keep is not freed by it."""
        self._stop.set()
        self._thread.join()
        self.hold(())

    def __repr__(self) -> str:
        return f"ClientLease(on {', '.join(sorted(self._held)) or 'no server'}, every {self._interval:g} s)"

    def _renew_on_time(self) -> None:
        under_way: list[Callable[[], Answer]] = []
        while not self._stop.wait(self._interval):
            with self._lock:
                # All at once, and the answers are not waited for: a frozen server delays no other. A request that
                # nobody holds is cancelled by gRPC.
                under_way[:] = [context.begin_renewal(self._interval) for context in self._held.values()]
