"""Sums of what rounds cost: means per round, bytes per step, at the collective and at the interface."""

from pathlib import Path

from torchrec_kstep.merge.report import RoundReport
from torchrec_kstep.optim.rounds import RoundTotals
from torchrec_kstep.replicas.interface import interface_sent_bytes

DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 900 9 0 0 0 0 0 0 900 9 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 4000 2 0 0 0 0 0 0
  ib0:5 1 0 0 0 0 0 0 30 2 0 0 0 0 0 0
"""


def report(rows: int, num_bytes: int) -> RoundReport:
    made = RoundReport(0, 4, 2)
    made.num_own_rows["a"] = rows
    made.num_union_rows["a"] = 2 * rows
    made.sent_bytes["up"] = num_bytes
    made.duration_s["up header"] = 0.5
    return made


def test_means_per_round_and_bytes_per_step() -> None:
    totals = RoundTotals()
    totals.add_dense(0.25, 1.0, num_bytes_sent=100)
    totals.add_rows(report(10, 300))
    totals.add_dense(0.75, 3.0, num_bytes_sent=300)
    totals.add_rows(report(30, 500))
    values = totals.take(step=10)
    assert values["rounds"] == 2
    assert values["dense_drift"] == 0.5
    assert values["dense_s"] == 2.0
    assert values["dense_sent_bytes"] == 150
    assert (values["own_rows"], values["union_rows"]) == (20, 40)
    assert values["rows_up_header_s"] == 0.5
    assert values["sent_bytes_per_step"] == (300 + 800) / 10
    assert totals.take(step=20) == {}
    totals.add_dense(0.0, 0.0, num_bytes_sent=340)
    assert totals.take(step=24)["sent_bytes_per_step"] == 40 / 14


def test_synchronous_steps_count_their_gradients() -> None:
    totals = RoundTotals(lambda: None)
    totals.add_gradients(100)
    totals.add_gradients(250)
    assert totals.take(step=5) == {"rounds": 0.0, "sent_bytes_per_step": 50.0}


def test_what_left_the_host_is_counted_from_report_to_report() -> None:
    interface = iter([1000, 5000, 5600])
    totals = RoundTotals(lambda: next(interface))
    assert totals.take(step=3) == {}, "these steps, and what was sent in them, belong to the next report"
    totals.add_gradients(8)
    assert totals.take(step=8)["interface_sent_bytes_per_step"] == 4000 / 8
    totals.add_gradients(16)
    assert totals.take(step=10)["interface_sent_bytes_per_step"] == 600 / 2


def test_interfaces_but_the_loopback_are_summed(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(DEV, encoding="ascii")
    assert interface_sent_bytes(tmp_path / "dev") == 4030
    assert interface_sent_bytes(tmp_path / "absent") is None
