"""Initial rows of tiered tables: which `init_fn`s have a counter-based twin, and with which parameters."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.models.tables import NormalInit, zero_init
from torchrec_kstep.ops.batch import InitKind


class InitialValues(NamedTuple):
    """How the rows of a table start; the fields are those of `TableSpec`."""

    init: InitKind
    init_a: float
    init_b: float
    seed: int


def initial_values(table: BaseEmbeddingConfig, seed: int) -> InitialValues:
    """Translates the `init_fn` of a table.

    A row must be computable alone, on any rank, so the function itself is not called. These are known by what they do, and
    start a table with other values of the same distribution: TorchRec's default and `torch.nn.init.uniform_`, `normal_`,
    `zeros_`, `constant_` of 0, alone or in a `functools.partial`; `NormalInit` and `zero_init` of `models.tables`.

    Args:
        table: a table's configuration, with an `init_fn`.
        seed: seed of the initial rows, unless `init_fn` brings its own.

    Raises:
        ConfigError: any other `init_fn`; names the table.
    """
    init_fn = table.init_fn
    own_seed = table_seed(seed, table.name)
    if isinstance(init_fn, NormalInit):
        return InitialValues("normal", 0.0, init_fn.std, table_seed(init_fn.seed, table.name))
    if init_fn is zero_init:
        return InitialValues("zero", 0.0, 0.0, own_seed)
    known = _torch_init(init_fn, own_seed)
    if known is None:
        raise ConfigError(
            f"table {table.name!r}: its init_fn is {init_fn!r}, which cannot be computed row by row; tiered tables start with "
            "uniform, normal or zero values: leave init_fn out, use functools.partial of torch.nn.init.uniform_ (a, b), normal_ "
            "(mean, std) or zeros_, or give this table another compute kernel"
        )
    return known


def table_seed(seed: int, name: str) -> int:
    """Returns the key of the initial values of a table: a hash of both, the same on every rank and in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1  # 63 bits


def _torch_init(init_fn: object, seed: int) -> InitialValues | None:
    """Knows the functions of `torch.nn.init`, with arguments bound by `functools.partial` or left at their defaults."""
    bound = init_fn if isinstance(init_fn, functools.partial) else None
    function: Callable[..., object] | object = bound.func if bound else init_fn
    if function not in (nn.init.uniform_, nn.init.normal_, nn.init.zeros_, nn.init.constant_) or (bound and bound.args):
        return None
    arguments = inspect.signature(function).bind_partial(None, **(bound.keywords if bound else {}))
    arguments.apply_defaults()
    values = arguments.arguments
    if values.get("generator") is not None:
        return None
    if function is nn.init.uniform_:
        return InitialValues("uniform", float(values["a"]), float(values["b"]), seed)
    if function is nn.init.normal_:
        return InitialValues("normal", float(values["mean"]), float(values["std"]), seed)
    is_zero = function is nn.init.zeros_ or values.get("val") == 0
    return InitialValues("zero", 0.0, 0.0, seed) if is_zero else None
