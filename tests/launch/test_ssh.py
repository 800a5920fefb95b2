import os
import subprocess
from pathlib import Path

import pytest

from coordinator.errors import LaunchError
from coordinator.launch import ssh
from coordinator.launch.ssh import SshHost

# Prints what it reads as long as that is not closed.
ECHO = "#!/bin/sh\nexec cat\n"
TIMEOUT = 60.0


def host(folder: Path, source: str) -> SshHost:
    path = folder / "ssh"
    path.write_text(source)
    path.chmod(0o700)
    return SshHost("a", [str(path)], os.environ)


def test_a_server_hears_from_this_process_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_ALIVE_INTERVAL", 0.01)
    a = host(tmp_path, ECHO)
    reading, writing = os.pipe()
    process = a.start_server({}, writing)
    os.close(writing)
    assert os.read(reading, 1) == os.read(reading, 1) == b"\n"
    assert process.wait(0) is None
    a.close()
    assert process.wait(TIMEOUT) == 0
    os.close(reading)
    with pytest.raises(LaunchError, match="closed"):
        a.start_server({}, 2)


def test_signals_of_the_server_are_told_from_a_lost_connection(tmp_path: Path) -> None:
    for code, exit_code in ((0, 0), (2, 2), (137, -9), (255, 255)):
        a = host(tmp_path, f"#!/bin/sh\nexit {code}\n")
        assert a.start_server({}, 2).wait(TIMEOUT) == exit_code
        a.close()


def test_only_what_belongs_to_the_server_is_sent_of_the_environment(tmp_path: Path) -> None:
    a = host(tmp_path, "")
    *options, script = a.command({**os.environ, "TF_CONFIG": "{}", "MINE": "it's"}, ["python", "a b"])
    assert options[-1] == "a"
    assert "HOME=" not in script
    script = script.replace("python", "printenv MINE; echo")
    printed = subprocess.run(["sh", "-c", script], capture_output=True, check=True, text=True).stdout
    assert printed.startswith("it's\n")
