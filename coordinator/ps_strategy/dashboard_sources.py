"""What the dashboard asks the parameter servers and the update rules, and the dashboard of a strategy.

A TensorFlow server has no call for the memory or the processor time of its process. A function that runs there and
reads files of `/proc/self` has: it needs no port and no further process, and takes about a millisecond.

Servers are asked on one thread, which nothing else waits for, and only while somebody looks. A server that does not
answer a probe is not asked; the heartbeat ends a call to one that stops answering.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_page_address
from coordinator.dashboard.dashboard import Dashboard, Sources
from coordinator.dashboard.snapshot import RuleRow, ServerUsage
from coordinator.ps_strategy.calls.tensorflow_runtime import ParameterServer
from coordinator.ps_strategy.tensorflow_internals.process import bind_executor
from coordinator.workers.scheduler import Scheduler

# The unit of processor times in /proc, in seconds: 0.01 wherever Linux runs today.
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def dashboard_of(
    address: str | None, scheduler: Scheduler, servers: Sequence[ParameterServer], rules: Collection[Any]
) -> Iterator[str | None]:
    """A scope with a dashboard.

    Args:
      address: see `Options.dashboard`; None for no dashboard.
      scheduler: of the strategy.
      servers: the parameter servers.
      rules: the update rules, each with `statistics()`; those that come later, too.

    Yields:
      The page's URL.
    """
    if address is None:
        yield None
        return
    questions = _Questions(servers, rules)
    sources = Sources(scheduler.cluster.statistics, scheduler.queue.events, questions.usage, questions.rules)
    with contextlib.closing(Dashboard(parse_page_address(address, "Options.dashboard"), sources)) as dashboard:
        yield dashboard.url


class _Questions:
    """Asks the servers, on the dashboard's thread for that."""

    def __init__(self, servers: Sequence[ParameterServer], rules: Collection[Any]) -> None:
        self._servers = servers
        self._rules = rules
        self._usage = {server.index: ServerUsage(f"ps {server.index}") for server in servers}
        self._read = tf.function(_read_files)
        self._of_thread = threading.local()

    def usage(self) -> Sequence[ServerUsage]:
        """Returns what each parameter server uses."""
        for server in self._servers:
            usage = self._usage[server.index]
            answer = self._ask(self._read_on, server) if server.healthy() else None
            self._usage[server.index] = answer or dataclasses.replace(usage, is_reachable=False)
        return tuple(self._usage.values())

    def rules(self) -> Sequence[RuleRow]:
        """Returns the counters of the rules that were used."""
        if not all(usage.is_reachable for usage in self._usage.values()):
            return ()
        rows = [self._ask(_row, rule) for rule in list(self._rules)]
        return sorted((row for row in rows if row and row.pushes), key=lambda row: row.number)

    def _ask(self, question: Callable[[Any], Any], of: Any) -> Any:
        """Returns the answer; None if its server was lost meanwhile, which the strategy notices by itself."""
        if not hasattr(self._of_thread, "executor"):
            self._of_thread.executor = bind_executor()
        try:
            return question(of)
        except tf.errors.OpError:
            # The executor keeps the error too, and would raise it again at the next question.
            self._of_thread.executor.clear_error()
            return None

    def _read_on(self, server: ParameterServer) -> ServerUsage:
        with tf.device(f"{server.device}/device:CPU:0"):
            files = self._read(tf.constant("/proc/self/"))
        stat, status, network = (text.numpy().decode() for text in files)
        return _usage_of(f"ps {server.index}", stat, status, network)


def _read_files(folder: Any) -> tuple[Any, ...]:
    # If the path were a constant of the function, TensorFlow would read the file once, as it does with constants.
    return tuple(tf.io.read_file(folder + name) for name in ("stat", "status", "net/dev"))


def _usage_of(task: str, stat: str, status: str, network: str) -> ServerUsage:
    """Returns what the files of a process say; see `man 5 proc`."""
    # The name of the program, which stands in parentheses, may contain spaces.
    user, system = stat.rpartition(")")[2].split()[11:13]
    memory = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    interfaces = [line.partition(":")[2].split() for line in network.splitlines()[2:]]
    return ServerUsage(
        task=task,
        time=time.time(),
        memory=1024 * int(memory),
        cpu=_TICK * (int(user) + int(system)),
        received=sum(int(fields[0]) for fields in interfaces),
        sent=sum(int(fields[8]) for fields in interfaces),
    )


def _row(rule: Any) -> RuleRow:
    counts = rule.statistics()
    return RuleRow(
        number=rule.state.number,
        name=type(rule).__name__,
        updates=counts.updates,
        pushes=counts.pushes,
        rejected=counts.rejected,
        bytes_pulled=counts.bytes_pulled,
        bytes_pushed=counts.bytes_pushed,
        mean=counts.staleness.mean,
        p99=counts.staleness.p99,
        histogram=counts.staleness.histogram,
        waited=counts.idle_shares,
    )
