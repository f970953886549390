"""Before training: were all ranks started alike, and do their hosts reach one another? Answered in one line, within a deadline.

Ranks talk through the job's store here, not through collectives: ranks that disagree on what they run would sit in mismatched
collectives, or abort in them.
"""

import hashlib
import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import LaunchError
from torchrec_kstep.launch import network
from torchrec_kstep.world import World, gloo_interface

DIAL_TIMEOUT_S = 5.0  # for one host to accept another's connection
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow")
_POLL_S = 0.05
_SHOWN_DIFFERENCES = 5
# May differ between ranks without changing what the job computes.
_PER_HOST_KEYS = ("data.source", "data.path", "run_dir")


class Store(Protocol):
    """What is used of `torch.distributed`'s key-value stores."""

    def set(self, key: str, value: str) -> None:
        """Writes a key."""

    def get(self, key: str) -> bytes:
        """Reads a key, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Tells whether all keys are there."""


@dataclass(frozen=True)
class _Door:
    """Where a host can be dialled."""

    host_name: str
    interface: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host_name}, {self.address}{f' on {self.interface}' if self.interface else ''}"


def check_start(store: Store, world: World, config: RunConfig, deadline_s: float) -> None:
    """Makes sure that all ranks are there, run the same code with the same configuration, and that their hosts reach each other.

    Must be called on all ranks, once a job.

    Args:
        store: the job's store.
        world: who this rank is.
        config: what this rank was told to do.
        deadline_s: seconds to wait for the others, for each question.

    Raises:
        LaunchError: what is wrong and where, in one line.
    """
    if world.world_size == 1:
        return
    facts = {
        "number of ranks": world.world_size,
        "ranks per host": world.local_world_size,
        "version of torchrec_kstep": _version("torchrec_kstep"),
        "code of torchrec_kstep": code_digest(),
        "Python": sys.version.split()[0],
        **{f"version of {package}": _version(package) for package in PACKAGES},
        **_leaves(asdict(config)),
    }
    check_agreement(store, world, "start", facts, deadline_s)
    if world.num_hosts > 1:
        _check_reach(store, world, deadline_s)


def check_agreement(store: Store, world: World, topic: str, facts: Mapping[str, Any], deadline_s: float) -> None:
    """Makes sure that all ranks hold the same `facts` as rank 0. Must be called on all ranks, once for each topic.

    Args:
        store: the job's store.
        world: who this rank is.
        topic: what the facts are about.
        facts: values by name; they must survive JSON.
        deadline_s: seconds to wait for the others.

    Raises:
        LaunchError: a rank did not come, or this rank's facts differ from those of rank 0.
    """
    store.set(_key(topic, world.rank), json.dumps({"host_name": socket.gethostname(), "facts": facts}))
    _wait_for(store, world, topic, deadline_s)
    theirs = json.loads(store.get(_key(topic, 0)))
    mine = json.loads(json.dumps(facts))
    differing = [name for name in {**theirs["facts"], **mine} if theirs["facts"].get(name) != mine.get(name)]
    if differing:
        shown = "; ".join(f"{name} is {mine.get(name)!r}, there {theirs['facts'].get(name)!r}" for name in differing[:_SHOWN_DIFFERENCES])
        more = f" and {len(differing) - _SHOWN_DIFFERENCES} more" if len(differing) > _SHOWN_DIFFERENCES else ""
        raise LaunchError(
            f"rank {world.rank} (host {world.host}, {socket.gethostname()}) was not started like rank 0 ({theirs['host_name']}): "
            f"{shown}{more}; {_remedy(differing)}"
        )


def gather(store: Store, world: World, topic: str, value: Any, deadline_s: float) -> list[Any]:
    """Returns what every rank says on a topic, by rank. Must be called on all ranks, once for each topic.

    Args:
        store: the job's store.
        world: who this rank is.
        topic: what the values are about.
        value: must survive JSON.
        deadline_s: seconds to wait for the others.

    Raises:
        LaunchError: a rank did not come.
    """
    store.set(_key(topic, world.rank), json.dumps(value))
    _wait_for(store, world, topic, deadline_s)
    return [json.loads(store.get(_key(topic, rank))) for rank in range(world.world_size)]


@cache
def code_digest() -> str:
    """Returns a digest of this package's Python files: equal on two hosts if they run the same code."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _check_reach(store: Store, world: World, deadline_s: float) -> None:
    """Has the first rank of every host dial every other host at the address that gloo will use."""
    is_porter = world.local_rank == 0
    with _open_door() if is_porter else socket.socket() as listener:
        if is_porter:
            store.set(_key("door", world.rank), json.dumps(asdict(_door_of(listener))))
        porters = range(0, world.world_size, world.local_world_size)
        _wait_for(store, world, "door", deadline_s, ranks=porters)
        doors = [_Door(**json.loads(store.get(_key("door", rank)))) for rank in porters]
        if is_porter:
            failures = [
                f"host {world.host} ({doors[world.host]}) cannot reach host {other} ({door}): {why}"
                for other, door in enumerate(doors)
                if other != world.host and (why := network.dial(door.address, door.port, DIAL_TIMEOUT_S))
            ]
            store.set(_key("reach", world.rank), json.dumps(failures))
        _wait_for(store, world, "reach", deadline_s + DIAL_TIMEOUT_S * world.num_hosts, ranks=porters)
    failures = [failure for rank in porters for failure in json.loads(store.get(_key("reach", rank)))]
    if failures:
        more = f" (and {len(failures) - 1} more pairs)" if len(failures) > 1 else ""
        raise LaunchError(
            f"{failures[0]}{more}; set GLOO_SOCKET_IFNAME on every host to the interface that leads to the others, "
            "and let the firewall pass connections between them"
        )


def _open_door() -> socket.socket:
    """Listens on the address that gloo will listen on."""
    interface = gloo_interface()
    if interface:
        own = network.addresses()
        if interface not in own:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME names interface {interface!r}, which host {socket.gethostname()} does not have or which has no "
                f"IPv4 address; it has {', '.join(f'{name} ({address})' for name, address in own.items())}"
            )
        address = own[interface]
    else:
        address = network.resolve(socket.gethostname()) or "127.0.0.1"  # as gloo does
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _door_of(listener: socket.socket) -> _Door:
    address, port = listener.getsockname()[:2]
    return _Door(socket.gethostname(), gloo_interface() or network.interface_of(address) or "", address, port)


def _wait_for(store: Store, world: World, topic: str, deadline_s: float, ranks: range | None = None) -> None:
    """Waits until each of `ranks` (by default all) has said something on `topic`; names those that have not at the deadline."""
    missing = list(range(world.world_size) if ranks is None else ranks)
    end_s = time.monotonic() + deadline_s
    while missing := [rank for rank in missing if not store.check([_key(topic, rank)])]:
        if time.monotonic() > end_s:
            hosts = sorted({rank // world.local_world_size for rank in missing})
            raise LaunchError(
                f"{len(missing)} of {world.world_size} ranks did not come within {deadline_s:g} s: ranks {missing} of hosts {hosts}; "
                "look at their output, or raise distributed.start_timeout_s where starting is slow"
            )
        time.sleep(_POLL_S)


def _key(topic: str, rank: int) -> str:
    return f"doctor/{topic}/{rank}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested configuration groups into dotted keys, leaving out those that may differ between hosts."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{path}.")
        elif path not in _PER_HOST_KEYS:
            leaves[path] = value
    return leaves


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _remedy(differing: list[str]) -> str:
    if any(name.startswith(("version of", "code of", "Python")) for name in differing):
        return "install the same versions on all hosts"
    if any(name.startswith("data") and "." not in name for name in differing):
        return "give all hosts the same prepared data set"
    return "start all ranks with the same command line"
