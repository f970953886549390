"""Embedding tables of the models: their names, sizes and seeded initial rows. No layer of a network lives here."""

import zlib
from dataclasses import dataclass

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.types import FeatureSchema

WIDE_PREFIX = "wide_"
WIDE_DIM = 4  # FBGEMM kernels need a multiple of 4 columns; a first-order weight is column 0, the other three stay zero
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


@dataclass(frozen=True)
class NormalInit:
    """Fills a whole table with normal values that depend on (seed, table) alone, not on ranks, sharding or other tables.

    TorchRec calls it on the unsharded table. Applied to a shard it would restart the stream at the shard's first row, which
    is why sharded tables are filled by copying the rows of the unsharded one.
    """

    seed: int
    table: str
    std: float

    def __call__(self, weight: torch.Tensor) -> None:
        """Writes `weight` (`[rows, dim]`, any device) in place."""
        if weight.is_meta:
            return
        # torch's CPU generator looks at the low 32 bits of its seed only, so both names are hashed into these.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{self.table}".encode()))
        with torch.no_grad():
            weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, self.std, generator=generator))


def zero_init(weight: torch.Tensor) -> None:
    """Writes zeros into `weight` in place."""
    if not weight.is_meta:
        with torch.no_grad():
            weight.zero_()


def check_features(schema: FeatureSchema) -> None:
    """Refuses schemas from which no set of tables can be made.

    Raises:
        ConfigError: lists every finding: no sparse feature, a name used twice, a name that cannot name a module, no rows.
    """
    names = schema.sparse_names
    findings = []
    if not names:
        findings.append("no sparse feature: an embedding model needs at least one id column")
    findings += [f"feature {name!r} appears {names.count(name)} times: give each column its own name" for name in _repeated(names)]
    findings += [f"dense column {name!r} appears more than once" for name in _repeated(schema.dense_names)]
    findings += [f"feature {name!r}: names of tables may be neither empty nor hold a dot" for name in names if not name or "." in name]
    findings += [
        f"feature {name!r} would share the name of the first-order table of {name.removeprefix(WIDE_PREFIX)!r}: rename it"
        for name in names
        if name.startswith(WIDE_PREFIX) and name.removeprefix(WIDE_PREFIX) in names
    ]
    findings += [
        f"feature {feature.name!r}: its table has {feature.num_rows} rows, expected at least 1"
        for feature in schema.sparse
        if feature.num_rows < 1
    ]
    if findings:
        raise ConfigError("the features do not make a model:\n  " + "\n  ".join(findings))


def _repeated(names: tuple[str, ...]) -> list[str]:
    """Returns the names that occur more than once, in order, each once."""
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def embedding_tables(schema: FeatureSchema, dim: int, pooling: str, std: float, seed: int, device: torch.device) -> EmbeddingBagCollection:
    """Makes one table per sparse feature, named as the feature, with normal(0, `std`) rows.

    Args:
        schema: the features; table `i` has `schema.sparse[i].num_rows` rows.
        dim: columns of every table.
        pooling: `sum` or `mean`. A bag without ids pools to zeros under both.
        std: standard deviation of the initial rows.
        seed: seed of the initial rows; each table draws from its own stream.
        device: `cpu`, or `meta` for planning without memory.
    """
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=feature.name,
                feature_names=[feature.name],
                num_embeddings=feature.num_rows,
                embedding_dim=dim,
                pooling=_POOLING[pooling],
                init_fn=NormalInit(seed, feature.name, std),
            )
            for feature in schema.sparse
        ],
        device=device,
    )


def wide_tables(schema: FeatureSchema, pooling: str, device: torch.device) -> EmbeddingBagCollection:
    """Makes one first-order table per sparse feature, named `wide_<feature>`, with zero rows of `WIDE_DIM` columns.

    Column 0 holds the weight of an id. The other columns exist only because the kernels want them: nothing reads them, so
    their gradient is zero and they stay zero. (A row-wise Adagrad averages squared gradients over all four columns, so it
    steps twice as far here as with one column.)
    """
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=WIDE_PREFIX + feature.name,
                feature_names=[feature.name],
                num_embeddings=feature.num_rows,
                embedding_dim=WIDE_DIM,
                pooling=_POOLING[pooling],
                init_fn=zero_init,
            )
            for feature in schema.sparse
        ],
        device=device,
    )
