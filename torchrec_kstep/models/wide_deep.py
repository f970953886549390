"""Wide & Deep: a linear model beside a deep network (Cheng et al., 2016, arXiv 1606.07792)."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.models.blocks import DeepNetwork, FirstOrder, stack_features


class WideDeep(nn.Module):
    """logit = first order + deep network over the embeddings and the dense columns.

    The paper's hand-made cross products enter as further id columns of the data; none is made here.
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
    ) -> None:
        """Joins the tables with a deep network of hidden `widths`."""
        super().__init__()
        self.names = list(names)
        self.embeddings = embeddings
        self.first_order = FirstOrder(wide, names, num_dense)
        self.deep = DeepNetwork(num_dense + len(self.names) * dim, widths, dropout)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Takes `[B, num_dense]` values and bags with stride B, returns logits `[B]`."""
        pooled = stack_features(self.embeddings(sparse), self.names).flatten(1)
        logit: torch.Tensor = self.first_order(dense, sparse) + self.deep(torch.cat([dense, pooled], dim=1))
        return logit
