"""This host's address on the network that joins a job's hosts. Standard library only."""

import fcntl
import ipaddress
import os
import socket
import struct

from rlhf_mp.cluster.launcher import RankInfo
from rlhf_mp.errors import ConfigError, Problem

SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"


def join_network(info: RankInfo) -> str:
    """The address at which other ranks' hosts reach this one: loopback where there are none.

    On several hosts it is the address from which this host reaches MASTER_ADDR, so whoever chooses MASTER_ADDR chooses
    the network. Gloo would otherwise take whatever the host's own name resolves to, often loopback.

    Raises:
        ConfigError: MASTER_ADDR can't be resolved, has no route, or is loopback.
    """
    if not info.several_hosts:
        return LOOPBACK
    master = os.environ["MASTER_ADDR"]
    try:
        address = address_toward(master)
    except OSError as error:
        reason = f"not reachable from {socket.gethostname()}: {error.strerror or error}"
        raise ConfigError([_problem(master, reason)]) from error
    if ipaddress.ip_address(address).is_loopback:
        reason = f"{socket.gethostname()} itself resolves it to {address}, where no other host can reach it"
        raise ConfigError([_problem(master, reason)])
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address


def address_toward(host: str) -> str:
    """This host's IPv4 address on the way to ``host``. Nothing is sent."""
    *_, target = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _problem(master: str, reason: str) -> Problem:
    return Problem("MASTER_ADDR", master, reason, "MASTER_ADDR=<the first host's IPv4 address on the cluster network>")
