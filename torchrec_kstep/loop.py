"""The training loop, to be read from top to bottom. It joins no stages and opens no files: `train.py` does."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_kstep.checkpoint import CheckpointManager, TrainState
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.metrics.ctr import CTRMetrics, CTRReport
from torchrec_kstep.metrics.loss import MeanLoss, divergence
from torchrec_kstep.metrics.sink import Sinks
from torchrec_kstep.metrics.step_record import StepRecord
from torchrec_kstep.metrics.throughput import STEP_PHASES, PhaseTimer
from torchrec_kstep.optim.schedule import LrSchedule
from torchrec_kstep.planner.forecast import Forecast
from torchrec_kstep.planner.kept_plan import KeptPlan
from torchrec_kstep.torchrec_seam.pipeline import Pipeline
from torchrec_kstep.types import Split
from torchrec_kstep.world import World


class Replicas(Protocol):
    """Copies of the model that train alone for some steps."""

    def merge(self) -> None:
        """Makes all of them equal. Collective."""

    def take_scalars(self) -> dict[str, float]:
        """Returns what merging cost since the last call."""


@dataclass
class Loop:
    """Trains a sharded task, evaluates it, and keeps its checkpoints. Every method is collective."""

    config: RunConfig
    world: World
    device: torch.device
    dataset: Dataset
    dmp: DistributedModelParallel
    optimizer: KeyedOptimizer
    schedule: LrSchedule
    pipeline: Pipeline
    timer: PhaseTimer
    checkpoints: CheckpointManager
    sinks: Sinks
    table_scalars: Callable[[], Mapping[str, float]] = dict
    replicas: Replicas | None = None
    plan_text: str = ""
    kept_plan: KeptPlan | None = None
    plan_note: str = ""
    forecast: Forecast | None = None

    def __post_init__(self) -> None:
        """Starts the loss at zero rows."""
        self._loss = MeanLoss(self.device)
        self.steps = StepRecord(self.config.train.accumulation)
        self._logged_step = 0

    def train(self, state: TrainState) -> None:
        """Brings `state` from where it stands to the end of the run: the last epoch, `max_steps`, or an early stop."""
        self._logged_step = state.step
        while not self.is_over(state):
            if not self._train_epoch(state):  # stopped by max_steps: not a point where an unbroken run would evaluate
                self._save(state)
                self._validate(state)
                return
            state.epoch, state.step_in_epoch = state.epoch + 1, 0
            if state.epoch % self.config.train.eval_every_epochs == 0 or state.epoch == self.config.train.epochs:
                self._validate(state)
            self._save(state)

    def is_over(self, state: TrainState) -> bool:
        """Whether there is nothing left to train."""
        limits = self.config.train
        has_stopped_early = 0 < limits.early_stop_patience <= state.num_evals_without_gain
        return has_stopped_early or state.epoch >= limits.epochs or 0 < limits.max_steps <= state.step

    def test(self, state: TrainState) -> CTRReport:
        """Evaluates the weights with the best validation AUC on the test split."""
        if state.best_step is not None and state.best_step != state.step:
            self.checkpoints.restore(state.best_step, self.dmp, self.optimizer)
        report = self.evaluate("test", state.best_step or state.step)
        self.sinks.line(f"test of step {state.best_step or state.step}: {report}")
        return report

    def evaluate(self, split: Split, step: int) -> CTRReport:
        """Reports on all rows of a split, each counted once; `step` tells which weights these are."""
        order = BatchOrder(self.world.rank, self.world.world_size, self.config.train.eval_batch_size)
        stream = self.dataset.batches(split, order)
        metrics = CTRMetrics(device=self.device)
        self._merge_replicas(step)
        self.dmp.eval()
        self.pipeline.reset()
        with self.timer.phase("evaluation"), torch.no_grad(), closing(iter(stream)) as batches:
            for _ in range(len(stream)):
                metrics.update(self.pipeline.progress(batches), step)
            report = metrics.compute()
        self.sinks.scalars(split, step, report.scalars())
        return report

    def _train_epoch(self, state: TrainState) -> bool:
        """Trains to the end of the epoch, or to `max_steps`; returns whether the epoch is done."""
        train = self.config.train
        order = BatchOrder(
            self.world.rank,
            self.world.world_size,
            train.batch_size,
            micro_batches=train.accumulation,
            seed=train.seed,
            epoch=state.epoch,
            shuffle=self.config.data.shuffle,
        )
        stream = self.dataset.batches("train", order, state.step_in_epoch)
        num_steps = stream.num_steps - state.step_in_epoch
        if train.max_steps:
            num_steps = min(num_steps, train.max_steps - state.step)
        self.dmp.train()
        self.pipeline.reset()
        with closing(iter(stream)) as batches:
            # The iterator ends with the last step, so that a pipeline that looks ahead runs dry instead of dropping batches.
            ahead = self.timer.waiting_for(islice(batches, num_steps * train.accumulation))
            for num_left in reversed(range(num_steps)):
                scale = self.schedule.apply(state.step)
                with self.timer.phase("forward_backward"):
                    for _ in range(train.accumulation):
                        loss = self._loss.update(self.pipeline.progress(ahead))
                        if self.device.type == "cpu" and not loss.isfinite():  # elsewhere reading it would stall the device
                            raise divergence(state.step + 1, self.dmp)
                state.step, state.step_in_epoch = state.step + 1, state.step_in_epoch + 1
                self.sinks.progress(state.step_in_epoch, stream.num_steps, state.epoch + 1)
                if state.step % train.log_every_steps == 0 or not num_left:
                    self._log(state, train_lr=self.config.optim.lr * scale)
                every = self.config.checkpoint.every_steps
                if every and state.step % every == 0 and num_left:
                    self._save(state)
        return state.step_in_epoch == stream.num_steps

    def _log(self, state: TrainState, train_lr: float) -> None:
        """Reports the steps since the last report, over all ranks."""
        loss, num_rows = self._loss.compute()
        if not math.isfinite(loss):
            raise divergence(state.step, self.dmp)
        seconds = self.timer.take()
        step_s = sum(seconds[phase] for phase in STEP_PHASES)
        values = {"loss": loss, "rows_per_s": num_rows / step_s if step_s else 0.0, "lr": train_lr, "epoch": float(state.epoch + 1)}
        self.sinks.scalars("train", state.step, values | {f"{phase}_s": spent for phase, spent in seconds.items()})
        counters = self.table_scalars()
        if counters:
            self.sinks.scalars("tiers", state.step, counters)
        self.steps.add(state.step - self._logged_step, seconds, counters)
        self._logged_step = state.step
        self._log_rounds(state.step)

    def _merge_replicas(self, step: int) -> None:
        """Makes all replicas equal: between rounds there is no one model to evaluate or save."""
        if self.replicas is not None:
            with self.timer.phase("optimizer"):
                self.replicas.merge()
            self._log_rounds(step)

    def _log_rounds(self, step: int) -> None:
        """Reports the merge rounds since the last report, as this rank saw them."""
        if self.replicas is not None and (values := self.replicas.take_scalars()):
            self.sinks.scalars("replicas", step, values)
            self.steps.add_rounds(values, self.config.kstep.k)

    def _validate(self, state: TrainState) -> None:
        """Evaluates on validation and notes whether this is the best AUC so far."""
        report = self.evaluate("validation", state.step)
        self.sinks.line(f"epoch {state.epoch + bool(state.step_in_epoch)} step {state.step} validation: {report}")
        if report.auc is None:
            return  # nothing to compare
        if state.best_auc is None or report.auc > state.best_auc:
            state.best_auc, state.best_step, state.num_evals_without_gain = report.auc, state.step, 0
        else:
            state.num_evals_without_gain += 1

    def _save(self, state: TrainState) -> None:
        self._merge_replicas(state.step)
        with self.timer.phase("checkpoint"):
            self.checkpoints.save(state, self.dmp, self.optimizer)
