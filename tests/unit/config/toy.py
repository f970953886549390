"""A schema with a field of every supported kind, for tests that should not depend on the real keys."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class InnerToy:
    """Inner group."""

    width: int = 4  # columns


@dataclass(frozen=True)
class OptimToy:
    """How it steps."""

    k: int = 1  # steps between merges
    pace: float = 0.1  # steps per second
    inner: InnerToy = field(default_factory=InnerToy)


@dataclass(frozen=True)
class Toy:
    """Everything the toy reads."""

    name: str = "a"  # what it is called
    is_fast: bool = False  # whether it hurries
    widths: list[int] = field(default_factory=lambda: [1, 2])  # units of each layer
    columns: list[str] = field(default_factory=list)  # names of the columns
    rules: dict[str, str] = field(default_factory=dict)  # rule of single tables by name
    optim: OptimToy = field(default_factory=OptimToy)
    bare: int = 3
