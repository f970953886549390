"""From settings tuned at one batch size to settings for another: the rules of the large-batch literature as one call.

s is the batch size over the base batch size. A rule multiplies

    rule            dense lr    table lr    L2 of tables    dense warm-up
    none            1           1           1               as it is
    linear          s           s           1               as it is         (Goyal et al., arXiv 1706.02677)
    sqrt            sqrt(s)     sqrt(s)     sqrt(s)         as it is         (Krizhevsky, arXiv 1404.5997, for SGD's noise)
    sqrt_l2_kept    sqrt(s)     sqrt(s)     1               as it is
    cowclip         sqrt(s)     1           s               one epoch, tables excepted  (Zheng et al., arXiv 2204.06240, table 1)

The warm-up of `cowclip` is the paper's, the first of ten epochs, and a tenth of shorter runs: in a single pass over a stream, or in one cut
short by `train.max_steps`, an epoch of warm-up would last to the end. `warmup_steps` that are given win.

What none of them can give is steps: s times the batch is 1/s of the steps in an epoch. `MIN_STEPS` is where accuracy began
to fall on the sets of `docs/large_batch.md`, whatever the rule.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torchrec_kstep.config.schema import OptimConfig
from torchrec_kstep.errors import ConfigError

ScalingRule = Literal["none", "linear", "sqrt", "sqrt_l2_kept", "cowclip"]
RULES: tuple[str, ...] = get_args(ScalingRule)
MIN_STEPS = 500
COWCLIP_INIT_STD = 1e-2
STEPS_PER_WARMUP_STEP = 10  # at least, over a whole run: the paper warms up for one of ten epochs


@dataclass(frozen=True)
class Factors:
    """What a rule multiplies.

    Attributes:
        lr: the dense learning rate.
        embedding_lr: that of the tables.
        embedding_l2: the L2 of the tables.
    """

    lr: float
    embedding_lr: float
    embedding_l2: float


def factors(rule: str, batch_size: int, base_batch_size: int) -> Factors:
    """Returns the factors of a rule.

    Args:
        rule: one of `RULES`.
        batch_size: rows of a step, over all ranks that share a model and over micro-batches.
        base_batch_size: rows of the steps for which the settings were tuned.

    Raises:
        ConfigError: an unknown rule, or a batch without rows.
    """
    if rule not in RULES:
        raise ConfigError(f"optim.scaling={rule!r}: expected one of {', '.join(RULES)}")
    if batch_size < 1 or base_batch_size < 1:
        raise ConfigError(f"scaling from a batch of {base_batch_size} to {batch_size} rows: expected at least 1 row in each")
    scale = batch_size / base_batch_size
    root = math.sqrt(scale)
    return {
        "none": Factors(1.0, 1.0, 1.0),
        "linear": Factors(scale, scale, 1.0),
        "sqrt": Factors(root, root, root),
        "sqrt_l2_kept": Factors(root, root, 1.0),
        "cowclip": Factors(root, 1.0, scale),
    }[rule]


def scale_optim(config: OptimConfig, batch_size: int, num_epoch_steps: int, num_total_steps: int) -> OptimConfig:
    """Returns the settings for `batch_size`, given those tuned for `config.base_batch_size`. Not collective.

    Args:
        config: settings at the base batch size; `scaling` names the rule.
        batch_size: rows of a step, over all ranks that share a model and over micro-batches.
        num_epoch_steps: optimizer steps of an epoch at `batch_size`: the length of CowClip's warm-up in runs of ten epochs or more.
        num_total_steps: optimizer steps of the whole run at `batch_size`.

    Raises:
        ConfigError: an unknown rule, or a rule without `base_batch_size`.
    """
    if config.scaling == "none":
        return config
    if config.base_batch_size < 1:
        raise ConfigError(
            f"optim.scaling={config.scaling} needs optim.base_batch_size, the rows per step for which the rates were tuned; "
            f"got {config.base_batch_size}"
        )
    by = factors(config.scaling, batch_size, config.base_batch_size)
    scaled = replace(
        config, lr=config.lr * by.lr, embedding_lr=config.embedding_lr * by.embedding_lr, embedding_l2=config.embedding_l2 * by.embedding_l2
    )
    if config.scaling == "cowclip" and not config.warmup_steps:
        num_warmup_steps = min(num_epoch_steps, math.ceil(num_total_steps / STEPS_PER_WARMUP_STEP))
        scaled = replace(scaled, warmup_steps=num_warmup_steps, warmup_covers="dense")
    return scaled


def describe(base: OptimConfig, scaled: OptimConfig, batch_size: int) -> str:
    """Says in one line what a rule made of the settings."""
    return (
        f"scaling {base.scaling}: {base.base_batch_size} -> {batch_size} rows per step (x{batch_size / base.base_batch_size:g}): "
        f"lr {base.lr:g} -> {scaled.lr:g}, embedding_lr {base.embedding_lr:g} -> {scaled.embedding_lr:g}, "
        f"embedding_l2 {base.embedding_l2:g} -> {scaled.embedding_l2:g}, "
        f"warm-up {scaled.warmup_steps} steps of {'dense parameters only' if scaled.warmup_covers == 'dense' else 'everything'}"
    )


def warnings(config: OptimConfig, num_total_steps: int, init_std: float) -> list[str]:
    """Returns what a user of a large batch should know before the first step.

    Args:
        config: the settings as they were given.
        num_total_steps: optimizer steps of the whole run.
        init_std: standard deviation of the initial rows.
    """
    found = []
    if config.scaling != "none" and num_total_steps < MIN_STEPS:
        found.append(
            f"{num_total_steps} optimizer steps in the whole run, fewer than {MIN_STEPS}: no rule makes up for missing steps; "
            "train more epochs, or choose a smaller batch"
        )
    if config.scaling == "cowclip" and config.clip != "cowclip":
        found.append("optim.scaling=cowclip without optim.clip=cowclip: the rule was made for clipped rows; set both, or take sqrt_l2_kept")
    if config.scaling == "cowclip" and not math.isclose(init_std, COWCLIP_INIT_STD):
        found.append(f"optim.scaling=cowclip expects initial rows of model.embedding_init_std={COWCLIP_INIT_STD:g}, got {init_std:g}")
    return found
