"""What routes are: values that one rank chooses for all, with reasons in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Cores = Literal["node", "own", "any"]


@dataclass(frozen=True)
class RouteWishes:
    """What was asked for; every list but that of drives is by local rank, and one entry stands for all.

    Attributes:
        cores: "node": ranks keep to the cores of their NUMA node; "own": to an equal part of these; "any": to none.
        cpus: cores by number, which overrule `cores`.
        interfaces: that lead to the other hosts, which overrule the topology's.
        drive_shares: part of the rows on each drive, over their sum, which overrules the topology's.
    """

    cores: Cores = "node"
    cpus: tuple[tuple[int, ...], ...] = ()
    interfaces: tuple[str, ...] = ()
    drive_shares: tuple[float, ...] = ()

    def cpus_of(self, local_rank: int) -> tuple[int, ...]:
        """Cores that a rank was given by number; none: `cores` holds."""
        return _of(self.cpus, local_rank) or ()

    def interface_of(self, local_rank: int) -> str:
        """Interface that a rank was given by name, or ""."""
        return _of(self.interfaces, local_rank) or ""


def _of(values: Sequence[Any], local_rank: int) -> Any:
    return values[local_rank if len(values) > 1 else 0] if values else None


@dataclass(frozen=True)
class RankRoutes:
    """The routes of one rank.

    Attributes:
        rank: global rank.
        host: index of its host.
        local_rank: on that host.
        numa: name of its NUMA node, such as `numa0`.
        cores: as in `RouteWishes`.
        core_part: of the ranks on that NUMA node, which one this is, and how many there are.
        cpus: cores by number, where they were asked for.
        drive_shares: part of the rank's rows on each `ssd_path`, in their order; none: equal parts.
        card: name of the network card that leads to the other hosts, "" on one host.
        interface: of that card, "" where it is not known: what gloo was told stays.
        merge_interface: for the rank's merge lane: the exchanges with the ranks that hold its shard in other replicas.
        replica_interface: for the ranks of its replica: `lo` where all of them are on one host.
        is_ordered: whether its interface was asked for by name, so that not having it is an error.
        reasons: why, one sentence each.
    """

    rank: int
    host: int
    local_rank: int
    numa: str
    cores: Cores
    core_part: tuple[int, int]
    cpus: tuple[int, ...] = ()
    drive_shares: tuple[float, ...] = ()
    card: str = ""
    interface: str = ""
    merge_interface: str = ""
    replica_interface: str = ""
    is_ordered: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Every interface that is used by name, once."""
        return tuple(dict.fromkeys(name for name in (self.interface, self.merge_interface, self.replica_interface) if name))


@dataclass(frozen=True)
class JobRoutes:
    """The routes of all ranks.

    Attributes:
        topology: name of the machines.
        ssd_paths: folders that `drive_shares` are about.
        ranks: by global rank.
    """

    topology: str
    ssd_paths: tuple[str, ...]
    ranks: tuple[RankRoutes, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns values that survive JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobRoutes":
        """Reads what `to_json` returned."""
        ranks: list[dict[str, Any]] = values["ranks"]
        made: list[dict[str, Any]] = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in rank.items()} for rank in ranks
        ]
        return cls(values["topology"], tuple(values["ssd_paths"]), tuple(RankRoutes(**rank) for rank in made))

    def lines(self) -> list[str]:
        """One line per rank of the first host and its reasons; other hosts where they differ from it."""
        shown = [rank for rank in self.ranks if not rank.host or self._said(rank) != self._said(self.ranks[rank.local_rank])]
        lines = [f"rank {rank.rank}: {self._said(rank)}" for rank in shown]
        num_others = len({rank.host for rank in self.ranks} - {rank.host for rank in shown})
        if num_others:
            lines.append(f"{num_others} other host{'s' * (num_others > 1)} alike")
        return lines + [f"- {reason}" for reason in dict.fromkeys(reason for rank in shown for reason in rank.reasons)]

    def _said(self, rank: RankRoutes) -> str:
        parts = [_cores_text(rank)]
        if self.ssd_paths and rank.drive_shares:
            total = sum(rank.drive_shares)
            shares = (f"{share / total:.0%} on {path}" for path, share in zip(self.ssd_paths, rank.drive_shares, strict=True) if share)
            parts.append("rows " + ", ".join(shares))
        if rank.merge_interface:
            parts.append(f"merge lane over {rank.merge_interface}")
        if rank.replica_interface:
            parts.append(f"replica over {rank.replica_interface}")
        if rank.interface and rank.interface not in (rank.merge_interface, rank.replica_interface):
            parts.append(f"other exchanges over {rank.interface}")
        return "; ".join(parts)


def _cores_text(rank: RankRoutes) -> str:
    if rank.cpus:
        return f"cores {', '.join(map(str, rank.cpus))}"
    if rank.cores == "any":
        return "any core"
    if rank.cores == "own":
        return f"part {rank.core_part[0] + 1} of {rank.core_part[1]} of the cores of {rank.numa}"
    return f"cores of {rank.numa}"
