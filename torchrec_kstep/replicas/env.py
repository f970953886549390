"""KStepEnv: the process groups of replicas, and the environment in which TorchRec shards tables over one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingPlan

from torchrec_kstep.replicas.agreement import RoundAgreement, check_same
from torchrec_kstep.replicas.layout import ReplicaLayout
from torchrec_kstep.replicas.plans import localize, plan_digest
from torchrec_kstep.routes import gloo_over
from torchrec_kstep.torchrec_seam.replicas import (
    ReplicaDataParallelWrapper,
    ShardingEnv,
    default_store,
    replica_sharding_env,
)
from torchrec_kstep.world import World

_NUMBERS = count()  # of the environments made in this process, which the store tells apart
START_TIMEOUT_S = 120.0  # for ranks to come to a question that is asked once


@dataclass(frozen=True)
class _Groups:
    """The process groups of one rank; with one replica the merge groups hold this rank alone.

    Attributes:
        sharding: the ranks of its replica.
        merge: the ranks that hold its shard, for dense parameters and gradients.
        rows: the same ranks again, for rows, which may travel while the other group is in use.
        gather: the ranks of its replica again, for merged dense parameters, which may travel while tables are looked up.
    """

    sharding: dist.ProcessGroup
    merge: dist.ProcessGroup | None
    rows: dist.ProcessGroup | None
    gather: dist.ProcessGroup | None


class KStepEnv:
    """The replicas of a job as this rank sees them.

        env = KStepEnv.from_torchrun()                # under torchrun, on all ranks
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)      # a plan for `env.replica_world`
        dmp = DistributedModelParallel(model, plan=env.localize(plan), sharders=sharders, **env.dmp_kwargs())
        optimizer = KStepAdam(dmp, env=env, k=20)

    Make one a job: TorchRec keeps groups of its own for tables split over hosts, which fit one cut into replicas only.

    Attributes:
        layout: which rank holds what.
        world: this rank among all.
        replica_world: this rank within its replica, as planners take it.
        timeout_s: longest wait of any collective or question between replicas.
    """

    def __init__(
        self,
        layout: ReplicaLayout,
        store: Store | None = None,
        timeout_s: float = 300.0,
        replica_interface: str = "",
        merge_interface: str = "",
    ) -> None:
        """Makes the process groups. Needs the default process group. Collective over all ranks.

        Args:
            layout: the same on all ranks but for the rank.
            store: common to all ranks; None = that of the default process group.
            timeout_s: longest wait of any collective or question between replicas.
            replica_interface: over which gloo joins this rank with those of its replica; "": as gloo was told for all groups.
            merge_interface: over which it joins this rank with those that hold the same shard.

        Raises:
            LaunchError: ranks disagree on the layout.
        """
        self.layout = layout
        self.world = layout.world
        self.replica_world = layout.replica_world()
        self.timeout_s = timeout_s
        self._store = PrefixStore(f"replicas/{next(_NUMBERS)}", store if store is not None else default_store())
        self._num_plans = 0
        self._num_agreements = 0
        self._num_questions = 0
        self._finish: Callable[[], None] | None = None  # ends a round that is under way beside training
        self.plan_digest = ""
        check_same(
            self._store,
            self.world,
            "replicas",
            {
                "number of ranks": self.world.world_size,
                "ranks per host": self.world.local_world_size,
                "ranks per replica": layout.ranks_per_replica,
                "seconds that replicas wait": timeout_s,
            },
            START_TIMEOUT_S,
        )
        self._groups = _make_groups(layout, timedelta(seconds=timeout_s), replica_interface, merge_interface)

    @classmethod
    def from_torchrun(cls, ranks_per_replica: int | None = None, *, backend: str = "gloo", timeout_s: float = 300.0) -> "KStepEnv":
        """Reads torchrun's environment, forms the default process group unless it is there, and makes the others. Collective.

        Args:
            ranks_per_replica: by default the ranks of a host, so that replicas are joined by the network between hosts and the
                ranks of one by what is faster.
            backend: of the default process group, if it is made here.
            timeout_s: longest wait of any collective or question between replicas.

        Raises:
            ConfigError: torchrun's variables are set in part, or replicas do not fill the ranks.
            LaunchError: ranks disagree on the layout.
        """
        world = World.from_torchrun()
        if not dist.is_initialized():
            timeout = timedelta(seconds=timeout_s)
            store = HashStore() if world.world_size == 1 else None  # a job of one rank needs no torchrun
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout)
        return cls(ReplicaLayout(world, ranks_per_replica or world.local_world_size), timeout_s=timeout_s)

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.layout.num_replicas

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.layout.replica

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's replica."""
        return self._groups.sharding

    @property
    def merge_group(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's shard. With one replica there is none to ask for."""
        assert self._groups.merge is not None, "one replica has nothing to merge with"
        return self._groups.merge

    @property
    def row_group(self) -> dist.ProcessGroup:
        """As `merge_group`, for rows alone: it may be used by another thread."""
        assert self._groups.rows is not None, "one replica has nothing to merge with"
        return self._groups.rows

    @property
    def gather_group(self) -> dist.ProcessGroup:
        """As `sharding_group`, for merged dense parameters alone: it may be used by another thread."""
        assert self._groups.gather is not None, "one replica has nothing to gather"
        return self._groups.gather

    def dmp_kwargs(self, **options: Any) -> dict[str, Any]:
        """Returns what `DistributedModelParallel` must be told: `env` and `data_parallel_wrapper`.

        Args:
            options: of TorchRec's `DefaultDataParallelWrapper`, e.g. `static_graph=False, find_unused_parameters=True` for a model of
                which parts are used in some steps only.
        """
        if self.num_replicas == 1:
            env = ShardingEnv.from_process_group(self.sharding_group)
            return {"env": env, "data_parallel_wrapper": DefaultDataParallelWrapper(**options)}
        layout = self.layout
        env = replica_sharding_env(
            self.sharding_group,
            self.merge_group,
            [layout.sharding_ranks(replica) for replica in range(layout.num_replicas)],
            layout.ranks_per_host,
        )
        return {"env": env, "data_parallel_wrapper": ReplicaDataParallelWrapper(self.sharding_group, **options)}

    def localize(self, plan: ShardingPlan) -> ShardingPlan:
        """Moves a plan for one replica to the ranks of this one, and makes sure that all ranks hold the same. Call it on all ranks.

        Args:
            plan: made for `replica_world`, e.g. by `collective_plan` over all ranks.

        Raises:
            PlanError: the plan uses ranks beyond one replica.
            LaunchError: ranks hold different plans.
        """
        moved = localize(plan, self.layout.sharding_ranks(self.replica)[0], self.layout.ranks_per_replica)
        digest = plan_digest(plan)
        topic, self._num_plans = f"plan {self._num_plans}", self._num_plans + 1
        check_same(self._store, self.world, topic, {"sharding plan": digest}, START_TIMEOUT_S)
        self.plan_digest = digest
        return moved

    def check_same(self, topic: str, facts: dict[str, Any]) -> None:
        """Makes sure that all ranks hold the same facts. Call it on all ranks in the same order.

        Raises:
            RankFailure: a rank did not come.
            LaunchError: facts differ.
        """
        store = PrefixStore(f"question {self._num_questions}", self._store)
        self._num_questions += 1
        check_same(store, self.world, topic, facts, START_TIMEOUT_S)

    def check_same_shards(self, topic: str, facts: dict[str, Any]) -> None:
        """Makes sure that the ranks which hold the same shard in different replicas hold the same facts. Otherwise as `check_same`."""
        store = PrefixStore(f"question {self._num_questions}/{self.layout.position}", self._store)
        self._num_questions += 1
        among = World(self.replica, self.num_replicas)  # so what is named is a replica
        check_same(store, among, f"{topic} at position {self.layout.position} of each replica, here called rank", facts, START_TIMEOUT_S)

    def occupy(self, finish: Callable[[], None]) -> None:
        """Says that a thread uses the groups until `finish` is called, the same on all ranks."""
        self._finish = finish

    def free(self) -> None:
        """Ends what uses the groups beside training. Call it before they are used, for another optimizer may have a round under way."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def round_agreement(self) -> RoundAgreement:
        """Returns a new agreement of all ranks. Call it on all ranks in the same order; it asks nothing yet."""
        name, self._num_agreements = f"round {self._num_agreements}", self._num_agreements + 1
        return RoundAgreement(self._store, self.world, self.timeout_s, name)


def _make_groups(layout: ReplicaLayout, timeout: timedelta, replica_interface: str, merge_interface: str) -> _Groups:
    """Makes every group on every rank, in one order, as torch asks for."""
    world_group = dist.GroupMember.WORLD
    assert world_group is not None
    if layout.num_replicas == 1:
        return _Groups(world_group, None, None, None)
    with gloo_over(replica_interface):
        sharding, gather = (
            [dist.new_group(layout.sharding_ranks(replica), timeout=timeout) for replica in range(layout.num_replicas)] for _ in range(2)
        )
    with gloo_over(merge_interface):
        merge, rows = (
            [dist.new_group(layout.merge_ranks(position), timeout=timeout) for position in range(layout.ranks_per_replica)]
            for _ in range(2)
        )
    return _Groups(sharding[layout.replica], merge[layout.position], rows[layout.position], gather[layout.replica])
