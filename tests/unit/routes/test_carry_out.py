"""What ranks agree on when interfaces are missing, and what gloo is told. Ranks are threads around one store. Layer: unit."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from torchrec_kstep.errors import ConfigError, LaunchError
from torchrec_kstep.routes import CarriedOut, JobRoutes, RankRoutes, carry_out, gloo_over
from torchrec_kstep.world import World

GLOO = "GLOO_SOCKET_IFNAME"


class DictStore:
    """A key-value store within this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10)
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


@pytest.fixture(autouse=True)
def gloo_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "before")


def job(interface: str, *, is_ordered: bool = False, drive_shares: tuple[float, ...] = ()) -> JobRoutes:
    """Two hosts of one rank each, both on this machine."""
    rank = RankRoutes(0, 0, 0, "numa0", "any", (0, 1), (), drive_shares, "nic0", interface, interface, "lo", is_ordered)
    return JobRoutes("test", ("/a", "/b"), (rank, replace(rank, rank=1, host=1)))


def on_both_ranks(routes: JobRoutes, deadline_s: float = 20.0) -> list[CarriedOut]:
    store = DictStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: carry_out(store, World(rank, 2, 0, 1), routes, deadline_s), range(2)))


def test_gloo_is_told_the_interface_of_the_rank() -> None:
    first, second = on_both_ranks(job("lo"))
    assert os.environ[GLOO] == "lo"
    assert first.rank.merge_interface == "lo"
    assert first.routes == second.routes
    assert first.warnings == ()
    assert first.done == second.done
    assert any("GLOO_SOCKET_IFNAME=lo" in line for line in first.done)


def test_an_interface_that_one_host_lacks_is_used_by_none() -> None:
    """Otherwise ranks would listen where no peer dials."""
    routes = job("lo")
    routes = replace(routes, ranks=(routes.ranks[0], replace(routes.ranks[1], interface="eth77", merge_interface="eth77")))
    for result in on_both_ranks(routes):
        assert result.rank.interfaces == ()
        assert len(result.warnings) == 1
        assert "has no interface 'eth77' with an IPv4 address; it has " in result.warnings[0]
    assert os.environ[GLOO] == "before"


def test_one_that_was_asked_for_is_an_error_on_all_ranks() -> None:
    store = DictStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(carry_out, store, World(rank, 2, 0, 1), job("eth77", is_ordered=True), 20.0) for rank in range(2)]
        for rank in ranks:
            with pytest.raises(ConfigError, match=r"routes\.interfaces: host .* has no interface 'eth77'"):
                rank.result()


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(LaunchError, match=r"1 of 2 ranks did not come within 0\.2 s: ranks \[1\]"):
        carry_out(DictStore(), World(0, 2, 0, 1), job(""), 0.2)


def test_drive_shares_are_told() -> None:
    result = on_both_ranks(job("", drive_shares=(3.0, 1.0)))[0]
    assert "rank 0: any core; rows 75% on /a, 25% on /b; replica over lo" in result.lines()
    assert "  rank 1: nothing" in result.lines()


@pytest.mark.parametrize("before", [None, "eth0"])
def test_groups_made_meanwhile_use_an_interface_and_others_do_not(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(GLOO)
    else:
        monkeypatch.setenv(GLOO, before)
    with gloo_over("lo"):
        assert os.environ[GLOO] == "lo"
        with gloo_over(""):
            assert os.environ[GLOO] == "lo"
    assert os.environ.get(GLOO) == before
