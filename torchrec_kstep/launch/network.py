"""Questions to the operating system about addresses, ports and interfaces. No torch, no waiting beyond what is stated."""

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: read an interface's IPv4 address
_TCP_LISTEN = "0A"  # state column of /proc/net/tcp


def resolve(host: str) -> str | None:
    """Returns the IP address of a host name, or None if nobody knows it."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        return None


def is_resolvable(host: str) -> bool:
    """Whether a host name has an address."""
    return resolve(host) is not None


def is_mine(address: str) -> bool:
    """Whether an IP address belongs to this machine: only then may a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
        return True


def source_address(destination: str) -> str | None:
    """Returns the address of this machine from which packets to `destination` would leave, or None without a route."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))  # a datagram socket: chooses the route, sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def addresses() -> dict[str, str]:
    """Returns the IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no IPv4 address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_of(address: str) -> str | None:
    """Returns the interface that has `address`, or None."""
    return next((name for name, own in addresses().items() if own == address), None)


def dial(address: str, port: int, timeout_s: float) -> str:
    """Tries to connect; returns "" if somebody accepts, else why not, in words."""
    try:
        with socket.create_connection((address, port), timeout_s):
            return ""
    except TimeoutError:
        return f"no answer within {timeout_s:.3g} s"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def holder_of(port: int) -> str:
    """Says which process listens on a TCP port of this machine, as far as this user may know: `python (pid 4711)` or ""."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == _TCP_LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # gone, or another user's
    return ""
