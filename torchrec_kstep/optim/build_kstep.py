"""KStepAdam from configuration."""

from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_kstep.config.schema import KStepConfig, OptimConfig
from torchrec_kstep.merge_spec import RECIPES, MergeSpec
from torchrec_kstep.optim.kstep import KStepAdam
from torchrec_kstep.optim_spec import AdamSpec
from torchrec_kstep.replicas import KStepEnv
from torchrec_kstep.sharding.sharder import row_optimizer
from torchrec_kstep.world import World


def build_kstep_adam(
    dmp: DistributedModelParallel, optim: OptimConfig, kstep: KStepConfig, env: KStepEnv, num_steps_per_pass: int, seed: int
) -> KStepAdam:
    """Makes the optimizer of a task whose replicas `env` tells. Collective.

    Args:
        dmp: the sharded task.
        optim: rates and constants of Adam.
        kstep: when and how replicas are merged.
        env: the replicas.
        num_steps_per_pass: steps of one pass over the training split.
        seed: of random rounding.

    Raises:
        ConfigError: values or tables that cannot be merged.
        LaunchError: ranks differ.
    """
    recipe = RECIPES["paper" if kstep.recipe == "paper" else "default"]
    rule = row_optimizer(optim, kstep, env.num_replicas)
    return KStepAdam(
        dmp,
        env=env,
        k=stages_of(kstep),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        clip_covers="all" if optim.clip_covers == "all" else "dense",
        variant="frozen" if kstep.variant == "frozen" else "local",
        is_amsgrad=kstep.is_amsgrad,
        merge=merge_spec(kstep, seed),
        table_adam=rule if isinstance(rule, AdamSpec) else None,
        lr_factor=kstep.lr_factor or recipe.lr_factor(env.num_replicas),
        num_warmup_steps=kstep.num_warmup_steps,
        num_steps_per_pass=num_steps_per_pass,
    )


def stages_of(kstep: KStepConfig) -> dict[int, int]:
    """Returns k by the step from which it holds."""
    return {0: kstep.k} | {int(first): int(k) for first, k in (stage.split(":") for stage in kstep.stages)}


def merge_spec(kstep: KStepConfig, seed: int = 0) -> MergeSpec:
    """Returns the way to merge that a configuration names."""
    given = {name: value for name in ("row_merge", "moments") if (value := getattr(kstep, name)) != "recipe"}
    same = ("k", "row_states", "m_period_rounds", "v_period_rounds", "wire", "overlap_steps", "bucket_bytes", "timeout_s")
    name = "paper" if kstep.recipe == "paper" else "default"
    return MergeSpec.of_recipe(name, **given, **{key: getattr(kstep, key) for key in same}, seed=seed)  # type: ignore[arg-type]


def replica_warnings(kstep: KStepConfig, world: World) -> list[str]:
    """Says so where k is given and there is one replica, which from outside looks like training that merges."""
    if not kstep.k or (kstep.ranks_per_replica or world.local_world_size) < world.world_size:
        return []
    ranks = f"{world.world_size} ranks" if world.world_size > 1 else "one rank"
    remedy = "kstep.ranks_per_replica=1 makes each rank a replica" if world.world_size > 1 else "start more ranks or hosts"
    return [f"warning: kstep.k={kstep.k}, and all of this job is one replica, of {ranks}, so nothing is ever merged; {remedy}"]
