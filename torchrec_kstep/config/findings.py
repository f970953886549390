"""Collects what is wrong with a configuration, so that all of it is reported at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrec_kstep.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        text: what is wrong, where, and what to do.
        keys: paths of the keys it is about, with the key that was probably meant by a mistyped one.
    """

    text: str
    keys: tuple[str, ...] = ()


@dataclass
class Findings:
    """The faults found so far, each text once."""

    items: list[Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is any fault."""
        return bool(self.items)

    def add(self, text: str, *keys: str) -> None:
        """Adds a fault about `keys`."""
        if all(text != item.text for item in self.items):
            self.items.append(Finding(text, keys))

    def add_unrelated(self, others: Iterable[Finding]) -> None:
        """Adds faults, leaving out those about a key that an earlier fault is about: they would only be its echo."""
        tainted = {key for item in self.items for key in item.keys}
        for other in others:
            if not any(_overlaps(key, seen) for key in other.keys for seen in tainted):
                self.add(other.text, *other.keys)

    def raise_if_any(self) -> None:
        """Raises one ConfigError that lists every fault; returns if there is none."""
        if self.items:
            raise ConfigError(format_faults([item.text for item in self.items]))


def _overlaps(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def format_faults(texts: Sequence[str]) -> str:
    """Writes faults as a numbered list under a line with their number."""
    if len(texts) == 1:
        return f"1 fault in the configuration: {texts[0]}"
    return "\n".join([f"{len(texts)} faults in the configuration:", *(f"  {index}. {text}" for index, text in enumerate(texts, 1))])
