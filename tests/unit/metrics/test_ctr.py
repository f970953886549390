"""Layer: metrics. Goal: exact numbers, ties right, padding never counted, and no made-up value where none is defined."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_kstep.errors import DivergenceError
from torchrec_kstep.metrics.ctr import CTRMetrics, CTRReport, report
from torchrec_kstep.types import Predictions


def predictions(logit: list[float], label: list[float], weight: list[float] | None = None) -> Predictions:
    return Predictions(torch.tensor(logit), torch.tensor(label), torch.tensor(weight or [1.0] * len(logit)))


def auc_by_pairs(logit: list[float], label: list[int]) -> float:
    scores = np.float32(logit)
    pairs = [(p, n) for p, yp in zip(scores, label, strict=True) if yp for n, yn in zip(scores, label, strict=True) if not yn]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


rows = st.lists(
    st.tuples(st.sampled_from([-3.0, -0.5, 0.0, -0.0, 0.25, 1.0, 40.0]) | st.floats(-50, 50, width=32), st.booleans()),
    min_size=1,
    max_size=60,
)


@given(rows)
@settings(max_examples=200, deadline=None)
def test_auc_is_the_share_of_pairs_in_order_with_ties_as_one_half(sample: list[tuple[float, bool]]) -> None:
    logit, label = [x for x, _ in sample], [int(y) for _, y in sample]
    result = report(np.float32(logit), np.uint8(label))
    if 0 < sum(label) < len(label):
        assert result.auc == pytest.approx(auc_by_pairs(logit, label), abs=1e-12)
    else:
        assert result.auc is None
        assert result.normalized_entropy is None
        assert "all" in result.undefined


@given(rows, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_rows_does_not_change_a_bit(sample: list[tuple[float, bool]], random: object) -> None:
    shuffled = list(sample)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    results = [report(np.float32([x for x, _ in s]), np.uint8([y for _, y in s])) for s in (sample, shuffled)]
    assert results[0] == results[1]


def test_known_values() -> None:
    label = [1, 0, 1, 0]
    probability = [0.9, 0.2, 0.6, 0.7]
    result = report(np.float32([math.log(p / (1 - p)) for p in probability]), np.uint8(label))
    logloss = -sum(math.log(p if y else 1 - p) for p, y in zip(probability, label, strict=True)) / 4
    assert result.auc == 0.75
    assert result.logloss == pytest.approx(logloss, abs=1e-7)
    assert result.normalized_entropy == pytest.approx(logloss / math.log(2), abs=1e-7)
    assert result.calibration == pytest.approx(0.6 / 0.5, abs=1e-7)
    assert result.num_rows == 4


def test_confident_logits_stay_apart_where_a_float32_sigmoid_would_tie_them() -> None:
    assert report(np.float32([30.0, 40.0]), np.uint8([0, 1])).auc == 1.0


def test_extreme_logits_give_a_finite_logloss() -> None:
    result = report(np.float32([1e30, -1e30, 1e30]), np.uint8([1, 0, 0]))
    assert result.logloss == pytest.approx(1e30 / 3, rel=1e-6)


@pytest.mark.parametrize(("label", "reason", "calibration"), [([0, 0], "negative", None), ([1, 1], "positive", 0.5)])
def test_one_class_gives_an_undefined_auc_with_its_reason(label: list[int], reason: str, calibration: float | None) -> None:
    result = report(np.float32([0.0, 0.0]), np.uint8(label))
    assert result.auc is None
    assert reason in result.undefined
    assert result.calibration == calibration
    assert result.logloss == pytest.approx(math.log(2))
    assert "undefined" in str(result)
    assert "auc" not in result.scalars()


def test_no_rows_is_said_so() -> None:
    assert CTRMetrics().compute() == CTRReport(None, None, None, None, 0, "no rows")


def test_padding_rows_never_count_whatever_they_hold() -> None:
    metrics = CTRMetrics()
    metrics.update(predictions([1.0, math.nan, -1.0], [1.0, 7.0, 0.0], [1.0, 0.0, 1.0]))
    assert metrics.compute() == report(np.float32([1.0, -1.0]), np.uint8([1, 0]))
    assert metrics.compute().num_rows == 0, "compute starts anew"


def test_nan_predictions_are_refused_with_the_step() -> None:
    with pytest.raises(DivergenceError, match=r"1 of 2 predictions are NaN with the weights of step 17"):
        CTRMetrics().update(predictions([0.0, math.nan], [1.0, 0.0]), step=17)


def test_soft_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 or 1, got 0\.5"):
        CTRMetrics().update(predictions([0.0], [0.5]))
