"""Goal: rows of a row group behave as a tensor that stays connected to them. Layer: unit, needs the compiled library."""

import copy
import io

import pytest
import torch

from torchrec_kstep.ops import kernels
from torchrec_kstep.ops.batch import TableSpec
from torchrec_kstep.ops.row_group import RowGroup
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.sharding.tiered import rows_tensor
from torchrec_kstep.sharding.tiered.rows_tensor import RowBlock, RowsTensor

TABLE = TableSpec("t", num_rows=20, dim=6, table_id=3, seed=5, init="uniform", init_a=-1.0, init_b=1.0)
INITIAL = kernels.initial_values(torch.arange(20), 5, 3, 0, 6, "uniform", -1.0, 1.0)


@pytest.fixture
def group() -> RowGroup:
    return RowGroup.in_dram([TABLE], AdamSpec(lr=1e-2, bias_correction="row"), layout="packed")


def whole(group: RowGroup, field: str = "weight", width: int = 6) -> RowsTensor:
    return RowsTensor(RowBlock(group, 0, field, 0, 20, 0, width))


def num_materialised(group: RowGroup) -> float:
    return group.counters()["t"]["materialised_rows"]


def test_it_shows_the_rows_of_now(group: RowGroup) -> None:
    tensor = whole(group)
    assert (tensor.shape, tensor.dtype, tensor.device.type, tensor.is_contiguous()) == ((20, 6), torch.float32, "cpu", True)
    assert torch.equal(tensor + 0, INITIAL)
    group.write(0, torch.tensor([4]), torch.full((1, 6), 9.0))
    assert float(tensor[4].sum()) == 54.0
    assert "t.weight" in repr(tensor)


def test_slices_stay_connected_and_clones_do_not(group: RowGroup) -> None:
    tensor = whole(group)
    part = tensor[3:7, 2:4].detach()
    assert isinstance(part, RowsTensor)
    kept = tensor.clone()
    part.copy_(torch.arange(8.0).view(4, 2))
    expected = INITIAL.clone()
    expected[3:7, 2:4] = torch.arange(8.0).view(4, 2)
    assert torch.equal(tensor.view(-1, 6) + 0, expected)
    assert torch.equal(kept, INITIAL)
    assert torch.equal(part.narrow(0, 1, 2) + 0, expected[4:6, 2:4])


def test_every_way_of_writing_reaches_the_rows(group: RowGroup) -> None:
    tensor = whole(group)
    tensor[2:3].fill_(7.0)
    tensor[5].zero_()  # a row as a vector is a copy, as the class says
    assert torch.equal(tensor[5] + 0, INITIAL[5])
    tensor[5:6].zero_()
    tensor[6:7] += 1.0
    tensor[7:8].copy_(torch.tensor(2.5))
    torch.nn.init.ones_(tensor[8:9])
    expected = INITIAL.clone()
    expected[2], expected[5], expected[6], expected[7], expected[8] = 7.0, 0.0, INITIAL[6] + 1.0, 2.5, 1.0
    assert torch.equal(tensor + 0, expected)


def test_writing_what_is_there_materialises_nothing(group: RowGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise loading the state of a table of which little was trained would take memory for all of it."""
    monkeypatch.setattr(rows_tensor, "CHUNK_BYTES", 24 * 3)  # three rows at a time
    tensor = whole(group)
    tensor.copy_(INITIAL)
    tensor.copy_(tensor)
    assert num_materialised(group) == 0
    changed = INITIAL.clone()
    changed[[0, 11, 19]] += 1.0
    changed[4, 0] = -0.0 if INITIAL[4, 0] == 0 else INITIAL[4, 0]
    tensor.copy_(changed)
    assert num_materialised(group) == 3
    assert torch.equal(tensor + 0, changed)


def test_integers_and_other_fields(group: RowGroup) -> None:
    steps = whole(group, "step", 1)
    assert steps.dtype == torch.int32
    steps.copy_(torch.arange(20, dtype=torch.int64).view(20, 1))
    assert torch.equal(group.read(0, torch.tensor([7, 3]), "step"), torch.tensor([[7], [3]], dtype=torch.int32))
    assert torch.equal(whole(group) + 0, INITIAL)


def test_copies_and_pickles_are_plain_tensors(group: RowGroup) -> None:
    tensor = whole(group)
    for copied in (copy.deepcopy({"a": tensor})["a"], tensor.cpu().clone(), _through_a_file(tensor)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, INITIAL)


def test_an_empty_block(group: RowGroup) -> None:
    tensor = RowsTensor(RowBlock(group, 0, "weight", 20, 0, 0, 6))
    tensor.copy_(torch.empty(0, 6))
    assert tensor.clone().shape == (0, 6)


def _through_a_file(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, torch.Tensor)
    return loaded
