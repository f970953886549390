"""k as a function of the step, and the warning where a pass has too few rounds."""

from typing import Any

import numpy as np
import pytest

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.optim.period import Period, few_rounds_warning


def test_stages_hold_from_their_step_on_after_the_warm_up() -> None:
    period = Period({0: 5, 10: 20}, num_warmup_steps=3)
    assert [period(step) for step in (0, 2, 3, 9, 10, 1000)] == [1, 1, 5, 5, 20, 20]
    assert period.largest == 20
    assert str(period) == "5, 20 from step 10, after 3 steps of 1"
    assert [Period(7)(step) for step in (0, 100)] == [7, 7]
    assert str(Period(np.int64(7))) == "7"


@pytest.mark.parametrize(
    ("k", "warmup", "text"),
    [
        (0, 0, "k=0"),
        ({0: 2, 5: -1}, 0, "k=-1 from step 5"),
        ({3: 2}, 0, "from step 0"),
        ({0: 2, -1: 3}, 0, "step -1"),
        (2, -1, "-1 warm-up"),
        (2.5, 0, "2.5 in k=2.5: expected a whole number"),
        (True, 0, "True in k"),
        ("20", 0, "'20' in k='20'"),
        (None, 0, "None in k"),
        ({0: 2, "5": 3}, 0, "'5' in k"),
        ({0: 2.0}, 0, "2.0 in k"),
        ({}, 0, "from step 0"),
    ],
)
def test_impossible_periods_are_refused(k: Any, warmup: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Period(k, warmup)


def test_too_few_rounds_are_warned_of_with_the_k_that_would_do() -> None:
    assert few_rounds_warning(20, 400) == ""
    assert few_rounds_warning(1, 5) == ""
    text = few_rounds_warning(20, 399)
    assert "19 merge rounds" in text
    assert "k <= 19" in text
