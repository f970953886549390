"""DLRM: dot products between embeddings and a vector made from the dense columns (Naumov et al., 2019, arXiv 1906.00091)."""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models.blocks import DeepNetwork, HiddenLayers, stack_features


class PairwiseDots(nn.Module):
    """All dot products between different fields of a row: `[B, F, D] -> [B, F * (F - 1) / 2]`.

    TorchRec's `InteractionArch` does the same but insists on a dense vector, which sets without dense columns lack.
    """

    upper: torch.Tensor

    def __init__(self, num_fields: int) -> None:
        """Remembers which entries of the `[F, F]` product are pairs."""
        super().__init__()
        self.register_buffer("upper", torch.triu_indices(num_fields, num_fields, offset=1, device="cpu"), persistent=False)
        self.out_features = num_fields * (num_fields - 1) // 2

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        """Returns the pairs in row-major order of the upper triangle."""
        products = torch.bmm(fields, fields.transpose(1, 2))
        return products[:, self.upper[0], self.upper[1]]


class DLRM(nn.Module):
    """Bottom network over dense columns, pairwise dots of all fields, top network over both.

    Without dense columns there is no bottom network: the embeddings interact with each other only, and the top network
    sees their dot products.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        names: Sequence[str],
        num_dense: int,
        dim: int,
        bottom_widths: Sequence[int],
        widths: Sequence[int],
        dropout: float,
    ) -> None:
        """Joins the tables with a bottom network that ends in `dim` units and a top network of hidden `widths`.

        Raises:
            ConfigError: a single sparse feature and no dense column, so that nothing could interact.
        """
        super().__init__()
        if not num_dense and len(names) < 2:
            raise ConfigError(
                f"DLRM without dense columns needs at least 2 sparse features to interact, got {len(names)}: choose another model"
            )
        self.names = list(names)
        self.num_dense = num_dense
        self.embeddings = embeddings
        if num_dense:
            self.bottom = HiddenLayers(num_dense, [*bottom_widths, dim], dropout=0.0)
        self.interact = PairwiseDots(len(self.names) + (1 if num_dense else 0))
        self.top = DeepNetwork((dim if num_dense else 0) + self.interact.out_features, widths, dropout)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Takes `[B, num_dense]` values and bags with stride B, returns logits `[B]`."""
        fields = stack_features(self.embeddings(sparse), self.names)
        if self.num_dense:
            bottom = self.bottom(dense)
            dots = self.interact(torch.cat([bottom.unsqueeze(1), fields], dim=1))
            seen = torch.cat([bottom, dots], dim=1)
        else:
            seen = self.interact(fields)
        logit: torch.Tensor = self.top(seen)
        return logit
