"""Which ranks hold one replica, and which merge: numbers only, no process group is made here."""

from dataclasses import dataclass

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.world import World


@dataclass(frozen=True)
class ReplicaLayout:
    """How the ranks of a job are cut into replicas.

    A replica is a run of consecutive ranks, its *sharding group*. Ranks at the same position of different replicas hold the
    same shard; they are a *merge group*. With 4 ranks and 2 a replica: sharding groups 0 1 | 2 3, merge groups 0 2 | 1 3.

    Attributes:
        world: this rank's position.
        ranks_per_replica: a divisor of the ranks of a host, or a multiple of them that divides the number of ranks.
    """

    world: World
    ranks_per_replica: int

    def __post_init__(self) -> None:
        """Refuses replicas that do not fill the ranks, or hosts that a replica fills in part only."""
        size, world = self.ranks_per_replica, self.world
        if size < 1 or world.world_size % size:
            raise ConfigError(
                f"{size} ranks per replica do not divide the {world.world_size} ranks of the job: choose one of "
                f"{', '.join(str(n) for n in range(1, world.world_size + 1) if not world.world_size % n)}"
            )
        if size % world.local_world_size and world.local_world_size % size:
            raise ConfigError(
                f"{size} ranks per replica with {world.local_world_size} ranks per host: a host holds whole replicas, or a replica "
                f"whole hosts; choose a divisor or a multiple of {world.local_world_size}"
            )

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.world.world_size // self.ranks_per_replica

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self.world.rank // self.ranks_per_replica

    @property
    def position(self) -> int:
        """This rank's place within its replica, equal for the ranks of its merge group."""
        return self.world.rank % self.ranks_per_replica

    @property
    def ranks_per_host(self) -> int:
        """Ranks that a replica has on each of its hosts."""
        return min(self.ranks_per_replica, self.world.local_world_size)

    def sharding_ranks(self, replica: int) -> list[int]:
        """Returns the ranks of a replica."""
        return list(range(replica * self.ranks_per_replica, (replica + 1) * self.ranks_per_replica))

    def merge_ranks(self, position: int) -> list[int]:
        """Returns the ranks at a position of all replicas, in the order of the replicas."""
        return list(range(position, self.world.world_size, self.ranks_per_replica))

    def replica_of(self, rank: int) -> int:
        """Returns the replica of any rank."""
        return rank // self.ranks_per_replica

    def replica_world(self) -> World:
        """Describes this rank's replica as if it were the whole job, which is how a plan is made."""
        return World(self.position, self.ranks_per_replica, self.position % self.ranks_per_host, self.ranks_per_host)
