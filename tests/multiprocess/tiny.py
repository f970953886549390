"""A data set in memory and a configuration small enough that a training run takes a fraction of a second."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_kstep.checkpoint import TrainState
from torchrec_kstep.config.schema import (
    CheckpointConfig,
    DataConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    PlannerConfig,
    RunConfig,
    TiersConfig,
    TrainConfig,
)
from torchrec_kstep.data.collate import Bags, make_batch
from torchrec_kstep.data.dataset import BatchStream
from torchrec_kstep.data.order import BatchOrder, shares
from torchrec_kstep.loop import Loop
from torchrec_kstep.sharding.tiered.state import PrefetchesRows, kernels_of
from torchrec_kstep.storage.tiered_tables import TieredTables
from torchrec_kstep.train import build_loop, resume
from torchrec_kstep.types import Batch, FeatureSchema, SparseFeature, Split
from torchrec_kstep.world import World

SCHEMA = FeatureSchema(("d0", "d1"), (SparseFeature("user", 24), SparseFeature("item", 17), SparseFeature("tags", 9, max_ids_per_bag=3)))


class TinyDataset:
    """Rows made from a seed, with labels that depend on them; bags of `tags` are often empty."""

    def __init__(self, num_train: int = 256, num_eval: int = 101, seed: int = 3) -> None:
        self.schema = SCHEMA
        self.fingerprint = f"tiny-{num_train}-{num_eval}-{seed}"
        self._num_rows: dict[Split, int] = {"train": num_train, "validation": num_eval, "test": num_eval}
        self._seed = seed
        self.rows_seen: list[list[int]] = []  # row numbers of every training batch handed out

    def num_rows(self, split: Split) -> int:
        return self._num_rows[split]

    def batches(self, split: Split, order: BatchOrder, start_step: int = 0) -> BatchStream:
        num_rows = self._num_rows[split]
        return BatchStream(order.num_steps(num_rows), start_step, order.micro_batches, 0, lambda: self._make(split, order, start_step))

    def _make(self, split: Split, order: BatchOrder, start_step: int) -> Generator[Batch, None, None]:
        num_rows = self._num_rows[split]
        rows = np.arange(num_rows)
        if order.shuffle:
            rows = np.random.default_rng([order.seed, order.epoch]).permutation(num_rows)
        columns = self._columns(split)
        for share in shares(order, num_rows, start_step):
            chosen = rows[share.first_position :: order.world_size][: share.num_rows]
            if split == "train":
                self.rows_seen.append(chosen.tolist())
            lengths = columns["length"][chosen]
            tags = np.concatenate(
                [columns["tags"][row, :length] for row, length in zip(chosen, lengths, strict=True)] or [np.zeros(0, np.int64)]
            )
            bags = {"user": Bags(columns["user"][chosen]), "item": Bags(columns["item"][chosen]), "tags": Bags(tags, lengths)}
            yield make_batch(
                SCHEMA, columns["dense"][chosen], bags, columns["label"][chosen], max(share.num_padded_rows, 1), share.num_global_rows
            )

    def _columns(self, split: Split) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, ("train", "validation", "test").index(split)])
        n = self._num_rows[split]
        columns = {
            "dense": rng.normal(size=(n, 2)).astype(np.float32),
            "user": rng.integers(0, 24, n),
            "item": rng.integers(0, 17, n),
            "tags": rng.integers(0, 9, (n, 3)),
            "length": rng.integers(0, 4, n),
        }
        logit = columns["dense"][:, 0] + (columns["user"] % 3) - 1.0 + 0.5 * (columns["item"] % 2)
        return columns | {"label": (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(np.float32)}


def tiny_config(**changes: Any) -> RunConfig:
    """Defaults for tests; `changes` are keyed `group__key`, e.g. `train__epochs=3`."""
    config = RunConfig(
        data=DataConfig(name="tiny"),
        model=ModelConfig(name="deepfm", embedding_dim=8, mlp=[16, 8], dropout=0.2),
        planner=PlannerConfig(kernel="dense", sharding="table_wise", trace_rows=0),  # the data set notes every row that is read
        optim=OptimConfig(lr=0.01, embedding_lr=0.02, schedule="cosine", warmup_steps=3),
        train=TrainConfig(batch_size=32, eval_batch_size=16, epochs=2, log_every_steps=3, early_stop_patience=0),
        checkpoint=CheckpointConfig(keep=2),
        metrics=MetricsConfig(tensorboard=False, progress="none"),
    )
    for name, value in changes.items():
        group, key = name.split("__")
        config = replace(config, **{group: replace(getattr(config, group), **{key: value})})
    return config


def tiered_config(**changes: Any) -> RunConfig:
    """Tiered tables, rows over all ranks, no dropout: the same result for every number of ranks."""
    return tiny_config(planner__kernel="tiered", planner__sharding="row_wise", model__dropout=0.0, **changes)


def on_ssd(config: RunConfig, folder: Path, dram_bytes: str = "8KiB") -> RunConfig:
    """The same with rows on SSD."""
    return replace(config, tiers=TiersConfig("dram_ssd", dram_bytes=dram_bytes, ssd_paths=[str(folder)], segment_bytes="64KiB"))


@contextmanager
def one_rank_group() -> Iterator[World]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield World()
    finally:
        dist.destroy_process_group()


def start(config: RunConfig, world: World, dataset: TinyDataset, run_dir: Path) -> tuple[Loop, TrainState]:
    """A loop as `train.py` builds it, resumed from `run_dir` if there is something. Collective."""
    run_dir.mkdir(parents=True, exist_ok=True)
    loop = build_loop(config, world, dataset, run_dir)
    return loop, resume(loop, run_dir)


def finish(config: RunConfig, world: World, dataset: TinyDataset, run_dir: Path) -> tuple[Loop, TrainState]:
    """Trains to the end, or to what stops it. Collective."""
    loop, state = start(config, world, dataset, run_dir)
    loop.train(state)
    loop.sinks.close()
    return loop, state


def row_stores(loop: Loop) -> list[TieredTables]:
    """The row stores of this rank."""
    groups = [kernel.group for module in loop.dmp.modules() if isinstance(module, PrefetchesRows) for kernel in kernels_of(module._lookups)]
    return [group for group in groups if isinstance(group, TieredTables)]


def close_stores(loop: Loop) -> None:
    """Ends the row stores of this rank, as the end of its process would."""
    for store in row_stores(loop):
        store.close()


def fingerprints(loop: Loop) -> dict[str, bytes]:
    """All bits of weights and optimizer states that this rank holds, by name."""
    return {
        name: tensor.detach().cpu().contiguous().numpy().tobytes()
        for name, tensor in _tensors("", {"m": loop.dmp.state_dict(), "o": loop.optimizer.state_dict()})
    }


def _tensors(path: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(f"{path}.{key}", value)
    elif hasattr(state, "local_shards"):
        for shard in state.local_shards():
            yield f"{path}@{shard.metadata.shard_offsets}", shard.tensor
    elif isinstance(state, torch.Tensor):
        yield path, state


def assert_equal_bits(ours: dict[str, bytes], theirs: dict[str, bytes], skip: Sequence[str] = ()) -> None:
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if ours[name] != theirs[name] and not any(part in name for part in skip)]
    assert not differing, f"{len(differing)} of {len(ours)} tensors differ, e.g. {differing[:3]}"
