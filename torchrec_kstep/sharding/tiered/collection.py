"""The sharded `EmbeddingBagCollection` whose tables may live in tiers."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.sharding.tiered.batches import IdChecks, embedding_names, feature_lengths
from torchrec_kstep.sharding.tiered.column_clip import with_column_clip
from torchrec_kstep.sharding.tiered.lookups import POOLED_SHARDINGS, ROW_SHARDED
from torchrec_kstep.sharding.tiered.state import PrefetchesRows, TieredState, add_stand_ins, kernels_of, sharding_group
from torchrec_kstep.sharding.tiered.tables import TableMaker, check_collection
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL, EmbeddingShardingInfo, KJTList, collectives_for
from torchrec_kstep.torchrec_seam.sharding import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection


class ShardedTieredEmbeddingBagCollection(PrefetchesRows, ShardedEmbeddingBagCollection):  # type: ignore[misc]  # torchrec is untyped
    """TorchRec's sharded collection, in which tables with `customized_kernel` are ours and the others stay as they are.

    Beyond the kernel, three things differ from upstream, for all tables of the collection:

    - MEAN pooling is right in every mix of sharding types. Where rows are spread over ranks, ranks sum and the result is
      divided here; upstream then divides the outputs of all tables, or, under GRID, of none.
    - Ranks may have batches of different sizes, also with row-wise sharding on gloo.
    - Ids are checked against their tables.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        maker: TableMaker,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """Shards `module`; the options are upstream's. Collective where upstream's is.

        Raises:
            ConfigError: a tiered table asks for what tiers cannot do; lists every finding.
        """
        tables = module.embedding_bag_configs()
        kernels = {name: sharding.compute_kernel for name, sharding in table_name_to_parameter_sharding.items()}
        check_collection(tables, kernels, device, module.is_weighted())
        self._maker = maker
        super().__init__(module, table_name_to_parameter_sharding, env, device=device, **options)
        self._optim = with_column_clip(
            self._optim, maker.optimizer.clip, kernels_of(self._lookups), self.module_sharding_plan, sharding_group(env)
        )
        self._id_checks = IdChecks([table for table in tables if kernels[table.name] == CUSTOMIZED_KERNEL])
        self._has_mean_pooling_callback = False  # upstream's, which divides too much
        self._averaged_features = self._find_averaged_features()

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        """Makes our sharding where a table of this type is tiered, and upstream's elsewhere.

        Raises:
            ConfigError: a tiered table has a sharding type that has no tiered twin; names the table.
        """
        own = [info.embedding_config.name for info in sharding_infos if info.param_sharding.compute_kernel == CUSTOMIZED_KERNEL]
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        if not own:
            return super().create_embedding_bag_sharding(sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry)
        if sharding_type not in POOLED_SHARDINGS:
            raise ConfigError(f"tiered table {own[0]!r} is {sharding_type}: expected one of {', '.join(POOLED_SHARDINGS)}")
        options = {"permute_embeddings": permute_embeddings} if sharding_type == "column_wise" else {}
        make: Callable[..., Any] = POOLED_SHARDINGS[sharding_type]
        return make(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry, **options)

    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            if type(sharding) in POOLED_SHARDINGS.values():
                sharding.maker = self._maker
        super()._create_lookups()

    def reset_parameters(self) -> None:
        """Registers the state of tiered tables; rows need no reset, they start by themselves.

        Upstream calls this last when it registers state, and does nothing before for kernels that are not its own.
        """
        self.tiered = TieredState.of_collection(
            self._lookups, self._embedding_bag_configs, self.module_sharding_plan, sharding_group(self._env)
        )
        add_stand_ins(self.embedding_bags, self.tiered.weights, self._maker.is_deferred)
        self._model_parallel_name_to_sharded_tensor.update(self.tiered.weights)
        super().reset_parameters()

    @staticmethod
    def _pre_load_state_dict_hook(self: "ShardedTieredEmbeddingBagCollection", state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.tiered.load(state_dict, f"{prefix}embedding_bags.")
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch, sends its ids to the ranks of their rows, and notes by what outputs are to be divided. Collective."""
        self._id_checks.check(features)
        ctx.divisor = self._divisor(features)
        return super().input_dist(ctx, features)

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Sends pooled rows to the ranks of their batches. Collective."""
        with collectives_for([context.batch_size_per_rank for context in ctx.sharding_contexts]):
            return self._averaged(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Looks rows up and sends them as `output_dist` does. Collective."""
        with collectives_for([context.batch_size_per_rank for context in ctx.sharding_contexts]):
            return self._averaged(ctx, super().compute_and_output_dist(ctx, input))

    def update_shards(self, *args: Any, **options: Any) -> None:
        """Moves shards of running tables, which rows in tiers cannot.

        Raises:
            ConfigError: a table is tiered.
        """
        if self.tiered.weights:
            raise ConfigError(
                f"tiered tables ({', '.join(list(self.tiered.weights)[:5])}) cannot change their plan while running: save, "
                "make the new plan, and load"
            )
        super().update_shards(*args, **options)

    def _find_averaged_features(self) -> list[str | None]:
        """Returns, for each output, the feature by whose bag sizes it is to be divided here, or None."""
        known: Mapping[str, Any] = embedding_names(self._embedding_bag_configs)
        averaged: list[str | None] = []
        for name in self._embedding_names:
            feature, table = known[name]
            is_row_sharded = self.module_sharding_plan[table.name].sharding_type in ROW_SHARDED
            averaged.append(feature if is_row_sharded and table.pooling == PoolingType.MEAN else None)
        return averaged

    def _divisor(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Returns `[B, columns of all outputs]`: bag sizes, at least 1, where ranks have summed; 1 elsewhere."""
        if not any(self._averaged_features):
            return None
        lengths = feature_lengths(features)
        one = torch.ones(features.stride())
        sizes = [one if feature is None else lengths[feature].clamp(min=1).to(torch.float32) for feature in self._averaged_features]
        return torch.repeat_interleave(torch.stack(sizes, dim=1), torch.tensor(self._embedding_dims), dim=1)

    def _averaged(self, ctx: EmbeddingBagCollectionContext, output: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        if ctx.divisor is not None:
            output.callbacks.append(functools.partial(_divide, divisor=ctx.divisor))
        return output


def _divide(pooled: KeyedTensor, divisor: torch.Tensor) -> KeyedTensor:
    return KeyedTensor(keys=pooled.keys(), length_per_key=pooled.length_per_key(), values=pooled.values() / divisor, key_dim=1)
