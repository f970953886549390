"""Deep & Cross networks, version 1 (Wang et al., 2017, arXiv 1708.05123) and 2 (Wang et al., 2021, arXiv 2008.13535)."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.models.blocks import HiddenLayers, stack_features


class DeepCross(nn.Module):
    """A cross network beside a deep network over the same input, joined by one linear unit (the papers' parallel form).

    The cross network makes the version: TorchRec's `VectorCrossNet` (a weight vector per layer) is DCN's, its `CrossNet`
    (a matrix per layer) and `LowRankCrossNet` (a product of two thin matrices) are DCNv2's.
    """

    def __init__(
        self, embeddings: EmbeddingBagCollection, names: Sequence[str], cross: nn.Module, hidden: HiddenLayers, in_features: int
    ) -> None:
        """Joins the parts.

        Args:
            embeddings: tables of the features `names`.
            names: sparse features, in the order in which their embeddings are concatenated.
            cross: `[B, in_features] -> [B, in_features]`.
            hidden: `[B, in_features] -> [B, hidden.out_features]`.
            in_features: dense columns plus embedding columns.
        """
        super().__init__()
        self.names = list(names)
        self.embeddings = embeddings
        self.cross = cross
        self.hidden = hidden
        self.output = nn.Linear(in_features + hidden.out_features, 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Takes `[B, num_dense]` values and bags with stride B, returns logits `[B]`."""
        x = torch.cat([dense, stack_features(self.embeddings(sparse), self.names).flatten(1)], dim=1)
        logit: torch.Tensor = self.output(torch.cat([self.cross(x), self.hidden(x)], dim=1))
        return logit.squeeze(1)
