"""`python -m torchrec_kstep.train`: the only module that joins all stages. Also runs under torchrun."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_kstep.checkpoint import CheckpointManager, TrainState
from torchrec_kstep.checkpoint.manifest import Scalar
from torchrec_kstep.checkpoint.state import seed_rank
from torchrec_kstep.config import load
from torchrec_kstep.config.schema import KStepConfig, RunConfig, TiersConfig
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.dataset import Dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.doctor import check_agreement, check_start
from torchrec_kstep.errors import ConfigError, DataError
from torchrec_kstep.loop import Loop
from torchrec_kstep.metrics.ctr import CTRReport
from torchrec_kstep.metrics.sink import Sinks
from torchrec_kstep.metrics.throughput import PhaseTimer, TimedOptimizer
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.optim import LrSchedule, build_optimizer
from torchrec_kstep.optim.accumulate import AccumulatingOptimizer
from torchrec_kstep.optim.build_kstep import build_kstep_adam, replica_warnings
from torchrec_kstep.optim.scaling import describe, scale_optim, warnings
from torchrec_kstep.planner import find_tables, format_plan, make_plan
from torchrec_kstep.planner.forecast import Forecast, comparison_lines, write_comparison
from torchrec_kstep.planner.kept_plan import KeptPlan, keep_plan, plan_wishes, reuse_plan
from torchrec_kstep.planner.run_shape import RunShape, merge_weight_bytes
from torchrec_kstep.planner.traces import Usage, traced_usage
from torchrec_kstep.replicas import KStepEnv, ReplicaLayout
from torchrec_kstep.report import REPORT_NAME, write_facts, write_report
from torchrec_kstep.routes import CarriedOut, JobRoutes, RankRoutes, carry_out, routes_of_run
from torchrec_kstep.runtime import Job, bound_waits, choose_device, cleaned_up, open_run_dir, run
from torchrec_kstep.sharding import build_sharders, shard_task
from torchrec_kstep.sharding.tiered import clip_warnings, tier_scalars
from torchrec_kstep.torchrec_seam.pipeline import make_pipeline
from torchrec_kstep.types import SPLITS
from torchrec_kstep.units import format_bytes, format_seconds
from torchrec_kstep.world import World


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, trains, and returns the exit code: 0, 1 for a failure, 2 for a wrong configuration."""
    return load.main(RunConfig, "train", train, argv)


def train(config: RunConfig) -> int:
    """Trains as `config` says, as this process's rank of the job, and prints the test AUC. Collective under torchrun."""
    world = World.from_torchrun()
    return run(world, config.distributed, lambda job: _train(job, config))


def _train(job: Job, config: RunConfig) -> int:
    """From configuration to test AUC on one rank."""
    world = job.world
    choose_device(config.train.device, world)  # refused before ranks wait for each other
    torch.set_num_threads(config.train.num_threads)
    check_start(job.store, world, config, config.distributed.start_timeout_s)
    run_dir = _enter_run_dir(job, config)
    job.share("prepared", lambda: _prepare(config), timeout_s=config.distributed.prepare_timeout_s)
    routes = set_routes(job, config)
    job.init_process_group()
    dataset = open_dataset(config.data)
    check_agreement(job.store, world, "data", {"data fingerprint": dataset.fingerprint}, config.distributed.timeout_s)
    if not dataset.num_rows("train"):
        raise DataError(f"the training split of data set {config.data.name!r} has no rows")
    given, config = config, scale_to_batch(config, world, dataset)
    loop = build_loop(config, world, dataset, run_dir, None if routes is None else routes.rank)
    with cleaned_up(lambda: loop.sinks.close()):  # they are opened in `resume`
        state = resume(loop, run_dir)
        if world.is_main:  # not before: a start that is refused must leave the run's own record alone
            load.save(given, run_dir / "config.yaml")
            notes = (*scaling_lines(given, config, world, dataset), *route_warnings(routes), *replica_warnings(config.kstep, world))
            for line in notes:
                loop.sinks.line(line)
            write_facts(
                run_dir,
                world=world,
                config=asdict(config),
                data={"name": config.data.name, "fingerprint": dataset.fingerprint}
                | {f"{split} rows": dataset.num_rows(split) for split in SPLITS},
                plan=loop.plan_text,
                routes="" if routes is None else "\n".join(routes.lines()),
                resumed_from_step=state.step,
            )
        loop.train(state)
        measured = loop.steps.measured()
        if loop.forecast is not None and measured is not None:
            write_comparison(run_dir, loop.forecast, measured)
            for line in comparison_lines(loop.forecast, measured):
                loop.sinks.line(line)
        for text in clip_warnings(loop.dmp):
            loop.sinks.line(f"warning: {text}")
        report = loop.test(state)
        loop.sinks.scalars("end", state.step, {f"{phase}_s": spent for phase, spent in loop.timer.take().items()})
        loop.sinks.line(loop.timer.summary())
        if world.is_main and config.metrics.report:
            write_report([run_dir], run_dir / REPORT_NAME)
            loop.sinks.line(f"report {run_dir / REPORT_NAME}")
    if world.is_main:
        print(last_line(report), flush=True)
    return 0


def set_routes(job: Job, config: RunConfig) -> CarriedOut | None:
    """Chooses cores, drives and interfaces on rank 0 and carries them out on each, before groups and threads are made. Collective.

    Raises:
        ConfigError: what was asked for by name is not there.
        TopologyError: the machines do not take these ranks.
    """
    if config.routes.name == "off":
        return None
    chosen = JobRoutes.from_json(job.share("routes", lambda: routes_of_run(config, job.world).to_json()))
    return carry_out(job.store, job.world, chosen, config.distributed.start_timeout_s, config.distributed.backend)


def route_warnings(routes: CarriedOut | None) -> list[str]:
    """What of the routes could not be carried out, for the log."""
    return [] if routes is None else [f"warning: {text}" for text in routes.warnings]


def build_loop(config: RunConfig, world: World, dataset: Dataset, run_dir: Path, routes: RankRoutes | None = None) -> Loop:
    """Builds model, plan, shards, optimizer and pipeline, all fresh. Needs the process group. Collective."""
    device = choose_device(config.train.device, world)
    torch.manual_seed(config.train.seed)  # the same on all ranks: they build the same model
    table_device = torch.device("meta") if config.planner.kernel == "tiered" else None  # rows are made where they will live
    model = build_model(config.model, dataset.schema, seed=config.train.seed, table_device=table_device)
    task = CTRTask(model, world.world_size)
    env = replicas_of(config.kstep, world, routes)
    tiers = tiers_in(run_dir, config.tiers, world)
    kstep = None if env is None else config.kstep
    num_replicas = 1 if env is None else env.num_replicas
    shares = () if routes is None else routes.drive_shares
    sharders = build_sharders(config.planner, config.optim, tiers, config.train.accumulation, world, kstep, num_replicas, shares)
    process_group = dist.GroupMember.WORLD
    assert process_group is not None
    sharing = world if env is None else env.replica_world
    forecasts: list[Forecast] = []  # of rank 0, which plans
    tables = find_tables(task)
    wishes = plan_wishes(config.planner, config.tiers.name, sharing, tables)
    plan, plan_note = (None, "") if config.planner.renew else reuse_plan(run_dir, wishes, tables, sharders, sharing, process_group)
    if plan is None:
        plan = make_plan(
            task,
            config.planner,
            sharing,
            sharders,
            config.train.batch_size,
            process_group,
            world.local_world_size,
            run=run_shape(config, world, num_replicas, dataset, tables),
            tell=forecasts.append,
        )
    plan_text = format_plan(plan, tables)
    if env is None:
        dmp = shard_task(task, plan, sharders, world, device)
    else:
        dmp = shard_task(task, env.localize(plan), sharders, world, device, env.dmp_kwargs())
    bound_waits(timedelta(seconds=config.distributed.timeout_s))  # sharding may have made groups of its own
    replicas = None
    if env is None:
        optimizer = build_optimizer(dmp, config.optim, config.train.accumulation)
    else:
        num_steps_per_pass = batch_order(config, world).num_steps(dataset.num_rows("train"))
        replicas = build_kstep_adam(dmp, config.optim, config.kstep, env, num_steps_per_pass, config.train.seed)
        optimizer = AccumulatingOptimizer(replicas, config.train.accumulation) if config.train.accumulation > 1 else replicas
    timer = PhaseTimer()
    checkpoints = CheckpointManager(
        run_dir / "checkpoints",
        config.checkpoint.keep,
        contract(config, world, dataset),
        copies_stores=config.checkpoint.tables == "full",
        writes=env is None or env.replica == 0,
    )
    return Loop(
        config=config,
        world=world,
        device=device,
        dataset=dataset,
        dmp=dmp,
        optimizer=optimizer,
        schedule=LrSchedule(optimizer, config.optim, num_total_steps(config, world, dataset)),
        pipeline=make_pipeline(config.train.pipeline, dmp, TimedOptimizer(optimizer, timer), device),
        timer=timer,
        checkpoints=checkpoints,
        sinks=Sinks(),
        table_scalars=partial(tier_scalars, dmp),
        replicas=replicas,
        plan_text=plan_text,
        kept_plan=KeptPlan(plan, wishes),
        plan_note=plan_note,
        forecast=forecasts[0] if forecasts else None,
    )


def run_shape(
    config: RunConfig, world: World, num_replicas: int, dataset: Dataset, tables: Mapping[str, Sequence[EmbeddingBagConfig]]
) -> RunShape:
    """What the plan of a run depends on besides its tables; its data is read where the plan is made."""

    def usage() -> Usage:
        if not config.planner.trace_rows:
            return Usage()
        num_batches = math.ceil(config.planner.trace_rows / config.train.batch_size)
        stream = dataset.batches("train", replace(batch_order(config, World()), shuffle=config.data.shuffle, seed=config.train.seed))
        with closing(iter(stream)) as batches:
            return traced_usage(islice(batches, num_batches), tables)

    return RunShape(
        num_hosts=world.num_hosts,
        num_replicas=num_replicas if config.kstep.k else 0,
        k=config.kstep.k if num_replicas > 1 else 0,
        merge_weight_bytes=merge_weight_bytes(config.kstep),
        num_steps=num_total_steps(config, world, dataset),
        prefetch=config.tiers.name != "dram_ssd" or config.tiers.prefetch_depth > 0,
        usage=usage,
    )


def replicas_of(kstep: KStepConfig, world: World, routes: RankRoutes | None = None) -> KStepEnv | None:
    """Returns the replicas that `kstep` asks for; None where all ranks share one model. Collective.

    Raises:
        ConfigError: replicas of that size do not fill the ranks.
    """
    if not kstep.k:
        return None
    layout = ReplicaLayout(world, kstep.ranks_per_replica or world.local_world_size)
    interfaces = ("", "") if routes is None else (routes.replica_interface, routes.merge_interface)
    return KStepEnv(layout, None, kstep.timeout_s, *interfaces)


def tiers_in(run_dir: Path, tiers: TiersConfig, world: World) -> TiersConfig:
    """Returns tiers that have a place: where none was named, below the run directory, which hosts may share."""
    return tiers if tiers.ssd_paths else replace(tiers, ssd_paths=[str(run_dir / "rows" / f"host{world.host}")])


def resume(loop: Loop, run_dir: Path) -> TrainState:
    """Continues from the newest good checkpoint of the run directory if there is one, and opens the sinks on rank 0. Collective.

    Raises:
        ConfigError: there are checkpoints, but `checkpoint.resume` is off.
    """
    config, world = loop.config, loop.world
    if not config.checkpoint.resume and loop.checkpoints.newest() is not None:
        raise ConfigError(f"{run_dir} holds checkpoints and checkpoint.resume=false: choose another run_dir, or resume")
    state = TrainState()
    seed_rank(config.train.seed, world.rank)
    lines: list[str] = []
    note = ""
    found = loop.checkpoints.resume(loop.dmp, loop.optimizer, reads_all=config.checkpoint.verify == "full")
    if found is not None:
        state = found.state
        note = f"continued from step {state.step}"
        if not found.has_streams:
            seed_rank(config.train.seed, world.rank, state.step)
            note += f"; saved by another number of ranks, so dropout masks are drawn anew on {world.world_size}"
        lines += [f"warning: {text}" for text in found.notes]
        lines += [loop.plan_note] if loop.plan_note else []
        if found.num_bytes_read:
            lines.append(f"read {format_bytes(found.num_bytes_read)} of snapshots to look for damage, {format_seconds(found.check_s)}")
    if world.is_main:
        assert loop.kept_plan is not None
        keep_plan(run_dir, loop.kept_plan)
        loop.sinks = Sinks.open(config.metrics, run_dir, state.step)
        loop.sinks.line(f"run directory {run_dir}" + (f" ({note})" if note else ""))
        for line in lines:
            loop.sinks.line(line)
    return state


def scale_to_batch(config: RunConfig, world: World, dataset: Dataset) -> RunConfig:
    """Returns the configuration with rates for the batch that this job trains with, as `optim.scaling` says."""
    order = batch_order(config, world)
    num_epoch_steps = order.num_steps(dataset.num_rows("train"))
    num_steps = num_total_steps(config, world, dataset)
    return replace(config, optim=scale_optim(config.optim, order.global_batch_size, num_epoch_steps, num_steps))


def scaling_lines(given: RunConfig, scaled: RunConfig, world: World, dataset: Dataset) -> list[str]:
    """Says what became of the rates, and what to watch out for; nothing without `optim.scaling`."""
    if given.optim.scaling == "none":
        return []
    num_steps = num_total_steps(scaled, world, dataset)
    lines = [describe(given.optim, scaled.optim, batch_order(given, world).global_batch_size), f"{num_steps} optimizer steps"]
    return lines + [f"warning: {text}" for text in warnings(given.optim, num_steps, given.model.embedding_init_std)]


def batch_order(config: RunConfig, world: World) -> BatchOrder:
    """Returns how many rows a step takes and how they are split."""
    return BatchOrder(batch_size=config.train.batch_size, world_size=world.world_size, micro_batches=config.train.accumulation)


def num_total_steps(config: RunConfig, world: World, dataset: Dataset) -> int:
    """Optimizer steps of a run that is not stopped early; schedules end there."""
    order = batch_order(config, world)
    num_steps = config.train.epochs * order.num_steps(dataset.num_rows("train"))
    return min(num_steps, config.train.max_steps) if config.train.max_steps else num_steps


def contract(config: RunConfig, world: World, dataset: Dataset) -> dict[str, Scalar]:
    """What must not change between saving and resuming: it decides what the tensors and the position in the data mean."""
    shared: dict[str, Scalar] = {
        "data": f"{config.data.name} {dataset.fingerprint}",
        "data.limit": config.data.limit,
        "data.shuffle": config.data.shuffle,
        "data.shuffle_row_groups": config.data.shuffle_row_groups,
        "train.seed": config.train.seed,
        "global batch (train.batch_size * ranks * train.accumulation)": config.train.batch_size
        * world.world_size
        * config.train.accumulation,
        "optim.dense": config.optim.dense,
        "optim.embedding": config.optim.embedding,
    }
    return shared | {f"model.{name}": json.dumps(value) for name, value in asdict(config.model).items()}


def last_line(report: CTRReport) -> str:
    """What the run prints last on stdout."""
    return f"test AUC {report.auc:.4f}" if report.auc is not None else f"test AUC undefined: {report.undefined}"


def _prepare(config: RunConfig) -> bool:
    """Prepares a small data set on first use; true, for the ranks that wait for it."""
    ensure_prepared(config.data)
    return True


def _enter_run_dir(job: Job, config: RunConfig) -> Path:
    """Finds the run directory, and changes into it where that was asked for."""
    run_dir = open_run_dir(job, config.run_dir, f"{config.model.name}_{config.data.name}")
    if config.chdir:
        job.on_failure(partial(os.chdir, Path.cwd()))  # the folder may go then
        os.chdir(run_dir)
    return run_dir


if __name__ == "__main__":
    sys.exit(main())
