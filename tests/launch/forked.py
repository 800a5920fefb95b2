"""Tells a process that was forked from another one from a program that was started afresh."""

import pathlib

# Of /proc/PID/stat, after the name in brackets: where the stack begins, which differs between programs.
_STACK_START = 25


def is_same_program(pid: int, other: int) -> bool:
    """Returns True if a process was forked from another one, or both from a third, and runs the same program."""
    starts = [
        pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[_STACK_START] for each in (pid, other)
    ]
    return starts[0] == starts[1]
