"""What a run consists of besides tensors: its position, its random streams, and one flat view of all state."""

import random
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchrec_kstep.errors import CheckpointError


@dataclass
class TrainState:
    """Where a run stands. Equal on all ranks.

    Attributes:
        step: optimizer steps done.
        epoch: epochs finished.
        step_in_epoch: steps done of the epoch under way; the position in the data.
        best_auc: best validation AUC so far.
        best_step: step whose weights reached it.
        num_evals_without_gain: evaluations since then.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    best_auc: float | None = None
    best_step: int | None = None
    num_evals_without_gain: int = 0


@dataclass(frozen=True)
class Slot:
    """A leaf of nested dictionaries: its value, and where a new one goes."""

    value: Any
    container: MutableMapping[Any, Any]
    key: Any


def flatten(prefix: str, state: MutableMapping[Any, Any]) -> dict[str, Slot]:
    """Names all leaves of nested dictionaries by their path. Empty dictionaries vanish.

    Raises:
        CheckpointError: two leaves would get the same name, or a leaf is neither tensor nor JSON value.
    """
    flat: dict[str, Slot] = {}
    for name, slot in _walk(prefix, state):
        if name in flat:
            raise CheckpointError(f"two entries of the state are called {name}")
        if not isinstance(slot.value, torch.Tensor | str | int | float | bool | None) and not hasattr(slot.value, "local_shards"):
            raise CheckpointError(f"{name}: cannot save a {type(slot.value).__name__}; expected a tensor or a JSON value")
        flat[name] = slot
    return flat


def _walk(path: str, state: MutableMapping[Any, Any]) -> Iterator[tuple[str, Slot]]:
    for key, value in state.items():
        if isinstance(value, MutableMapping):
            yield from _walk(f"{path}.{key}", value)
        else:
            yield f"{path}.{key}", Slot(value, state, key)


def random_state() -> dict[str, Any]:
    """The states of this process's random streams (python, numpy, torch CPU, current CUDA device if used), by name."""
    stream = np.random.get_state(legacy=False)  # the global stream, which is the one that users seed
    assert isinstance(stream, dict)
    version, internal, next_gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), next_gauss],
        "numpy": {
            "keys": stream["state"]["key"].tolist(),
            "position": int(stream["state"]["pos"]),
            "has_gauss": int(stream["has_gauss"]),
            "gauss": float(stream["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: dict[str, Any]) -> None:
    """Puts the random streams back to where `random_state` found them."""
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
    numpy = states["numpy"]
    np.random.set_state(("MT19937", np.array(numpy["keys"], np.uint32), numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seeds this process's streams for `rank`, each rank and step with streams of their own (dropout masks, above all)."""
    python, numpy, torch_seed = np.random.SeedSequence((seed, rank, step)).generate_state(3, np.uint32)
    random.seed(int(python))
    np.random.seed(int(numpy))
    torch.manual_seed(int(torch_seed))
