"""What lists of processes show for a server: `coordinator worker 0`, and not the command line that all servers share.

The title overwrites the arguments in the memory of this process, where the kernel reads them for `/proc/PID/cmdline`.
Python has its own copy of them. Nothing happens where the title is longer, and elsewhere than on Linux.
"""

import contextlib
import ctypes
import pathlib

# Fields of /proc/PID/stat after the name in brackets: where the arguments begin and end (`man 5 proc`, 48 and 49).
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46


def set_process_title(title: str, name: str) -> None:
    """Sets what `ps` and `top` show for this process.

    Args:
      title: replaces its command line.
      name: of the process, at most 15 bytes.
    """
    # No such file, or a value that the kernel hides.
    with contextlib.suppress(OSError, ValueError, IndexError):
        pathlib.Path("/proc/self/comm").write_text(name)
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        text = title.encode()
        if start > 0 and start + len(text) + 2 <= end:
            # The last byte tells the kernel that the arguments are a title, which ends at the first zero.
            ctypes.memmove(start, text.ljust(end - start - 1, b"\0") + b" ", end - start)
