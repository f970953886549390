"""What a merge round beside training holds takes the memory of the round before: fresh memory costs a page fault per page."""

import torch

from torchrec_kstep.ops import merge, messages
from torchrec_kstep.ops.batch import Contributions, RowGradients, TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import SgdSpec
from torchrec_kstep.units import MIB

NUM_MESSAGES = 24  # eight buckets, three messages each
NUM_TABLES, NUM_ROWS, DIM = 8, 5000, 64  # more than a MiB each


def test_as_many_messages_as_a_round_has_come_back() -> None:
    def places() -> set[int]:
        held = [messages.empty(2 * MIB) for _ in range(NUM_MESSAGES)]
        return {message.data_ptr() for message in held}

    assert places() == places()


def test_contributions_of_all_tables_come_back() -> None:
    group = RowGroup.in_dram([TableSpec(f"t{index}", NUM_ROWS, DIM) for index in range(NUM_TABLES)], SgdSpec(lr=0.1, touches="count"))
    group.track(0, ["weight"])
    rows = torch.arange(NUM_ROWS)
    bounds = torch.arange(NUM_TABLES + 1) * NUM_ROWS
    counts = torch.ones(NUM_TABLES * NUM_ROWS, dtype=torch.int32)
    group.set_step(0.1, 1)
    group.apply(RowGradients(rows.repeat(NUM_TABLES), bounds, counts, torch.ones(NUM_TABLES * NUM_ROWS * DIM)))

    def places() -> set[int]:
        held: list[Contributions] = [merge.collect(group, table, rows) for table in range(NUM_TABLES)]
        return {values.data_ptr() for contribution in held for values in contribution.values.values()}

    assert places() == places()
