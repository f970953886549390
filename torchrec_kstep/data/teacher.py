"""The planted teacher of the synthetic stream: a factorisation machine whose parameters are hashes, so none is stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_kstep.data.mixing import mix64

_NUM_FACTORS = 3
_LINEAR_SCALE = 1.6  # with the scales below, logits spread with a standard deviation of about 1.2: a Bayes AUC around 0.78
_PAIR_SCALE = 1.2
_DENSE_SCALE = 0.6


@dataclass(frozen=True)
class Teacher:
    """Gives every row a logit: linear in its ids and dense values, plus products of all pairs of features."""

    seed: int
    num_dense: int

    def logit(
        self, dense: npt.NDArray[np.float32], features: Sequence[npt.NDArray[np.uint64]], is_in_bag: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """Computes `[B]` logits, without bias.

        Args:
            dense: `[B, num_dense]`.
            features: `[B, max_ids_per_bag]` ids per feature; a bag counts as the mean over its ids.
            is_in_bag: `[num_features, B, max_ids_per_bag]`.
        """
        num_features = max(1, len(features))
        linear = np.zeros(len(dense))
        total = np.zeros((_NUM_FACTORS, len(dense)))
        squares = np.zeros((_NUM_FACTORS, len(dense)))
        for index, (ids, in_bag) in enumerate(zip(features, is_in_bag, strict=True)):
            parameters = [_mean_over_bag(part, in_bag) for part in self._parameters(index, ids)]
            linear += parameters[0]
            for factor, value in enumerate(parameters[1:]):
                total[factor] += value
                squares[factor] += value * value
        pairs = (total**2 - squares).sum(axis=0) / 2
        weights = self._dense_weights()
        logit: npt.NDArray[np.float64] = (
            _LINEAR_SCALE * linear / num_features**0.5 + _PAIR_SCALE * pairs / num_features + _DENSE_SCALE * dense @ weights
        )
        return logit

    def _parameters(self, feature: int, ids: npt.NDArray[np.uint64]) -> list[npt.NDArray[np.float64]]:
        """The weight and the factors of ids, uniform in (-1, 1): four numbers of 16 bits out of one hash."""
        hashes = mix64(ids, self.seed * 4099 + feature)
        return [
            ((hashes >> np.uint64(16 * part)) & np.uint64(0xFFFF)).astype(np.float64) * 2.0**-15 - (1 - 2.0**-16)
            for part in range(1 + _NUM_FACTORS)
        ]

    def _dense_weights(self) -> npt.NDArray[np.float64]:
        hashes = mix64(np.arange(self.num_dense, dtype=np.uint64), self.seed)
        signs: npt.NDArray[np.float64] = np.where(hashes & np.uint64(1), 1.0, -1.0) / max(1, self.num_dense) ** 0.5
        return signs


def _mean_over_bag(values: npt.NDArray[np.float64], is_in_bag: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    if values.shape[1] == 1:
        return values[:, 0]
    mean: npt.NDArray[np.float64] = np.where(is_in_bag, values, 0).sum(axis=1) / is_in_bag.sum(axis=1)
    return mean


def expected_auc(probability: npt.NDArray[np.float64]) -> float:
    """The AUC to expect of rows that are scored by their true probability of a positive label, over random labels.

    That is the sum over pairs (i, j) of p_i (1 - p_j) [p_i > p_j], ties halved, over the sum of all p_i (1 - p_j).
    """
    ordered = np.sort(probability)
    negatives_below = np.concatenate([[0.0], np.cumsum(1 - ordered)])
    first, behind_last = np.searchsorted(ordered, ordered, "left"), np.searchsorted(ordered, ordered, "right")
    wins = ordered * (negatives_below[first] + negatives_below[behind_last]) / 2
    return float(wins.sum() / (ordered.sum() * (1 - ordered).sum()))
