"""The cost model against sums done by hand, and the directions in which it must move. Layer: unit."""

import dataclasses

import numpy as np
import pytest

from torchrec_kstep.cost import QUANTITIES, AccessCurve, Coefficients, Machine, StepSetup, Table, shard_work
from torchrec_kstep.cost.machine import STUCK_SHARE
from torchrec_kstep.cost.price import StepTime, price
from torchrec_kstep.cost.round_misses import round_misses
from torchrec_kstep.cost.work import read_unit_bytes
from torchrec_kstep.errors import TopologyError
from torchrec_kstep.topology import ClusterTopology, Device, Drive, DrivePoint, Exchange, Host, Link, Network, Nic, NumaNode
from torchrec_kstep.units import GIB

FREE = Coefficients.zero()


def cpu_host(name: str = "host", nic: float = 1e9) -> Host:
    drive = Drive("ssd0", 10**12, (DrivePoint(4096, 128, 1e5), DrivePoint(1 << 20, 128, 2e3)), 1e9)
    return Host(
        name,
        (NumaNode("numa0", 64 * GIB, 1e10, 4e9, 4),),
        Exchange(2e9, 0.0),
        nics=(Nic("nic0", nic),),
        drives=(drive,),
        links=(Link(("numa0", "nic0"), 1e11, 0.0), Link(("numa0", "ssd0"), 1e11, 0.0)),
    )


def cluster(num_hosts: int = 1, nic: float = 1e9) -> ClusterTopology:
    return ClusterTopology("c", tuple(cpu_host(f"host{index}", nic) for index in range(num_hosts)), Network(0.0, 1.0))


def table(num_rows: int = 10**6, dim: int = 64, state_bytes: int = 512, ids: float = 1.0) -> Table:
    return Table("t", num_rows, dim, AccessCurve.zipf(num_rows, 1.05), ids, 1, state_bytes)


def priced(machine: Machine, holders: dict[int, np.ndarray]) -> StepTime:
    work = np.zeros((machine.num_ranks, len(QUANTITIES)))
    for rank, vector in holders.items():
        work[rank] += vector
    return price(machine, work)


def seconds(step: StepTime) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in step.phases}


def test_a_table_on_one_of_two_ranks_by_hand() -> None:
    """Otherwise a factor of two could hide anywhere."""
    setup = StepSetup(1000, world_size=2, local_world_size=2, kernel="fused")
    machine = Machine.of(cluster(), setup, coefficients=FREE)
    work = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False)
    distinct = AccessCurve.zipf(10**6, 1.05).distinct_rows(2000)
    found = seconds(priced(machine, {0: work.vector}))
    assert found["ids"] == pytest.approx((1000 * 8 + 1000 * 8) / 2e9)  # ids and lengths of the other rank
    assert found["lookup"] == pytest.approx(distinct * 256 / 4e9), "a row that comes again is in the cache"
    assert found["outputs"] == pytest.approx(1000 * 256 / 2e9)
    assert found["gradients"] == found["outputs"]
    assert found["update"] == pytest.approx(2 * distinct * (256 + 512) / 4e9)
    cached = Machine.of(cluster(), setup, coefficients=dataclasses.replace(FREE, memory_factor=0.0, cached_byte_s=1e-9))
    assert seconds(priced(cached, {0: work.vector}))["update"] == pytest.approx(2000 * 256 * 1e-9, rel=0.5)
    assert seconds(priced(cached, {0: work.vector}))["lookup"] == pytest.approx(2000 * 256 * 1e-9)
    assert found["tiers"] == 0.0


def test_two_ranks_share_the_memory_of_their_numa_node() -> None:
    setup = StepSetup(1000, world_size=4, local_world_size=4, kernel="fused")
    machine = Machine.of(cluster(), setup, coefficients=FREE)
    work = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    one, four = seconds(priced(machine, {0: work}))["lookup"], seconds(priced(machine, dict.fromkeys(range(4), work)))["lookup"]
    distinct = AccessCurve.zipf(10**6, 1.05).distinct_rows(4000)
    assert one == pytest.approx(distinct * 256 / 4e9)
    assert four == pytest.approx(4 * distinct * 256 / 1e10), "4 x 4 GB/s is more than the 10 GB/s of the memory"


def test_ranks_that_share_cores_wait_for_the_sum_and_one_alone_does_not() -> None:
    """Otherwise a rank with little to do would look as slow as the busiest, and balance would be bought where none is needed."""
    setup = StepSetup(1000, world_size=8, local_world_size=8, kernel="fused")
    machine = Machine.of(cluster(), setup, coefficients=dataclasses.replace(FREE, memory_factor=0.0, lookup_id_s=1e-6))
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    alone, all_of_them, two = (
        next(phase for phase in priced(machine, dict.fromkeys(ranks, vector)).phases if phase.name == "lookup")
        for ranks in (range(1), range(8), range(2))
    )
    assert alone.seconds == two.seconds == pytest.approx(8000 * 1e-6), "four cores for two ranks with work"
    assert alone.bottleneck == "cores of host0/rank0"
    assert all_of_them.seconds == pytest.approx(8 * 8000 * 1e-6 / 4)
    assert all_of_them.bottleneck.startswith("shared cores of host0/rank")


def test_work_that_is_spread_unevenly_over_ranks_on_few_cores_takes_longer() -> None:
    """The system does not move ranks to a free core at once, so a plan that leaves ranks empty is not as good as an even one."""
    setup = StepSetup(1000, world_size=8, local_world_size=8, kernel="fused")
    machine = Machine.of(cluster(), setup, coefficients=dataclasses.replace(FREE, memory_factor=0.0, lookup_id_s=1e-6))
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    even, uneven = (
        seconds(priced(machine, {rank: share * vector for rank, share in enumerate(shares)}))["lookup"]
        for shares in ([1.0] * 8, [1.9, 0.1] * 4)
    )
    assert even == pytest.approx(2 * 8e-3), "two ranks on each core"
    met = 1.9 + (8 - 1.9) / 7  # of a rank with much to do, and one of the seven others
    assert uneven == pytest.approx(8e-3 * ((1 - STUCK_SHARE) * 2 + STUCK_SHARE * met))
    assert 1.03 * even < uneven < 1.25 * even


def test_every_rank_takes_all_features_apart_wherever_their_tables_lie() -> None:
    setup = StepSetup(100, world_size=2, local_world_size=2, num_features=26, activations_per_sample=50)
    machine = Machine.of(cluster(), setup, coefficients=dataclasses.replace(FREE, feature_s=1e-4, activation_s=1e-9))
    found = seconds(priced(machine, {}))
    assert found["loop"] == pytest.approx(26e-4)
    assert found["dense"] == pytest.approx(100 * 50 * 1e-9)


@pytest.mark.parametrize(("num_ranks", "turns"), [(4, 0), (8, 1), (16, 3)])
def test_exchanges_wait_for_turns_where_ranks_share_cores(num_ranks: int, turns: int) -> None:
    setup = StepSetup(10, world_size=num_ranks, local_world_size=num_ranks)
    machine = Machine.of(cluster(), setup, coefficients=dataclasses.replace(FREE, turn_s=1e-3))
    assert seconds(priced(machine, {}))["ids"] == pytest.approx(turns * 1e-3)


def test_tables_cut_in_several_ways_are_exchanged_for_each_of_them() -> None:
    """A table in rows beside whole ones cost ten milliseconds of exchanges where ranks share cores, and was priced as free."""
    setup = StepSetup(1000, world_size=2, local_world_size=2)
    free = Machine.of(cluster(), setup, coefficients=FREE)
    machine = Machine.of(cluster(), setup, coefficients=FREE.having({"collective_s": 1e-3}))
    whole = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    rows = shard_work(table(), setup, "row_wise", 2, "dram", 0, on_device=False).vector
    replica = shard_work(table(1000), setup, "data_parallel", 2, "dram", 0, on_device=False).vector
    for holders, num_ways in (
        ({0: whole, 1: whole}, 1),
        ({0: rows, 1: rows}, 1),
        ({0: whole + rows, 1: rows}, 2),
        ({0: whole + replica, 1: replica}, 1),
    ):
        with_latency, without = seconds(priced(machine, holders)), seconds(priced(free, holders))
        for name in ("ids", "outputs", "gradients"):
            assert with_latency[name] - without[name] == pytest.approx(num_ways * 1e-3)


def test_a_shaped_card_passes_bursts_and_keeps_up_its_rate() -> None:
    """Small exchanges pass a token bucket at the speed of the wire; in the mean a step sends no faster than the bucket fills."""
    burst, rate = 250_000, 1e8
    hosts = tuple(dataclasses.replace(host, nics=(Nic("nic0", rate, burst_bytes=burst),)) for host in cluster(2).hosts)
    setup = StepSetup(1000, world_size=2, local_world_size=1, kernel="fused")
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    step = priced(Machine.of(ClusterTopology("c", hosts), setup, coefficients=FREE), {0: vector})
    found = seconds(step)
    ids, rows = 16_000, 256_000
    assert found["ids"] == pytest.approx(ids / 2e9), "by the ranks' own exchange alone"
    assert found["outputs"] == found["gradients"] == pytest.approx(rows / 2e9), "the 6 kB above the burst take less than that"
    chain = step.seconds - found["links"]
    assert step.seconds == pytest.approx((ids + rows) / rate), "all that goes to rank 0, at the rate"
    busy = dataclasses.replace(setup, flops_per_sample=1e4)
    machine = Machine.of(ClusterTopology("c", hosts), busy, coefficients=dataclasses.replace(FREE, flop_s=1e-9))
    step = priced(machine, {0: vector})
    assert step.seconds == pytest.approx(chain + 1e-2), "the card gathers its bursts while ranks compute"
    assert next(phase for phase in step.phases if phase.name == "links").is_hidden


def test_reads_of_a_cold_table_are_bound_by_operations_and_shared_by_ranks() -> None:
    """Otherwise a drive would look as fast for rows of 200 bytes as for files (what TorchRec's planner assumes)."""
    setup = StepSetup(1000, world_size=2, local_world_size=2)
    machine = Machine.of(cluster(), setup, coefficients=FREE)
    work = shard_work(table(state_bytes=0), setup, "table_wise", 1, "ssd", 0, on_device=False)
    missed = work.num_missed_rows
    assert missed == work.num_distinct_rows
    one = seconds(priced(machine, {0: work.vector}))["tiers"]
    reads, writes = missed / 1e5, missed * (256 + 20) * 1.5 / 1e9
    assert one + sum(seconds(priced(machine, {0: work.vector}))[name] for name in ("ids", "lookup", "outputs", "gradients", "update")) == (
        pytest.approx(reads + writes, rel=1e-6)
    ), "the chain runs inside the time of the drive"
    both = priced(machine, {0: work.vector, 1: work.vector})
    assert both.seconds == pytest.approx(2 * (reads + writes), rel=1e-6)


def test_a_cache_pays_for_itself() -> None:
    """TorchRec's planner charges 741 ms for a table on SSD whatever its cache holds."""
    setup = StepSetup(4096, world_size=1)
    machine = Machine.of(cluster(), setup)
    times = [
        priced(machine, {0: shard_work(table(10**8), setup, "table_wise", 1, "ssd", rows, on_device=False).vector}).seconds
        for rows in (0, 10**5, 10**6, 10**7, 10**8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.8 * times[-1]


def test_without_prefetch_the_drive_is_waited_for() -> None:
    setup = StepSetup(1000, world_size=1)
    work = shard_work(table(), setup, "table_wise", 1, "ssd", 10**5, on_device=False).vector
    ahead = priced(Machine.of(cluster(), setup), {0: work})
    waiting = priced(Machine.of(cluster(), dataclasses.replace(setup, prefetch=False)), {0: work})
    chain = sum(phase.seconds for phase in waiting.phases if phase.name != "tiers")
    tiers = seconds(waiting)["tiers"]
    assert waiting.seconds == pytest.approx(chain + tiers)
    assert ahead.seconds == pytest.approx(max(chain, tiers))


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"])
def test_faster_links_never_make_a_step_slower(sharding: str) -> None:
    setup = StepSetup(1000, world_size=4, local_world_size=2, kernel="fused", dense_parameters=10**6)
    num_shards = {"table_wise": 1, "table_row_wise": 2}.get(sharding, 4)
    vector = shard_work(table(), setup, sharding, num_shards, "dram", 0, on_device=False).vector  # type: ignore[arg-type]
    times = [priced(Machine.of(cluster(2, nic), setup), dict.fromkeys(range(num_shards), vector)).seconds for nic in (1e7, 1e8, 1e9, 1e10)]
    assert times == sorted(times, reverse=True)


def test_merge_rounds_cost_less_the_rarer_they_are_and_nothing_for_one_replica() -> None:
    """Otherwise k would be without effect, as in TorchRec's planner."""
    times = []
    for k in (1, 10, 100):
        setup = StepSetup(1000, world_size=2, local_world_size=2, k=k, num_replicas=2, dense_parameters=10**6)
        vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
        times.append(seconds(priced(Machine.of(cluster(2), setup), {0: vector, 1: vector}))["merge"])
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0] / 5
    alone = StepSetup(1000, world_size=2, local_world_size=2)
    vector = shard_work(table(), alone, "table_wise", 1, "dram", 0, on_device=False).vector
    assert seconds(priced(Machine.of(cluster(), alone), {0: vector}))["merge"] == 0.0


def test_merge_rounds_over_rows_on_drives_read_and_write_them() -> None:
    """Otherwise rounds would be free of what takes most of their time where tables are larger than memory."""
    setup = StepSetup(1000, world_size=1, local_world_size=1, k=10, num_replicas=2)
    machine = Machine.of(cluster(2), setup, coefficients=FREE)
    work = shard_work(table(), setup, "table_wise", 1, "ssd", 5_000, on_device=False)
    misses = round_misses(AccessCurve.zipf(10**6, 1.05), 1000, 10, 2, 5_000)
    assert misses.per_round > 1_000
    assert work.num_missed_rows == misses.per_step > AccessCurve.zipf(10**6, 1.05).missed_rows(1000, 5_000)
    found = seconds(priced(machine, {0: work.vector}))
    assert found["merge"] == pytest.approx(misses.per_round / 10 * (1 / 1e5 + (256 + 512 + 20) * 1.5 / 1e9), rel=1e-6)
    in_memory = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False)
    assert seconds(priced(machine, {0: in_memory.vector}))["merge"] < found["merge"]
    all_cached = shard_work(table(), setup, "table_wise", 1, "ssd", 10**6, on_device=False)
    assert seconds(priced(machine, {0: all_cached.vector}))["merge"] == seconds(priced(machine, {0: in_memory.vector}))["merge"]


@pytest.mark.parametrize("k", [0, 10])
def test_rows_that_a_run_touches_for_the_first_time_are_not_read(k: int) -> None:
    """Otherwise short runs over large tables would be taken to wait for drives that they hardly read from."""
    endless = StepSetup(1000, k=k, num_replicas=2 if k else 1)
    reads = []
    for num_steps in (20, 400, 100_000, 0):
        work = shard_work(table(), dataclasses.replace(endless, num_steps=num_steps), "table_wise", 1, "ssd", 5_000, on_device=False)
        reads.append(work.quantities["drive_reads"] + work.quantities.get("merge_reads", 0.0))
        assert work.quantities["tier_rows"] == work.num_missed_rows, "they come into the cache and displace others all the same"
    assert reads == sorted(reads)
    missed = work.num_missed_rows + work.quantities.get("merge_tier_rows", 0.0)
    first_touches = AccessCurve.zipf(10**6, 1.05).distinct_rows(1000 * 400 * (2 if k else 1)) / 400
    assert reads[1] == pytest.approx(missed - first_touches)
    assert reads[-1] == pytest.approx(missed)


def test_replicas_count_their_work_on_their_own_hosts() -> None:
    """One plan is carried by all replicas: the slower host sets the pace."""
    slow = dataclasses.replace(cpu_host("host1"), numa_nodes=(NumaNode("numa0", 64 * GIB, 1e10, 1e9, 4),))
    topology = ClusterTopology("c", (cpu_host("host0"), slow))
    setup = StepSetup(1000, world_size=2, local_world_size=2, k=10, num_replicas=2)
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    lookup = next(phase for phase in priced(Machine.of(topology, setup, coefficients=FREE), {0: vector}).phases if phase.name == "lookup")
    assert lookup.bottleneck == "cores of host1/rank0"
    assert lookup.seconds == pytest.approx(AccessCurve.zipf(10**6, 1.05).distinct_rows(2000) * 256 / 1e9)


def test_row_shards_split_rows_and_repeat_outputs() -> None:
    setup = StepSetup(1000, world_size=4, local_world_size=4, kernel="fused")
    whole = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False)
    quarter = shard_work(table(), setup, "row_wise", 4, "dram", 0, on_device=False)
    assert 4 * quarter.memory["dram_bytes"] == pytest.approx(whole.memory["dram_bytes"])
    assert 4 * quarter.quantities["lookup_ids"] == whole.quantities["lookup_ids"]
    assert quarter.quantities["summed_output_bytes"] == whole.quantities["output_bytes"], "partial sums of every bag, from every shard"


def test_gloo_sends_what_it_sums_twice_and_gradients_once() -> None:
    """Its reduce-scatter sums whole tensors on every rank; counted by the bytes at an interface."""
    setup = StepSetup(1000, world_size=2, local_world_size=1)
    machine = Machine.of(cluster(2, nic=1e8), setup, coefficients=FREE)
    halves = {rank: shard_work(table(), setup, "row_wise", 2, "dram", 0, on_device=False).vector for rank in (0, 1)}
    rows = seconds(priced(machine, halves))
    whole = seconds(priced(machine, {0: shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector}))
    assert rows["outputs"] == pytest.approx(2 * whole["outputs"], rel=0.05)
    assert rows["gradients"] == pytest.approx(whole["gradients"], rel=0.05)


def test_devices_fetch_what_their_cache_lacks_over_their_own_link() -> None:
    """A rank behind a slow link must be told from the others."""
    host = Host(
        "host",
        (NumaNode("numa0", 64 * GIB, 1e11, 1e10, 8),),
        Exchange(1e9, 0.0),
        devices=(Device("gpu0", 16 * GIB, 1e12, 5e11), Device("gpu1", 16 * GIB, 1e12, 5e11)),
        links=(Link(("numa0", "gpu0"), 1.6e10, 0.0), Link(("numa0", "gpu1"), 2e9, 0.0)),
    )
    setup = StepSetup(1000, world_size=2, local_world_size=2, prefetch=False)
    machine = Machine.of(ClusterTopology("c", (host,)), setup, coefficients=FREE)
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=True).vector
    fast, slow = (seconds(priced(machine, {rank: vector}))["tiers"] for rank in (0, 1))
    assert slow == pytest.approx(8 * fast)


def test_a_read_unit_is_that_of_the_store() -> None:
    """The same rule as the compiled store's, whose layout is asked for here."""
    from torchrec_kstep.storage.division import RecordLayout

    for payload in (4, 64, 192, 768, 1536, 3072, 6144, 10_000):
        layout = RecordLayout.of(payload, 64 << 20)
        assert read_unit_bytes(layout.record_bytes) == layout.unit_bytes, payload


def test_ranks_that_cannot_be_spread_over_the_hosts_are_refused() -> None:
    with pytest.raises(TopologyError, match="3 hosts, over which 4 ranks cannot be spread evenly"):
        Machine.of(cluster(3), StepSetup(10, world_size=4, local_world_size=4))


def test_the_error_bar_is_wider_where_numbers_are_declared() -> None:
    setup = StepSetup(1000, world_size=2, local_world_size=2)
    vector = shard_work(table(), setup, "table_wise", 1, "dram", 0, on_device=False).vector
    declared = priced(Machine.of(cluster(), setup), {0: vector})
    measured = priced(Machine.of(dataclasses.replace(cluster(), is_measured=True), setup), {0: vector})
    assert 0 < measured.error_s < declared.error_s < declared.seconds
