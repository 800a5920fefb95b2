"""`coordinator run --hosts`, by a command in place of `ssh` and by two `sshd` of this machine (`-m release`)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests.cli.conftest import WATCHING, Run, Writer
from tests.deadline import wait_until

# Takes `ssh`'s arguments, and runs what it is given on this machine, where there may be no `sshd`.
SSH = """#!{python}
import os, sys
host = sys.argv[-1 if "-G" in sys.argv else -2]
if "-G" in sys.argv:
    # As a configuration may say; an IPv6 address stands for itself.
    print("user me\\nhostname", host.rpartition("@")[2] if ":" in host else "127.0.0.1")
elif "[" in host:
    sys.exit(f"ssh: Could not resolve hostname {{host}}: Name or service not known")
else:
    assert "BatchMode=yes" in sys.argv
    os.environ = {{"PATH": os.environ["PATH"], "HOST": host}}
    os.execve("/bin/sh", ["sh", "-c", sys.argv[-1]], os.environ)
"""


def write_fake_ssh(folder: Path) -> Path:
    """Writes the command; returns its path."""
    path = folder / "ssh"
    path.write_text(SSH.format(python=sys.executable))
    path.chmod(0o755)
    return path


def servers_of(processes: list[psutil.Process]) -> dict[str, psutil.Process]:
    running = [process for process in processes if process.is_running()]
    return {process.name(): process for process in running if re.match(r"(worker|ps)-\d", process.name())}


@pytest.mark.long
def test_servers_start_on_their_hosts_and_again_when_they_are_killed(run: Run, tmp_path: Path) -> None:
    options = ["--ssh", write_fake_ssh(tmp_path), "--hosts", "one:1,two:1", "--server-restarts", 1]
    options += ["--log-dir", tmp_path / "logs", "--env", "FAKE_PRINTS=printed\n"]
    with run(WATCHING, options=options) as command:
        addresses = json.loads(command.wait_output(r"cluster (\{.*\})")[1])
        assert {job: len(addresses[job]) for job in addresses} == {"worker": 2, "ps": 1, "chief": 1}
        for task in ("worker 0", "worker 1", "ps 0"):
            command.wait_output(f"{task} answers anew")
        command.wait_output(r"\[worker 1\] printed")
        servers = servers_of(command.record())
        assert {name: server.environ()["HOST"] for name, server in servers.items()} == {
            "worker-0": "one",
            "worker-1": "two",
            "ps-0": "one",
        }
        assert all(server.cwd() == os.getcwd() for server in servers.values())
        servers["ps-0"].kill()
        command.wait_output(r"/job:ps/task:0 ended unexpectedly, by SIGKILL .*: starting it again, restart 1 of 1\.")
        command.wait_output(r"(?s)starting it again.*ps 0 answers anew")
        command.type("\n")
        assert command.wait_ended() == 0
    assert (tmp_path / "logs" / "latest" / "ps-0.restart-1.log").exists()


def test_hosts_get_what_they_are_to_have_and_ipv6_addresses_have_brackets(
    program: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sent also where this machine has the same.
    monkeypatch.setenv("MINE", "5")
    monkeypatch.setenv("OTHER", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = ["--ssh", write_fake_ssh(tmp_path), "--hosts", "me@[::1]:2", "--env", "MINE=5"]
    # The host has no GPU in truth, but believes what it is told.
    options += ["--env", "CUDA_VISIBLE_DEVICES=0,1", "--gpus-per-worker", "1"]
    assert main(["run", "--dry-run", *map(str, options), str(program("pass"))]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    # The last word of an `ssh` is a script for a shell, which runs a script for another one.
    scripts = [shlex.split(shlex.split(words[-1])[-1]) if "sh -c" in words[-1] else words for words in commands]
    tasks = [dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word)) for words in scripts]
    *servers, chief = tasks
    assert [json.loads(task["TF_CONFIG"])["task"]["type"] for task in tasks] == ["worker", "worker", "ps", "chief"]
    assert [task["MINE"] for task in servers] == ["5"] * 3
    assert not any("OTHER" in task for task in tasks)
    assert [task["CUDA_VISIBLE_DEVICES"] for task in servers] == ["0", "1", ""]
    cluster = json.loads(chief["TF_CONFIG"])["cluster"]
    assert {job: len(addresses) for job, addresses in cluster.items()} == {"worker": 2, "ps": 1, "chief": 1}
    assert all(re.fullmatch(r"\[::1\]:\d+", address) for addresses in cluster.values() for address in addresses)


class Sshd:
    """Two `sshd` of this machine, on 127.0.0.2 and 127.0.0.3, and the command that reaches them."""

    def __init__(self, folder: Path):
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, "This test needs sshd: apt-get install openssh-server"
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        self._running = []
        port = free_addresses(1)[0].rpartition(":")[2]
        for host in ("127.0.0.2", "127.0.0.3"):
            lines = [f"ListenAddress {host}", f"Port {port}", f"HostKey {folder}/host_key", "UsePAM no", "PidFile none"]
            (folder / host).write_text(
                "\n".join([*lines, f"AuthorizedKeysFile {folder}/key.pub", "StrictModes no", ""])
            )
            self._running.append(subprocess.Popen([program, "-D", "-e", "-f", folder / host], stderr=subprocess.PIPE))
        for sshd in self._running:
            assert sshd.stderr is not None
            assert b"Server listening" in sshd.stderr.readline()
        accepted = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        self.command = f"ssh -F none -p {port} -i {folder}/key {accepted}"

    def servers(self) -> dict[str, psutil.Process]:
        """Returns the servers that run in sessions of the two."""
        below = [process for sshd in self._running for process in psutil.Process(sshd.pid).children(recursive=True)]
        return servers_of(below)

    def close(self) -> None:
        for sshd in self._running:
            sshd.terminate()
            sshd.communicate()


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    folder = tmp_path / "sshd"
    folder.mkdir()
    sshd = Sshd(folder)
    yield sshd
    sshd.close()


@pytest.mark.release
@pytest.mark.parametrize("ending", ["the connection", "ssh", "the server", "the command"])
def test_a_server_ends_with_its_connection_and_comes_back(sshd: Sshd, run: Run, ending: str) -> None:
    options = ["--ssh", sshd.command, "--hosts", "127.0.0.2:1,127.0.0.3:1", "--ps-hosts", "127.0.0.3"]
    with run(WATCHING, options=options) as command:
        for task in ("worker 0", "worker 1", "ps 0"):
            command.wait_output(f"{task} answers anew")
        servers = sshd.servers()
        assert servers.keys() == {"worker-0", "worker-1", "ps-0"}
        lost = servers["worker-1"]
        session = lost.parent().parent()
        task = '"task": {"type": "worker", "index": 1}'
        [client] = [each for each in command.record() if each.name() == "ssh" and task in each.cmdline()[-1]]
        whole = psutil.Process(command.pid)
        {"the connection": session, "ssh": client, "the server": lost, "the command": whole}[ending].kill()
        assert not psutil.wait_procs([lost], timeout=20)[1]
        if ending == "the command":
            assert not psutil.wait_procs(servers.values(), timeout=20)[1]
            return
        reason = "by SIGKILL" if ending in ("ssh", "the server") else "with code 255"
        command.wait_output(f"/job:worker/task:1 ended unexpectedly, {reason}.*: starting it again, restart 1 of 3")
        command.wait_output(r"(?s)starting it again.*worker 1 answers anew")
        command.type("\x03")
        assert command.wait_ended() == 130
    wait_until(lambda: not sshd.servers())
