"""Near matches for mistyped names."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_MIN_RATIO = 0.6  # the cutoff that difflib itself uses; below it two names have little in common
_MIN_LAST_PART = 0.35
_OTHER_GROUP = 0.95  # a match under another group ranks just below the same match in the right group


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _alike(a: str, b: str) -> float:
    """Likeness of two plain names; `learning_rate` and `lr` are one word."""
    return 1.0 if a == _initials(b) or b == _initials(a) else _ratio(a, b)


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_")) if "_" in name else ""


def _closeness(word: str, candidate: str) -> float:
    """Likeness of two dotted names: as a whole, and by last part alone, so that `lr` finds `optim.lr`.

    A group in common is no likeness: the last parts must have something in common too.
    """
    by_last_part = _alike(word.rpartition(".")[2], candidate.rpartition(".")[2])
    return 0.0 if by_last_part < _MIN_LAST_PART else max(_ratio(word, candidate), _OTHER_GROUP * by_last_part)


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate most like `word`, or None if nothing is like it; ties go to the first in sorted order."""
    best = max(sorted(candidates), key=lambda candidate: _closeness(word, candidate), default=None)
    return best if best is not None and _closeness(word, best) >= _MIN_RATIO else None


def is_close(word: str, match: str) -> bool:
    """Whether the last parts of two dotted names are alike, so that `match` is probably what was meant."""
    return _alike(word.rpartition(".")[2], match.rpartition(".")[2]) >= _MIN_RATIO


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns `did you mean 'x'?`, or the list of candidates if they are few, or else where to look."""
    names = sorted(candidates)
    match = nearest(word, names)
    if match is not None:
        return f"did you mean {match!r}?"
    return f"expected one of {', '.join(names)}" if len(names) <= 20 else "--help lists all keys"
