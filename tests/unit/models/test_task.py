"""The loss of the training task, and which batches it refuses. Layer: unit."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.batches import Rows, make_schema
from torchrec_kstep.errors import DataError
from torchrec_kstep.models import CTRTask
from torchrec_kstep.types import Batch


class _Linear(nn.Module):
    """A model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        return dense[:, 0] * self.weight + sparse.lengths().reshape(1, -1)[0]


SCHEMA = make_schema([10], num_dense=1)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shares_add_up_to_the_mean_over_the_global_batch(count: int) -> None:
    """Otherwise uneven shares and padding rows would weigh as much as real ones."""
    rows = Rows.random(SCHEMA, 7, seed=3)
    whole_loss, whole = CTRTask(_Linear(), 1)(rows.batch())
    mean = nn.functional.binary_cross_entropy_with_logits(whole.logit, rows.label)
    torch.testing.assert_close(whole_loss, mean)
    losses = torch.stack([CTRTask(_Linear(), count)(rows.share(index, count))[0] for index in range(count)])
    torch.testing.assert_close(losses.mean(), whole_loss)


def test_predictions_are_detached_and_keep_labels_and_weights() -> None:
    """Otherwise metrics would hold every graph alive, or count padding rows."""
    batch = Rows.random(SCHEMA, 3, seed=4).share(1, 2)
    _, predictions = CTRTask(_Linear(), 2)(batch)
    assert not predictions.logit.requires_grad
    assert predictions.weight.tolist() == [1.0, 0.0]
    assert torch.equal(predictions.label, batch.label)


def _variable(batch: Batch) -> Batch:
    sparse = KeyedJaggedTensor(
        ["f0", "f1"], torch.zeros(2, dtype=torch.int64), lengths=torch.tensor([1, 0, 1, 0, 0]), stride_per_key_per_rank=[[2], [3]]
    )
    return replace(batch, sparse=sparse)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_variable, r"a variable batch is not supported.*'f0': 2, 'f1': 3"),
        (lambda batch: replace(batch, label=batch.label[:-1]), r"differ in their number of rows.*'label': 2"),
        (lambda batch: replace(batch, weight=batch.weight[:1]), r"'weight': 1"),
        (lambda batch: replace(batch, dense=torch.zeros(5, 1)), r"'dense': 5"),
    ],
)
def test_batches_whose_parts_disagree_are_refused(spoil: object, expected: str) -> None:
    """Otherwise broadcasting would turn a wrong batch into a plausible loss (C11)."""
    with pytest.raises(DataError, match=expected):
        CTRTask(_Linear(), 1)(spoil(Rows.random(SCHEMA, 3, seed=5).batch()))  # type: ignore[operator]
