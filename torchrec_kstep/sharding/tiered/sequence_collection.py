"""The sharded `EmbeddingCollection` whose tables may live in tiers."""

from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.sharding.tiered.batches import IdChecks
from torchrec_kstep.sharding.tiered.column_clip import with_column_clip
from torchrec_kstep.sharding.tiered.lookups import SEQUENCE_SHARDINGS
from torchrec_kstep.sharding.tiered.state import PrefetchesRows, TieredState, add_stand_ins, kernels_of, sharding_group
from torchrec_kstep.sharding.tiered.tables import TableMaker, check_collection
from torchrec_kstep.torchrec_seam.kernel import CUSTOMIZED_KERNEL, EmbeddingShardingInfo, KJTList
from torchrec_kstep.torchrec_seam.sharding import ShardedEmbeddingCollection


class ShardedTieredEmbeddingCollection(PrefetchesRows, ShardedEmbeddingCollection):  # type: ignore[misc]  # torchrec is untyped
    """TorchRec's sharded collection, in which tables with `customized_kernel` are ours and the others stay as they are."""

    def __init__(
        self,
        module: EmbeddingCollection,
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
        tables = module.embedding_configs()
        kernels = {name: sharding.compute_kernel for name, sharding in table_name_to_parameter_sharding.items()}
        check_collection(tables, kernels, device, is_weighted=False)
        self._maker = maker
        super().__init__(module, table_name_to_parameter_sharding, env, device=device, **options)
        self._optim = with_column_clip(
            self._optim, maker.optimizer.clip, kernels_of(self._lookups), self.module_sharding_plan, sharding_group(env)
        )
        self._id_checks = IdChecks([table for table in tables if kernels[table.name] == CUSTOMIZED_KERNEL])

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        """Makes our sharding where a table of this type is tiered, and upstream's elsewhere.

        Raises:
            ConfigError: a tiered table has a sharding type that has no tiered twin; names the table.
        """
        own = [info.embedding_config.name for info in sharding_infos if info.param_sharding.compute_kernel == CUSTOMIZED_KERNEL]
        if not own:
            return super().create_embedding_sharding(sharding_type, sharding_infos, env, device, qcomm_codecs_registry)
        if sharding_type not in SEQUENCE_SHARDINGS:
            raise ConfigError(
                f"tiered table {own[0]!r} of an EmbeddingCollection is {sharding_type}: expected one of {', '.join(SEQUENCE_SHARDINGS)}"
            )
        make: Callable[..., Any] = SEQUENCE_SHARDINGS[sharding_type]
        return make(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)

    def _create_lookups(self) -> None:
        for sharding in self._sharding_type_to_sharding.values():
            if type(sharding) in SEQUENCE_SHARDINGS.values():
                sharding.maker = self._maker
        super()._create_lookups()

    def reset_parameters(self) -> None:
        """Registers the state of tiered tables, as `ShardedTieredEmbeddingBagCollection` does."""
        self.tiered = TieredState.of_collection(
            self._lookups, self._embedding_configs, self.module_sharding_plan, sharding_group(self._env)
        )
        add_stand_ins(self.embeddings, self.tiered.weights, self._maker.is_deferred)
        self._model_parallel_name_to_sharded_tensor.update(self.tiered.weights)
        super().reset_parameters()

    @staticmethod
    def _pre_load_state_dict_hook(self: "ShardedTieredEmbeddingCollection", state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.tiered.load(state_dict, f"{prefix}embeddings.")
        ShardedEmbeddingCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Checks a batch and sends its ids to the ranks of their rows. Collective."""
        self._id_checks.check(features)
        return super().input_dist(ctx, features)
