"""Becomes a program that the kernel kills when the process that started it is gone.

    python exec_with_parent.py PARENT_ID program.py [arguments...]

A script of its own, because only the process itself can ask for this, and only a request made before the program
begins is made for any program. Where the kernel has no such request (it is Linux's), the program simply begins.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(sys.argv[1]):
            # It was gone before the request was made.
            os.kill(os.getpid(), signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])  # noqa: S606 - no shell is wanted
