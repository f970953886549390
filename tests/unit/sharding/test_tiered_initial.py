"""Goal: every `init_fn` has its counter-based twin or is refused by name. Layer: unit."""

import functools

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models.tables import NormalInit, zero_init
from torchrec_kstep.sharding.tiered.initial import InitialValues, initial_values, table_seed

SEED = 1370483853357802733  # of table "user" and seed 3


def table(init_fn: object = None, **options: float) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="user", num_embeddings=16, embedding_dim=4, feature_names=["f"], init_fn=init_fn, **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (table(), InitialValues("uniform", -0.25, 0.25, SEED)),  # TorchRec's default: 1 / sqrt(rows)
        (table(weight_init_min=-2.0, weight_init_max=1.0), InitialValues("uniform", -2.0, 1.0, SEED)),
        (table(nn.init.uniform_), InitialValues("uniform", 0.0, 1.0, SEED)),
        (table(functools.partial(nn.init.normal_, std=0.5)), InitialValues("normal", 0.0, 0.5, SEED)),
        (table(functools.partial(nn.init.normal_, mean=1.0, std=0.5)), InitialValues("normal", 1.0, 0.5, SEED)),
        (table(nn.init.zeros_), InitialValues("zero", 0.0, 0.0, SEED)),
        (table(functools.partial(nn.init.constant_, val=0.0)), InitialValues("zero", 0.0, 0.0, SEED)),
        (table(NormalInit(8, "user", 0.1)), InitialValues("normal", 0.0, 0.1, table_seed(8, "user"))),
        (table(zero_init), InitialValues("zero", 0.0, 0.0, SEED)),
    ],
)
def test_known_functions(config: EmbeddingBagConfig, expected: InitialValues) -> None:
    assert initial_values(config, seed=3) == expected


@pytest.mark.parametrize(
    "init_fn",
    [
        torch.Tensor.normal_,
        nn.init.xavier_uniform_,
        functools.partial(nn.init.constant_, val=1.0),
        functools.partial(nn.init.uniform_, generator=torch.Generator()),
        lambda weight: weight.fill_(2.0),
    ],
)
def test_others_are_refused_by_name(init_fn: object) -> None:
    """Otherwise a table would start from other values than its author wrote, without a word."""
    with pytest.raises(ConfigError, match="table 'user': its init_fn"):
        initial_values(table(init_fn), seed=3)


def test_seeds_of_tables_do_not_depend_on_the_process() -> None:
    """Another value would start old runs from other rows."""
    assert table_seed(3, "user") == SEED
    assert len({table_seed(seed, name) for seed in (3, 4) for name in ("user", "item")}) == 4
    assert 0 <= table_seed(3, "user") < 2**63
