"""Hosts as network namespaces around a router, whose links can be cut one by one. Root, iproute2 and iptables do it."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

PORT = 2222


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Lab:
    """Some hosts, each connected to a router only; a context manager."""

    def __init__(self, hosts: Sequence[str], folder: pathlib.Path) -> None:
        self._hosts = list(hosts)
        self._folder = folder
        self._name = f"lab{os.getpid()}"
        self._closing = contextlib.ExitStack()
        # Where Debian has both, the kernel may lack what the other one needs.
        self._iptables = shutil.which("iptables-legacy") or "iptables"

    def __enter__(self) -> "Lab":
        with self._closing:
            self._add_namespace("router")
            self._in("router", "sysctl", "-qw", "net.ipv4.ip_forward=1")
            for number, host in enumerate(self._hosts):
                self._add_namespace(host)
                inner, outer, link = self._namespace(host), self._namespace("router"), f"link{number}"
                _run("ip", "link", "add", "eth0", "netns", inner, "type", "veth", "peer", link, "netns", outer)
                for namespace, device, address in ((inner, "eth0", self.ip(host)), (outer, link, self._gateway(host))):
                    _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
                    _run("ip", "-n", namespace, "link", "set", device, "up")
                _run("ip", "-n", inner, "route", "add", "default", "via", self._gateway(host))
            self._closing = self._closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def ip(self, host: str) -> str:
        """Returns the address of a host."""
        return f"10.77.{self._hosts.index(host) + 1}.2"

    def address(self, host: str) -> str:
        """Returns `host:port` of the server on a host."""
        return f"{self.ip(host)}:{PORT}"

    def start(
        self, host: str, log: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts a Python program on a host; it is killed when the lab is closed."""
        inside = ["ip", "netns", "exec", self._namespace(host), sys.executable, *command]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
        with (self._folder / log).open("wb") as output:
            streams = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            program = subprocess.Popen(inside, env=environment, **streams)

        def end() -> None:
            program.kill()
            program.communicate()

        self._closing.callback(end)
        return program

    def serve(self, host: str, job: str, index: int) -> None:
        """Starts a server of the library on a host."""
        task = ["--job", job, "--index", str(index), "--address", self.address(host)]
        self.start(host, f"{host}.log", "-m", "coordinator", "serve", *task)

    def train(self, log: str, *command: str, cluster: Mapping[str, Sequence[str]]) -> "subprocess.Popen[bytes]":
        """Starts the client on the first host."""
        addresses = {job: [self.address(host) for host in hosts] for job, hosts in cluster.items()}
        whole = {**addresses, "chief": [self.address(self._hosts[0])]}
        config = json.dumps({"cluster": whole, "task": {"type": "chief", "index": 0}})
        return self.start(self._hosts[0], log, *command, environment={"TF_CONFIG": config})

    def printed(self, log: str) -> str:
        """Returns what a program has printed."""
        return (self._folder / log).read_text(errors="replace")

    def drop(self, one: str, other: str) -> None:
        """Drops what two hosts send each other."""
        self._break(((one, other), (other, one)), "-j", "DROP")

    def drop_one_way(self, sender: str, receiver: str) -> None:
        """Drops what one host sends another one."""
        self._break(((sender, receiver),), "-j", "DROP")

    def reject(self, one: str, other: str) -> None:
        """Answers what two hosts send each other by resets."""
        self._break(((one, other), (other, one)), "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")

    def lose(self, one: str, other: str) -> None:
        """Loses three of ten packets between two hosts."""
        some = ("-m", "statistic", "--mode", "random", "--probability", "0.3", "-j", "DROP")
        self._break(((one, other), (other, one)), *some)

    def reset(self, host: str, other: str) -> None:
        """Ends the connections between two hosts; the other one is told by a reset if that arrives."""
        # It complains of the sockets that it has ended.
        with contextlib.suppress(subprocess.CalledProcessError):
            self._in(host, "ss", "-K", "dst", self.ip(other))

    def half_open(self, host: str, other: str) -> None:
        """Ends the connections between two hosts on the one; the other one does not learn of it."""
        self.drop(host, other)
        self.reset(host, other)
        self.heal()

    def heal(self) -> None:
        """Ends every fault that lasts."""
        self._in("router", self._iptables, "-F", "FORWARD")

    def _gateway(self, host: str) -> str:
        return f"10.77.{self._hosts.index(host) + 1}.1"

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _in(self, host: str, *command: str) -> None:
        _run("ip", "netns", "exec", self._namespace(host), *command)

    def _break(self, ways: Iterable[tuple[str, str]], *rule: str) -> None:
        for sender, receiver in ways:
            ends = ("-s", self.ip(sender), "-d", self.ip(receiver))
            self._in("router", self._iptables, "-I", "FORWARD", *ends, *rule)

    def _add_namespace(self, host: str) -> None:
        namespace = self._namespace(host)
        _run("ip", "netns", "add", namespace)
        self._closing.callback(_run, "ip", "netns", "del", namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")


Fault = Callable[[Lab, str, str], None]
