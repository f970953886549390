"""Looking ahead in a loop without a pipeline."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kstep.sharding.tiered.state import PrefetchesRows

Item = TypeVar("Item")


def look_ahead(
    model: nn.Module, batches: Iterable[Item], features: Callable[[Item], KeyedJaggedTensor], num_batches: int = 2
) -> Iterator[Item]:
    """Yields every batch once, in order, having told the tiered tables of `model` of the next ones. Never changes a result.

    Collective: every rank must take the same number of batches. Ids of a batch cross the ranks twice, once for the rows to
    be brought up and once for the lookup; a pipeline (`train.pipeline=sparse_dist`) sends them once.

    Args:
        model: a sharded model.
        batches: in the order in which they will be looked up.
        features: the ids of a batch as the tiered collections get them from the model.
        num_batches: how many batches are known ahead; 0 yields the batches as they are.
    """
    collections = [module for module in model.modules() if isinstance(module, PrefetchesRows)]
    known: deque[Item] = deque()
    try:
        for batch in batches:
            if num_batches > 0:
                for collection in collections:
                    collection.prefetch_features(features(batch))
            known.append(batch)
            if len(known) > num_batches:
                yield known.popleft()
        while known:
            yield known.popleft()
    finally:
        if known:  # left early: the rest will not come
            for collection in collections:
                collection.cancel_prefetch()
