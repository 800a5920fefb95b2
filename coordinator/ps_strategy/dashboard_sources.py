"""What the dashboard asks the parameter servers and the update rules, and the dashboard of a strategy.

A TensorFlow server has no call for the memory or the processor time of its process. A function that runs there and
reads files of `/proc` has: it needs no port and no further process, and takes about a millisecond.

Servers are asked on one thread, which nothing else waits for, and only while the page is watched or a trace is written.
A server that does not answer a probe is not asked; the heartbeat ends a call to one that stops answering.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_page_address
from coordinator.dashboard.dashboard import Dashboard, Sources
from coordinator.dashboard.snapshot import RuleRow
from coordinator.dashboard.usage import ServerUsage, UsageRecord
from coordinator.ps_strategy.membership.membership import ParameterServer
from coordinator.ps_strategy.tensorflow_internals.process import own_executor
from coordinator.workers.scheduler import Scheduler

# The unit of processor times in /proc, in seconds: 0.01 wherever Linux runs today.
_TICK = 1 / os.sysconf("SC_CLK_TCK")
# Between two polls for a trace, in seconds.
_POLL_INTERVAL = 2.0


@contextlib.contextmanager
def dashboard_of(
    address: str, scheduler: Scheduler, servers: Sequence[ParameterServer], rules: Collection[Any]
) -> Iterator[str]:
    """A scope with a dashboard.

    Args:
      address: see `Options.dashboard`.
      scheduler: of the strategy.
      servers: the parameter servers.
      rules: the update rules, each with `statistics()`; those that come later, too.

    Yields:
      The page's URL.
    """
    polling = ServerPolling(servers, rules)
    sources = Sources(scheduler.cluster.statistics, scheduler.queue.events, polling.usage, polling.rules)
    with contextlib.closing(Dashboard(parse_page_address(address, "Options.dashboard"), sources)) as dashboard:
        yield dashboard.url


class ServerPolling:
    """Polls the servers, on the thread that calls it.

    Args:
      servers: the parameter servers.
      rules: the update rules.
    """

    def __init__(self, servers: Sequence[ParameterServer], rules: Collection[Any] = ()) -> None:
        self._servers = servers
        self._rules = rules
        self._usage = {server.index: ServerUsage(f"ps {server.index}") for server in servers}
        self._read = tf.function(_read_files)

    def usage(self) -> Sequence[ServerUsage]:
        """Returns what each parameter server uses, and then what this program does."""
        for server in self._servers:
            usage = self._usage[server.index]
            answer = self._poll(self._read_on, server) if server.healthy() else None
            self._usage[server.index] = answer or dataclasses.replace(usage, is_reachable=False)
        # A Python program uses one processor at a time.
        client = dataclasses.replace(self._usage_at("client", "/device:CPU:0"), processors=1.0)
        return (*self._usage.values(), client)

    def rules(self) -> Sequence[RuleRow]:
        """Returns the counters of the rules that were used."""
        if not all(usage.is_reachable for usage in self._usage.values()):
            return ()
        rows = [self._poll(_row, rule) for rule in list(self._rules)]
        return sorted((row for row in rows if row and row.pushes), key=lambda row: row.number)

    def _poll(self, call: Callable[[Any], Any], of: Any) -> Any:
        """Returns the result of a call; None if its server was lost meanwhile, which the strategy notices by itself."""
        try:
            with own_executor():
                return call(of)
        except tf.errors.OpError:
            return None

    def _read_on(self, server: ParameterServer) -> ServerUsage:
        return self._usage_at(f"ps {server.index}", f"{server.device}/device:CPU:0")

    def _usage_at(self, task: str, device: str) -> ServerUsage:
        with tf.device(device):
            files = self._read(tf.constant("/"))
        return _usage_of(task, *(text.numpy().decode() for text in files))


class UsageCounters:
    """The counters of a trace that say how busy is what all workers share; see `Trace`.

    Args:
      polling: polls the servers, at most every two seconds.
    """

    def __init__(self, polling: ServerPolling) -> None:
        self._polling = polling
        self._record = UsageRecord()
        self._asked_at = -math.inf

    def __call__(self) -> dict[str, float]:
        """Returns shares from 0 to 1 by names; nothing if the servers were asked just now."""
        if time.monotonic() < self._asked_at + _POLL_INTERVAL:
            return {}
        self._record.add(self._polling.usage())
        self._asked_at = time.monotonic()
        return {resource.name: round(resource.share, 4) for resource in self._record.resources()}


_FILES = (
    "proc/self/stat",
    "proc/self/status",
    "proc/self/net/dev",
    "proc/stat",
    "proc/sys/kernel/random/boot_id",
    "proc/sys/kernel/hostname",
)
# What a container may use; not everywhere.
_LIMIT = "sys/fs/cgroup/cpu.max"


def _read_files(root: Any) -> tuple[Any, ...]:
    # If a path were a constant of the function, TensorFlow would read the file once, as it does with constants.
    limits = tf.map_fn(tf.io.read_file, tf.io.matching_files(root + _LIMIT))
    return (*(tf.io.read_file(root + name) for name in _FILES), tf.strings.reduce_join(limits))


def _usage_of(
    task: str, stat: str, status: str, network: str, machine: str, boot: str, host: str, limit: str
) -> ServerUsage:
    """Returns what the files of a process say; see `man 5 proc` and the kernel's documentation of cgroup v2."""
    # The name of the program, which stands in parentheses, may contain spaces.
    user, system = stat.rpartition(")")[2].split()[11:13]
    fields = dict(line.split(":", 1) for line in status.splitlines())
    interfaces = [line.partition(":")[2].split() for line in network.splitlines()[2:]]
    of_all, *of_each = (line.split()[1:] for line in machine.splitlines() if line.startswith("cpu"))
    processors = float(_processors_in(fields["Cpus_allowed_list"].strip()))
    quota, _, period = limit.strip().partition(" ")
    if quota.isdigit():
        processors = min(processors, int(quota) / int(period))
    return ServerUsage(
        task=task,
        time=time.time(),
        memory=1024 * int(fields["VmRSS"].split()[0]),
        cpu=_TICK * (int(user) + int(system)),
        received=sum(int(fields[0]) for fields in interfaces),
        sent=sum(int(fields[8]) for fields in interfaces),
        processors=processors,
        machine=boot.strip(),
        host=host.strip(),
        # user, nice, system, idle, iowait, irq, softirq
        machine_cpu=_TICK * sum(int(of_all[column]) for column in (0, 1, 2, 5, 6)),
        machine_processors=len(of_each),
    )


def _processors_in(ranges: str) -> int:
    """Returns how many numbers are in a list such as `0-3,8`."""
    ends = [(first, last or first) for first, _, last in (part.partition("-") for part in ranges.split(","))]
    return sum(int(last) - int(first) + 1 for first, last in ends)


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
