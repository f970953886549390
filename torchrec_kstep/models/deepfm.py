"""DeepFM: a factorization machine and a deep network over the same embeddings (Guo et al., 2017, arXiv 1703.04247)."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.models.blocks import DeepNetwork, FirstOrder, stack_features


def pairwise_sum(fields: torch.Tensor) -> torch.Tensor:
    """Sums the dot products of all pairs of fields, eq. 2 of the paper in linear time: `[B, F, D] -> [B]`.

    TorchRec's `FactorizationMachine` module flattens F and D first and so also multiplies different columns with each
    other, which is not the paper's term.
    """
    square_of_sum = fields.sum(dim=1).square()
    sum_of_squares = fields.square().sum(dim=1)
    return 0.5 * (square_of_sum - sum_of_squares).sum(dim=1)


class DeepFM(nn.Module):
    """logit = first order + pairwise dot products + deep network.

    A dense column is a field as well: its embedding is a learned vector times the value, as in a factorization machine.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        wide: EmbeddingBagCollection,
        names: Sequence[str],
        num_dense: int,
        dim: int,
        widths: Sequence[int],
        dropout: float,
        dense_init_std: float,
    ) -> None:
        """Joins the tables with a deep network of hidden `widths` over all fields.

        `dense_init_std` is that of the tables: values of dense columns reach 20, and the pair term multiplies two of them.
        """
        super().__init__()
        self.names = list(names)
        self.num_dense = num_dense
        self.embeddings = embeddings
        self.first_order = FirstOrder(wide, names, num_dense)
        if num_dense:
            self.dense_vectors = nn.Parameter(torch.empty(num_dense, dim).normal_(0.0, dense_init_std))
        self.deep = DeepNetwork((len(self.names) + num_dense) * dim, widths, dropout)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Takes `[B, num_dense]` values and bags with stride B, returns logits `[B]`."""
        fields = stack_features(self.embeddings(sparse), self.names)
        if self.num_dense:
            fields = torch.cat([fields, dense.unsqueeze(2) * self.dense_vectors], dim=1)
        logit: torch.Tensor = self.first_order(dense, sparse) + pairwise_sum(fields) + self.deep(fields.flatten(1))
        return logit
