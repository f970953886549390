"""The launch doctor on threads that share one store: what it accepts, and what it says of each kind of fault.

Processes on real (simulated) hosts are in tests/multihost/test_launch_faults.py.
"""

import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from torchrec_kstep import doctor
from torchrec_kstep.config.schema import OptimConfig, RunConfig, TrainConfig
from torchrec_kstep.doctor import check_agreement, check_start
from torchrec_kstep.errors import LaunchError
from torchrec_kstep.launch import network
from torchrec_kstep.world import World

DEADLINE_S = 5.0
Outcome = LaunchError | None


def on_ranks(fn: Callable[[HashStore, World], None], world_size: int, local_world_size: int, absent: tuple[int, ...] = ()) -> list[Outcome]:
    """Runs `fn` for every rank that is not absent, each on a thread; returns what each raised."""
    store = HashStore()

    def one(rank: int) -> Outcome:
        try:
            fn(store, World(rank, world_size, rank % local_world_size, local_world_size))
        except LaunchError as error:
            return error
        return None

    present = [rank for rank in range(world_size) if rank not in absent]
    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(one, present))


@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (2, 2), (2, 1), (4, 2), (6, 2)])
def test_ranks_started_alike_pass(world_size: int, local_world_size: int) -> None:
    outcomes = on_ranks(lambda store, world: check_start(store, world, RunConfig(), DEADLINE_S), world_size, local_world_size)
    assert outcomes == [None] * world_size


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (RunConfig(optim=OptimConfig(lr=0.01)), "optim.lr is 0.01, there 0.001"),
        (RunConfig(train=TrainConfig(batch_size=32, seed=7)), "train.batch_size is 32, there 256; train.seed is 7, there 1"),
        (RunConfig(optim=OptimConfig(lr=0.01), chdir=True), "chdir is True, there False"),
    ],
)
def test_a_rank_with_another_configuration_names_every_key(other: RunConfig, shown: str) -> None:
    def fn(store: HashStore, world: World) -> None:
        check_agreement(store, world, "start", doctor._leaves(dataclasses.asdict(other if world.rank == 1 else RunConfig())), DEADLINE_S)

    first, second, third = on_ranks(fn, 3, 1)
    assert first is None
    assert third is None
    assert "rank 1 (host 1, " in str(second)
    assert shown in str(second)
    assert "same command line" in str(second)
    assert "\n" not in str(second)


def test_paths_may_differ_between_hosts() -> None:
    config = dataclasses.asdict(RunConfig(run_dir="/a"))
    assert not {"run_dir", "data.path", "data.source"} & doctor._leaves(config).keys()


def test_another_version_of_the_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["aaaa", "bbbb"])
    monkeypatch.setattr(doctor, "code_digest", lambda: next(digests))
    outcomes = [
        str(outcome) for outcome in on_ranks(lambda store, world: check_start(store, world, RunConfig(), DEADLINE_S), 2, 2) if outcome
    ]
    assert len(outcomes) == 1
    assert "code of torchrec_kstep is '" in outcomes[0]
    assert "install the same versions on all hosts" in outcomes[0]


def test_the_digest_of_the_code_follows_its_content() -> None:
    assert doctor.code_digest() == doctor.code_digest()
    assert len(doctor.code_digest()) == 12


def test_other_data_are_named() -> None:
    def fn(store: HashStore, world: World) -> None:
        check_agreement(store, world, "data", {"data fingerprint": "ab" if world.rank else "cd"}, DEADLINE_S)

    first, second = on_ranks(fn, 2, 1)
    assert first is None
    assert "data fingerprint is 'ab', there 'cd'; give all hosts the same prepared data set" in str(second)


def test_absent_ranks_are_named_with_their_host() -> None:
    outcomes = on_ranks(lambda store, world: check_start(store, world, RunConfig(), 0.3), 4, 2, absent=(2, 3))
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert "2 of 4 ranks did not come within 0.3 s: ranks [2, 3] of hosts [1]" in str(outcome)


def test_hosts_of_different_numbers_of_ranks_are_named() -> None:
    def fn(store: HashStore, world: World) -> None:
        own = world if world.rank else World(0, 2, 0, 1)
        check_start(store, own, RunConfig(), 1.0)

    _, second = on_ranks(fn, 2, 2)
    assert "ranks per host is 2, there 1" in str(second)


def test_a_host_that_cannot_be_reached_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "dial", lambda *_: "no answer within 5 s")
    outcomes = on_ranks(lambda store, world: check_start(store, world, RunConfig(), DEADLINE_S), 4, 2)
    for outcome in outcomes:
        assert "host 0 (" in str(outcome)
        assert "cannot reach host 1 (" in str(outcome)
        assert "(and 1 more pairs)" in str(outcome)
        assert "GLOO_SOCKET_IFNAME" in str(outcome)


def test_an_interface_that_does_not_exist_is_named_beside_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    outcomes = on_ranks(lambda store, world: check_start(store, world, RunConfig(), 1.0), 2, 1)
    for outcome in outcomes:
        assert "'nosuch0'" in str(outcome)
        assert "lo (127.0.0.1)" in str(outcome)


def test_the_door_is_where_gloo_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    with doctor._open_door() as listener:
        door = doctor._door_of(listener)
        assert (door.interface, door.address) == ("lo", "127.0.0.1")
        assert network.dial(door.address, door.port, 1.0) == ""


def test_facts_survive_json_before_they_are_compared() -> None:
    """A tuple comes back from the store as a list; that is no difference."""
    facts: dict[str, Any] = {"widths": (1, 2)}
    assert on_ranks(lambda store, world: check_agreement(store, world, "x", facts, DEADLINE_S), 2, 1) == [None, None]


def test_network_answers_about_this_machine() -> None:
    assert network.is_mine("127.0.0.1")
    assert not network.is_mine("192.0.2.1")  # TEST-NET-1: nobody's
    assert network.resolve("no-such-host.invalid") is None
    assert network.addresses()["lo"] == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "pid" in network.holder_of(port)
        assert network.dial("127.0.0.1", port, 1.0) == ""
    assert network.dial("127.0.0.1", port, 1.0) == "refused"
    assert network.holder_of(port) == ""
