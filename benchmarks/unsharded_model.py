"""Models in plain PyTorch over one table of all rows, tables one below the other, all other weights in one flat tensor.

Their weights are those of the product's models. Sets without dense columns only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.models.dcn import DeepCross
from torchrec_kstep.models.deepfm import DeepFM, pairwise_sum
from torchrec_kstep.models.wide_deep import WideDeep
from torchrec_kstep.types import SPLITS, Split

Model = DeepFM | WideDeep | DeepCross


@dataclass(frozen=True)
class Rows:
    """A split in memory: `rows` `[N, S]` int64 into the stacked tables, `label` `[N]`; where a bag ends early, the table's last row."""

    rows: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True)
class _Bags:
    """Ids of one feature in a split, and how many each row has."""

    ids: torch.Tensor
    lengths: torch.Tensor

    def padded(self, width: int, first_row: int, no_row: int) -> torch.Tensor:
        """Returns `[N, width]` rows of the stacked tables."""
        rows = torch.full((len(self.lengths), width), no_row)
        rows[torch.arange(width) < self.lengths[:, None]] = self.ids.long() + first_row
        return rows


def read_splits(dataset: Dataset, first_row: torch.Tensor, no_row: int) -> tuple[dict[Split, Rows], torch.Tensor]:
    """Reads all splits.

    Args:
        dataset: what to read.
        first_row: `[F]`, where the table of each feature begins.
        no_row: the row that stands where a bag ends early.

    Returns:
        The splits, and `[S]`: the feature of each column of `rows`.
    """
    bags, labels = {}, {}
    for split in SPLITS:
        batches = list(dataset.batches(split, BatchOrder(batch_size=65_536)))
        parts = [list(batch.sparse.to_dict().values()) for batch in batches]
        features = zip(*parts, strict=True)
        bags[split] = [_Bags(torch.cat([one.values() for one in part]), torch.cat([one.lengths() for one in part])) for part in features]
        labels[split] = torch.cat([batch.label for batch in batches])
    widths = [int(max(bags[split][feature].lengths.max() for split in SPLITS)) for feature in range(len(first_row))]
    splits = {}
    for split in SPLITS:
        places = zip(bags[split], widths, first_row.tolist(), strict=True)
        splits[split] = Rows(torch.cat([bag.padded(width, begin, no_row) for bag, width, begin in places], dim=1), labels[split])
    return splits, torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))


class Stacked(ABC):
    """A model over one table.

    Attributes:
        table: `[R + 1, W + D]`: the first `W` columns of a row are its first-order weight, the others its embedding; the last row
            is zero and stays so.
        num_wide: W, 1 or, for models without a first order, 0.
        first_row: `[F]`, where the table of each feature begins.
        feature_of_column: `[S]`, the feature of each column of `rows`; bags are summed.
        dense: all other weights, flat; `dense_views` and `dense_grad_views` are views of it and of its gradient.
    """

    def __init__(self, model: Model, dense: Sequence[torch.Tensor]) -> None:
        """Takes the weights of a model without dense columns; `dense` are those outside of tables, in the order of the views."""
        bags = model.embeddings.embedding_bags
        parts = [bags[name].weight.detach() for name in model.names]
        self.num_wide = 0
        if not isinstance(model, DeepCross):
            wide = model.first_order.wide.embedding_bags
            parts = [
                torch.cat([wide[f"wide_{name}"].weight.detach()[:, :1], part], dim=1) for name, part in zip(model.names, parts, strict=True)
            ]
            self.num_wide = 1
        self.table = nn.Parameter(torch.cat([*parts, torch.zeros(1, parts[0].shape[1])]))
        self.first_row = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0)
        self.feature_of_column = torch.arange(len(parts))
        self.dense = nn.Parameter(torch.cat([tensor.detach().flatten() for tensor in dense]))
        self._table_grad, self._dense_grad = torch.zeros_like(self.table), torch.zeros_like(self.dense)
        self.table.grad, self.dense.grad = self._table_grad, self._dense_grad
        shapes = [tensor.shape for tensor in dense]
        self.dense_views, self.dense_grad_views = _views(self.dense.data, shapes), _views(self._dense_grad, shapes)

    @abstractmethod
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[B]` for rows `[B, S]`, without a graph."""

    @abstractmethod
    def backward(self, rows: torch.Tensor, label: torch.Tensor) -> None:
        """Fills `table.grad` and `dense.grad` with the gradient of the mean loss over a batch, `[B, S]` and `[B]`."""

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `[B, F, W + D]`."""
        found = self.table.data.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
        if not self._has_bags:
            return found
        return found.new_zeros(len(rows), len(self.first_row), found.shape[2]).index_add_(1, self.feature_of_column, found)

    def add_rows(self, rows: torch.Tensor, grad: torch.Tensor) -> None:
        """Makes `[B, F, W + D]` the gradient of the table."""
        if self._has_bags:
            grad = grad.index_select(1, self.feature_of_column)
        self._table_grad.zero_().index_add_(0, rows.reshape(-1), grad.view(-1, grad.shape[2]))
        self._table_grad[-1].zero_()

    @property
    def _has_bags(self) -> bool:
        return len(self.feature_of_column) > len(self.first_row)

    def zero_dense_grad(self) -> None:
        """Zeroes the gradient of the weights outside of the table."""
        self._dense_grad.zero_()


class StackedModule(Stacked):
    """Any of the models, differentiated by autograd."""

    def __init__(self, model: Model) -> None:
        """Takes over the model: its weights outside of tables become views of `dense`."""
        params = [param for name, param in model.named_parameters() if ".embedding_bags." not in name]
        super().__init__(model, params)
        self._model = model
        for param, value, grad in zip(params, self.dense_views, self.dense_grad_views, strict=True):
            param.data, param.grad = value, grad

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Stacked`."""
        with torch.no_grad():
            return self._head(self.look_up(rows))

    def backward(self, rows: torch.Tensor, label: torch.Tensor) -> None:
        """See `Stacked`."""
        self.zero_dense_grad()
        with torch.enable_grad():
            found = self.look_up(rows).requires_grad_()
            binary_cross_entropy_with_logits(self._head(found), label).backward()
        assert found.grad is not None, "a model that reads no rows"
        with torch.no_grad():
            self.add_rows(rows, found.grad)

    def _head(self, found: torch.Tensor) -> torch.Tensor:
        model, fields = self._model, found[:, :, self.num_wide :]
        x = fields.flatten(1)
        logit: torch.Tensor
        if isinstance(model, DeepCross):
            logit = model.output(torch.cat([model.cross(x), model.hidden(x)], dim=1)).squeeze(1)
            return logit
        logit = found[:, :, 0].sum(dim=1) + model.first_order.bias + model.deep(x)
        return logit + pairwise_sum(fields) if isinstance(model, DeepFM) else logit


class StackedDeepFM(Stacked):
    """A DeepFM with its gradient written out: autograd is half the time of a small step."""

    def __init__(self, model: DeepFM) -> None:
        """Takes the weights of a model without dense columns; `layers` are (weight, bias) from the first to the last."""
        linears = [module for module in model.deep.modules() if isinstance(module, nn.Linear)]
        super().__init__(model, [*(param for linear in linears for param in (linear.weight, linear.bias)), model.first_order.bias])
        *self.layers, (self.bias,) = _pairs(self.dense_views)
        *self._layer_grads, (self._bias_grad,) = _pairs(self.dense_grad_views)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Stacked`."""
        return self._forward(rows)[0]

    def backward(self, rows: torch.Tensor, label: torch.Tensor) -> None:
        """See `Stacked`."""
        logit, fields, hidden = self._forward(rows)
        error = ((logit.sigmoid() - label) / len(label))[:, None]
        upstream = error
        for (weight, _), (weight_grad, bias_grad), below in reversed(list(zip(self.layers, self._layer_grads, hidden, strict=True))):
            torch.mm(upstream.t(), below, out=weight_grad)
            torch.sum(upstream, 0, out=bias_grad)
            upstream = upstream @ weight
            if below is not hidden[0]:
                upstream.mul_(below > 0)
        torch.sum(error, 0, out=self._bias_grad)
        pairs = fields.sum(dim=1, keepdim=True) - fields  # gradient of the sum over pairs
        grad = torch.cat(
            [error.expand(fields.shape[:2])[:, :, None], torch.addcmul(upstream.view(fields.shape), error[:, :, None], pairs)], dim=2
        )
        self.add_rows(rows, grad)

    def _forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Returns logits, embeddings `[B, F, D]`, and what goes into each layer."""
        found = self.look_up(rows)
        fields = found[:, :, 1:]
        hidden = [fields.reshape(len(rows), -1)]
        for weight, bias in self.layers[:-1]:
            hidden.append(torch.addmm(bias, hidden[-1], weight.t()).relu_())
        weight, bias = self.layers[-1]
        deep = torch.addmm(bias, hidden[-1], weight.t())[:, 0]
        return found[:, :, 0].sum(dim=1) + self.bias + pairwise_sum(fields) + deep, fields, hidden


def stacked(model: nn.Module) -> Stacked:
    """Returns the fastest form of one of the product's models."""
    assert isinstance(model, Model), "made for deepfm, wide_deep, dcn and dcnv2"
    assert not getattr(model, "num_dense", 0), "made for sets without dense columns"
    return StackedDeepFM(model) if isinstance(model, DeepFM) else StackedModule(model)


def _views(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Cuts a flat tensor into views of these shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _pairs(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Groups (weight, bias), (weight, bias), ..., (last,)."""
    return [tuple(tensors[begin : begin + 2]) for begin in range(0, len(tensors), 2)]
