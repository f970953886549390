"""Parts that several models share. Shapes: B rows of a batch, F fields, D embedding columns, N any width."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import Perceptron
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def stack_features(pooled: KeyedTensor, names: Sequence[str]) -> torch.Tensor:
    """Stacks the pooled embeddings of `names` into `[B, F, D]`.

    Always by name: a sharded collection returns its features in an order of its own.
    """
    by_name = pooled.to_dict()
    return torch.stack([by_name[name] for name in names], dim=1)


class DeepNetwork(nn.Module):
    """A stack of ReLU layers with optional dropout, ending in one linear unit: `[B, N] -> [B]`."""

    def __init__(self, in_features: int, widths: Sequence[int], dropout: float) -> None:
        """Makes hidden layers of `widths`; without any, this is a linear model."""
        super().__init__()
        self.hidden = HiddenLayers(in_features, widths, dropout)
        self.output = nn.Linear(self.hidden.out_features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns one number per row, `[B]`."""
        logit: torch.Tensor = self.output(self.hidden(x))
        return logit.squeeze(1)


class HiddenLayers(nn.Module):
    """A stack of ReLU layers with optional dropout after each: `[B, N] -> [B, out_features]`."""

    def __init__(self, in_features: int, widths: Sequence[int], dropout: float) -> None:
        """Makes one layer per entry of `widths`; without any, the input is handed on."""
        super().__init__()
        layers: list[nn.Module] = []
        self.out_features = in_features
        for width in widths:
            layers.append(Perceptron(self.out_features, width, activation=torch.relu))
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            self.out_features = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the last layer's units."""
        hidden: torch.Tensor = self.layers(x)
        return hidden


class FirstOrder(nn.Module):
    """The linear part of Wide&Deep and of a factorization machine: bias + a weight per id + a weight per dense column.

    Attributes:
        wide: first-order tables; column 0 of a row is the weight of its id.
    """

    def __init__(self, wide: EmbeddingBagCollection, names: Sequence[str], num_dense: int) -> None:
        """Takes the tables of `names` and starts all dense weights at zero."""
        super().__init__()
        self.wide = wide
        self.names = list(names)
        self.num_dense = num_dense
        self.bias = nn.Parameter(torch.zeros(1))
        if num_dense:
            self.dense_weight = nn.Parameter(torch.zeros(num_dense))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Returns `[B]`."""
        logit = stack_features(self.wide(sparse), self.names)[:, :, 0].sum(dim=1) + self.bias
        return logit + dense @ self.dense_weight if self.num_dense else logit
