"""Where a TensorFlow server of this process can be reached: at one address of the machine, or at all of them.

TensorFlow listens at every address of the machine, whatever host its own address names, and has no authentication:
each client that reaches it can run functions in its process, and read and write its files. The kernel can be asked to
drop what is sent to its port at any other address, by a packet filter of the listening sockets, which needs no rights
(`man 7 socket`, SO_ATTACH_FILTER). A client that connects to another address sees a host that does not answer.

Between the moment that TensorFlow listens and that of the filter are some milliseconds; connections that TensorFlow has
accepted then are shut down. The filter lasts as long as the sockets, whose connections inherit it.
"""

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from coordinator.errors import LaunchError
from coordinator.heartbeat.open_connections import Endpoint, OpenConnections, shut_down

# Linux's SO_ATTACH_FILTER; Python has no name for it.
_ATTACH_FILTER = 26
# Instructions of the filter (linux/filter.h): load a byte or a word of the packet, shift right, jump if equal, return.
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
# Added to an offset it counts from the IP header, of which the first four bits are the version (SKF_NET_OFF).
_IP_HEADER = 2**32 - 0x100000
_WHOLE_PACKET, _NOTHING = 2**32 - 1, 0
# Where the IP header has the destination.
_DESTINATION = {4: 16, 6: 24}


class _Instruction(NamedTuple):
    code: int
    operand: int
    jump_if_equal: int = 0
    jump_otherwise: int = 0

    def packed(self) -> bytes:
        return struct.pack("HBBI", self.code, self.jump_if_equal, self.jump_otherwise, self.operand)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))


def networks_of(host: str) -> tuple[Network, ...] | None:
    """Returns the addresses at which a server should be reached whose own address names a host.

    Args:
      host: a name or an IP address.

    Returns:
      This machine's own network if the host is `localhost` or an address of it; None, for all addresses, otherwise. A
      name may stand for the loopback interface on this machine and for another one elsewhere.
    """
    if host == "localhost":
        return _LOOPBACK
    try:
        return _LOOPBACK if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def own_network(address: str) -> tuple[Network, ...]:
    """Returns the network of one IP address of this machine.

    Raises:
      LaunchError: this machine does not have that address.
    """
    try:
        network = ipaddress.ip_network(address)
        family = socket.AF_INET if network.version == 4 else socket.AF_INET6
        with socket.socket(family) as trial:
            trial.bind((address, 0))
    except (ValueError, OSError) as error:
        raise LaunchError(
            f"--interface must be an IP address of this machine, such as 10.0.0.5; got {address!r}: {error}."
        ) from None
    return (network,)


def accept_only_at(networks: tuple[Network, ...], port: int) -> None:
    """Makes the sockets of this process that listen on a port take only what is sent to some addresses.

    Args:
      networks: the addresses, whole bytes of a prefix each.
      port: of the server, which listens already.

    Raises:
      OSError: the kernel has no such filters, or nothing listens there.
    """
    if sys.platform != "linux":
        raise OSError(f"packet filters of sockets are not known on {sys.platform}")
    program = _program(networks)
    code = ctypes.create_string_buffer(b"".join(each.packed() for each in program))
    argument = struct.pack("HL", len(program), ctypes.addressof(code))
    listening = False
    for each in _sockets_at(port):
        if _is_listening(each):
            each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, argument)
            listening = True
    if not listening:
        raise OSError(f"no socket of this process listens on port {port}")
    for each in _sockets_at(port):
        own = Endpoint.of(each.getsockname()[0], port).ip
        if not _is_listening(each) and not any(own in network for network in networks):
            shut_down(each)


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process that has a port; it is open until the next one is taken."""
    for duplicate in OpenConnections().sockets():
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
            if is_tcp and duplicate.getsockname()[1] == port:
                yield duplicate


def _is_listening(duplicate: socket.socket) -> bool:
    return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _program(networks: tuple[Network, ...]) -> list[_Instruction]:
    """Returns a filter that takes the packets to some networks, and no others."""
    program = []
    for network in networks:
        taken = [_Instruction(_RETURN, _WHOLE_PACKET)]
        # From the end, since each test jumps over what follows it if it fails.
        for load, value in reversed(_destination_tests(network)):
            taken = [load, _Instruction(_JUMP_IF_EQUAL, value, 0, len(taken)), *taken]
        version = [_Instruction(_LOAD_BYTE, _IP_HEADER), _Instruction(_SHIFT_RIGHT, 4)]
        program += [*version, _Instruction(_JUMP_IF_EQUAL, network.version, 0, len(taken)), *taken]
    return [*program, _Instruction(_RETURN, _NOTHING)]


def _destination_tests(network: Network) -> list[tuple[_Instruction, int]]:
    """Returns, for each byte or word of a network's prefix, how it is loaded, and its value."""
    prefix = network.network_address.packed[: network.prefixlen // 8]
    offset = _IP_HEADER + _DESTINATION[network.version]
    whole = len(prefix) // 4 * 4
    words = [
        (_Instruction(_LOAD_WORD, offset + start), int.from_bytes(prefix[start : start + 4]))
        for start in range(0, whole, 4)
    ]
    rest = range(whole, len(prefix))
    return words + [(_Instruction(_LOAD_BYTE, offset + start), prefix[start]) for start in rest]
