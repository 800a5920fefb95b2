"""A command that takes `ssh`'s arguments and runs what it is given on this machine, where there may be no `sshd`."""

import stat
import sys
from pathlib import Path

_SOURCE = """#!{python}
import os, sys
host = sys.argv[-1 if "-G" in sys.argv else -2]
if os.path.exists(sys.argv[0] + ".down"):
    os._exit(255)
if host == "lost":
    sys.exit("ssh: connect to host lost port 22: No route to host")
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
    """Writes the command; returns its path.

    The host `lost` cannot be reached, nor can any other one while there is a file of this path with `.down` after it.
    """
    path = folder / "ssh"
    path.write_text(_SOURCE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
