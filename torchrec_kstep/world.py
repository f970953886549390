"""Who am I among the ranks: read once from torchrun's environment, passed explicitly from then on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_kstep.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Position of this process, in torchrun's words.

    | index | count |
    |---|---|
    | rank | world_size |
    | local_rank | local_world_size |
    | host | num_hosts |
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        """Refuses positions that cannot exist."""
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_world_size}: "
                "a rank must be smaller than its count; check RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
            )
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"{self.world_size} ranks over hosts of {self.local_world_size} ranks: "
                "every host must run the same number of ranks (--nproc-per-node equal on all hosts)"
            )
        if self.rank % self.local_world_size != self.local_rank:
            raise ConfigError(
                f"rank {self.rank} with local rank {self.local_rank} of {self.local_world_size}: ranks are counted host by host, "
                f"so local rank {self.rank % self.local_world_size} was expected; check RANK and LOCAL_RANK"
            )

    @property
    def host(self) -> int:
        """Index of this process's host."""
        return self.rank // self.local_world_size

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.world_size // self.local_world_size

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, which writes files and talks to people."""
        return self.rank == 0

    @classmethod
    def from_torchrun(cls, environ: Mapping[str, str] | None = None) -> "World":
        """Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without them this is a world of one.

        Raises:
            ConfigError: some are set and others not, or one is no number.
        """
        env = os.environ if environ is None else environ
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = [name for name in names if name in env]
        if not found:
            return cls()
        missing = [name for name in names if name not in env]
        if missing:
            raise ConfigError(f"{', '.join(found)} set but not {', '.join(missing)}: start with torchrun, which sets all four, or set none")
        try:
            rank, world_size, local_rank, local_world_size = (int(env[name]) for name in names)
        except ValueError:
            values = ", ".join(f"{name}={env[name]!r}" for name in names)
            raise ConfigError(f"expected whole numbers, got {values}") from None
        return cls(rank, world_size, local_rank, local_world_size)


def gloo_interface(environ: Mapping[str, str] | None = None) -> str:
    """Returns the network interface that gloo was told to use (the first of GLOO_SOCKET_IFNAME), or "" if it was not told."""
    env = os.environ if environ is None else environ
    return env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
