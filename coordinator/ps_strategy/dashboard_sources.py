"""The dashboard of a strategy, and its queries of the parameter servers and the update rules.

A TensorFlow server has no RPC that returns the memory or the processor time of its process. So a function runs on each
server and reads files of `/proc`. The function needs no port and no further process, and takes about a millisecond. A
thread of the dashboard or the trace polls the servers, only while the page is watched or a trace is written. A server
that does not answer a probe is not polled. If a server stops answering during a poll, the heartbeat ends the call.
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_page_address
from coordinator.dashboard.dashboard import Dashboard
from coordinator.dashboard.snapshot import RuleRow, ServerUsage, UsageRecord
from coordinator.ps_strategy.membership.membership import ParameterServer
from coordinator.ps_strategy.tensorflow_internals.functions import own_executor
from coordinator.workers.scheduler import Scheduler

# The unit of processor times in /proc, in seconds: 0.01 on all present Linux systems.
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_FILES = (
    "proc/self/stat",
    "proc/self/status",
    "proc/self/net/dev",
    "proc/stat",
    "proc/sys/kernel/random/boot_id",
    "proc/sys/kernel/hostname",
)
# The file with the CPU limit of a container. Not every machine has the file.
_LIMIT = "sys/fs/cgroup/cpu.max"

_logger = logging.getLogger("coordinator")


@contextlib.contextmanager
def dashboard_of(
    address: str, scheduler: Scheduler, servers: Sequence[ParameterServer], rules: Collection[Any]
) -> Iterator[str]:
    """Yields the URL of a dashboard at `address`, which is closed afterwards. `rules` may grow during the block."""
    polling = ServerPolling(servers, rules)
    sources = scheduler.cluster.statistics, scheduler.queue.events, polling.usage, polling.rules
    with contextlib.closing(Dashboard(parse_page_address(address, "Options.dashboard"), *sources)) as dashboard:
        yield dashboard.url


class ServerPolling:
    """Queries the parameter servers and the update rules, on the thread that calls a method."""

    def __init__(self, servers: Sequence[ParameterServer], rules: Collection[Any] = ()) -> None:
        self._servers = servers
        self._rules = rules
        self._usage = {server.index: ServerUsage(f"ps {server.index}") for server in servers}
        self._read = tf.function(_read_files)
        self._record = UsageRecord()

    def usage(self) -> Sequence[ServerUsage]:
        """Returns the resource usage of each parameter server, followed by the usage of this program."""
        for server in self._servers:
            usage = self._usage[server.index]
            where = usage.task, f"{server.device}/device:CPU:0"
            answer = self._poll(self._usage_at, *where) if server.healthy() else None
            self._usage[server.index] = answer or dataclasses.replace(usage, is_reachable=False)
        # A Python program uses one processor at a time.
        client = dataclasses.replace(self._usage_at("client", "/device:CPU:0"), processors=1.0)
        return (*self._usage.values(), client)

    def rules(self) -> Sequence[RuleRow]:
        """Returns the counters of all update rules with pushes; empty while a parameter server is unreachable."""
        if not all(usage.is_reachable for usage in self._usage.values()):
            return ()
        rows = [self._poll(_row, rule) for rule in list(self._rules)]
        return sorted((row for row in rows if row and row.pushes), key=lambda row: row.number)

    def counters(self) -> dict[str, float]:
        """Returns the busy share of each resource since the last call, from 0 to 1, by name; empty at the first one."""
        self._record.add(self.usage())
        return {resource.name: round(resource.share, 4) for resource in self._record.resources()}

    def _poll(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call, or None if TensorFlow raises: the strategy notices a lost server by itself."""
        try:
            with own_executor():
                return call(*arguments)
        except tf.errors.OpError:
            return None

    def _usage_at(self, task: str, device: str) -> ServerUsage:
        with tf.device(device):
            files = self._read(tf.constant("/"))
        return _usage_of(task, *(text.numpy().decode() for text in files))


def _read_files(root: Any) -> tuple[Any, ...]:
    # TensorFlow would evaluate a constant path only once, and so read the file only once.
    limits = tf.map_fn(tf.io.read_file, tf.io.matching_files(root + _LIMIT))
    return (*(tf.io.read_file(root + name) for name in _FILES), tf.strings.reduce_join(limits))


def _usage_of(
    task: str, stat: str, status: str, network: str, machine: str, boot: str, host: str, limit: str
) -> ServerUsage:
    """Parses the files of a process; see `man 5 proc` and the kernel's documentation of cgroup v2."""
    # The name of the program is in parentheses and may contain spaces.
    user, system = stat.rpartition(")")[2].split()[11:13]
    fields = dict(line.split(":", 1) for line in status.splitlines())
    interfaces = [line.partition(":")[2].split() for line in network.splitlines()[2:]]
    of_all, *processor_lines = (line.split()[1:] for line in machine.splitlines() if line.startswith("cpu"))
    ranges = [part.partition("-") for part in fields["Cpus_allowed_list"].strip().split(",")]
    processors = float(sum(int(last or first) - int(first) + 1 for first, _, last in ranges))
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
        machine_processors=len(processor_lines),
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
