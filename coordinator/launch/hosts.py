"""The hosts of `coordinator run --hosts`, and which server each of them has."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Sequence

from coordinator.errors import SettingError

_HOST = re.compile(r"(?P<name>(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<slots>\d{1,4}))?")
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host that servers are started on.

    Attributes:
      name: as `ssh` takes it, such as `node1` or `user@node1`: an IPv6 address without its brackets.
      slots: how many servers of a kind it has.
    """

    name: str
    slots: int


def parse_hosts(option: str, text: str) -> tuple[Host, ...]:
    """Reads a list such as `a:2,user@b:4`; a host without a number has one slot.

    Args:
      option: the name of the option, for errors.
      text: what it was given.

    Raises:
      SettingError: it is no such list, or names a host twice.
    """
    return _checked(option, [part.strip() for part in text.split(",")])


def read_hostfile(path: pathlib.Path) -> tuple[Host, ...]:
    """Reads a file with a host on each line: `a slots=2`, `a:2` or `a`; what follows a `#` is left out.

    Raises:
      SettingError: the file cannot be read, or is not of that form.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("hostfile", f"cannot be read: {error}.") from None
    parts = [f"{match[1]}:{match[2]}" if (match := _HOSTFILE_LINE.fullmatch(line)) else line for line in lines if line]
    return _checked("hostfile", parts)


def _checked(option: str, parts: Sequence[str]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    for part in parts:
        match = _HOST.fullmatch(part)
        if match is None or int(match["slots"] or 1) == 0:
            raise SettingError(option, f"must name hosts as in 'a:2,b:4', with 1 to 9999 servers each, got {part!r}.")
        name = match["name"].replace("[", "").replace("]", "")
        if name in (host.name for host in hosts):
            raise SettingError(option, f"names {name} twice.")
        hosts.append(Host(name, int(match["slots"] or 1)))
    if not hosts:
        raise SettingError(option, "names no host.")
    return tuple(hosts)


def slots_of(hosts: Iterable[Host]) -> int:
    """Returns how many servers of a kind the hosts have together."""
    return sum(host.slots for host in hosts)


def fill(hosts: Sequence[Host], count: int) -> list[str]:
    """Returns the host of each server: the first host is filled first."""
    return [host.name for host in hosts for _ in range(host.slots)][:count]


def spread(hosts: Sequence[Host], count: int) -> list[str]:
    """Returns the host of each server: one on each host in turn."""
    return [hosts[index % len(hosts)].name for index in range(count)]
