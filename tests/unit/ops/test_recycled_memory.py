"""What a merge round beside training holds takes the memory of the round before: memory that was never used costs page faults."""

import resource
from collections.abc import Callable

import torch

from torchrec_kstep.ops import merge, messages
from torchrec_kstep.ops.batch import RowGradients, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import SgdSpec
from torchrec_kstep.units import MIB

NUM_MESSAGES, MESSAGE_BYTES = 24, 6 * MIB  # eight buckets, three messages each
NUM_TABLES, NUM_ROWS, DIM = 16, 10_000, 64
MAX_FAULTS = 10  # of the interpreter; without recycling there are more than twenty, were all pages huge


def faults_of(round_: Callable[[], object]) -> int:
    """Least page faults of this process in one of five rounds, after two others: what else goes on only adds some."""
    found = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        round_()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[2:])


def test_as_many_messages_as_a_round_has_come_back() -> None:
    assert faults_of(lambda: [messages.empty(MESSAGE_BYTES).fill_(1) for _ in range(NUM_MESSAGES)]) < MAX_FAULTS


def test_contributions_of_all_tables_come_back() -> None:
    group = RowGroup.in_dram([TableSpec(f"t{index}", NUM_ROWS, DIM) for index in range(NUM_TABLES)], SgdSpec(lr=0.1, touches="count"))
    group.track(0, ["weight"])
    rows = torch.arange(NUM_ROWS)
    bounds = torch.arange(NUM_TABLES + 1) * NUM_ROWS
    counts = torch.ones(NUM_TABLES * NUM_ROWS, dtype=torch.int32)
    group.set_step(0.1, 1)
    group.apply(RowGradients(rows.repeat(NUM_TABLES), bounds, counts, torch.ones(NUM_TABLES * NUM_ROWS * DIM)))
    assert faults_of(lambda: [merge.collect(group, table, rows) for table in range(NUM_TABLES)]) < MAX_FAULTS
