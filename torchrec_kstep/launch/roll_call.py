"""Before torchrun: all hosts meet at the rendezvous store, or each says what is wrong and where, within a deadline.

One host holds the store. A host that does not hold it waits for it to appear; then every host signs in and waits until as
many have signed as the job has. torchrun's own rendezvous then uses the same store (torch shares it inside a process).
"""

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from torchrec_kstep.errors import LaunchError
from torchrec_kstep.launch import network

POLL_S = 0.2
HANDSHAKE_S = 4.0  # for a store that accepted a connection to answer it

_JOB_KEY = "kstep/job"
_COUNT_KEY = "kstep/hosts"


@dataclass(frozen=True)
class Meeting:
    """How this host took part.

    Attributes:
        holds_store: whether the store is held by this process.
        address: this host's address on the way to the store; "" if unknown.
        store: keeps the store alive until torchrun has taken it over.
    """

    holds_store: bool
    address: str
    store: TCPStore


def call_roll(host: str, port: int, *, job: str, num_hosts: int, deadline_s: float, host_rank: int | None) -> Meeting:
    """Meets the other hosts at `host:port`. Called once on every host.

    Args:
        host: name or address of the host that holds the store.
        port: its port.
        job: identity of the job, the same on all hosts.
        num_hosts: hosts that must sign in.
        deadline_s: seconds for all of it.
        host_rank: index of this host if the user gave one; host 0 must then be able to hold the store.

    Raises:
        LaunchError: the cause in one line.
    """
    end_s = time.monotonic() + deadline_s
    address = network.resolve(host)
    if address is None:
        raise LaunchError(f"nobody knows the host name {host!r} of the rendezvous endpoint: check --rdzv-endpoint, or give an IP address")
    if network.is_mine(address):
        store, holds_store = _hold_or_share(host, port, job, must_hold=host_rank == 0)
        own_address = address
    else:
        if host_rank == 0:
            raise LaunchError(
                f"{host}:{port} is to be held by host 0, but {address} is no address of this host "
                f"({_own_addresses()}): give host 0's own address as --rdzv-endpoint on all hosts"
            )
        store, holds_store = _reach(host, address, port, end_s), False
        own_address = network.source_address(address) or ""
    _sign_in(store, own_address, num_hosts, end_s, deadline_s)
    return Meeting(holds_store, own_address, store)


def _hold_or_share(host: str, port: int, job: str, must_hold: bool) -> tuple[TCPStore, bool]:
    """Opens the store on this machine, or joins the one that another agent of the same job has opened here."""
    try:
        store = TCPStore(host, port, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=timedelta(seconds=HANDSHAKE_S))
    except RuntimeError as error:
        other = None if must_hold else _store_of_sibling(host, port, job)
        if other is None:
            holder = network.holder_of(port)
            raise LaunchError(
                f"port {port} of this host ({socket.gethostname()}) is taken{f' by {holder}' if holder else ''}: "
                "end that program, or choose another port on all hosts (--rdzv-endpoint, or rdzv_port of the component)"
                if network.dial("127.0.0.1" if host == "localhost" else host, port, 1.0) == ""
                else f"cannot listen on {host}:{port}: {' '.join(str(error).split())}"
            ) from None
        return other, False
    store.set(_JOB_KEY, job)
    return store, True


def _store_of_sibling(host: str, port: int, job: str) -> TCPStore | None:
    """Returns the store that an agent of this job holds on this machine, or None if the port belongs to anything else."""
    try:
        store = _join(host, port)
        return store if store is not None and store.get(_JOB_KEY).decode() == job else None
    except RuntimeError:  # nobody put the job's name there: it is somebody else's store
        return None


def _reach(host: str, address: str, port: int, end_s: float) -> TCPStore:
    """Connects to the store that another host holds, which may start later than this one."""
    why = "no time to try"
    while (left_s := end_s - time.monotonic()) > 0:
        why = network.dial(address, port, min(left_s, HANDSHAKE_S))
        if not why:
            if store := _join(host, port):
                return store
            why = "something listens there, but it is no rendezvous store"
        time.sleep(POLL_S)
    advice = {
        "refused": "the machine answers but nothing listens there: is host 0 started, and is the port right?",
    }.get(why, f"{why}: check the address, the port and the firewall between {_own_addresses()} and it")
    raise LaunchError(f"cannot reach {host}:{port}, where host 0 should hold the rendezvous: {advice}")


def _join(host: str, port: int) -> TCPStore | None:
    """Connects to a store as a client; None if what listens there does not behave like one."""
    joined: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError):  # the store's own errors
            joined.append(TCPStore(host, port, is_master=False, multi_tenant=True, timeout=timedelta(seconds=HANDSHAKE_S)))

    # In a thread, because the handshake with something that accepts connections and never speaks has no timeout.
    thread = threading.Thread(target=connect, name="kstep-join", daemon=True)
    thread.start()
    thread.join(2 * HANDSHAKE_S)
    return joined[0] if joined else None


def _sign_in(store: TCPStore, address: str, num_hosts: int, end_s: float, deadline_s: float) -> None:
    """Signs this host in and waits for the others."""
    try:
        number = store.add(_COUNT_KEY, 1)
        store.set(f"{_COUNT_KEY}/{number}", json.dumps(f"{socket.gethostname()} ({address or 'address unknown'})"))
        while (present := store.add(_COUNT_KEY, 0)) < num_hosts:
            if time.monotonic() > end_s:
                names = ", ".join(json.loads(store.get(f"{_COUNT_KEY}/{index + 1}")) for index in range(present))
                raise LaunchError(
                    f"{present} of {num_hosts} hosts came within {deadline_s:g} s: {names}; "
                    f"{num_hosts - present} missing: start the launcher there with the same --nnodes and --rdzv-endpoint"
                )
            time.sleep(POLL_S)
    except RuntimeError:  # the store's own errors
        raise LaunchError("lost the rendezvous while waiting for hosts, because host 0 ended: its own words tell why") from None


def _own_addresses() -> str:
    found = {name: address for name, address in network.addresses().items() if not address.startswith("127.")}
    return ", ".join(f"{address} on {name}" for name, address in found.items()) or "no address but the loopback"
