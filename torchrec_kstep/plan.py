"""`python -m torchrec_kstep.plan`: plans without training, for this machine or one that is described in a file, and says why.

python -m torchrec_kstep.plan model=dlrm planner=tiered                          the run that `train` would start with these words
python -m torchrec_kstep.plan --topology dgx_h100 --hosts 2,16 --ranks-per-host 8 --table rows=1e8,dim=128,count=26,ids=3
python -m torchrec_kstep.plan --k 1,20 --hosts 4 --ranks-per-host 2 --svg plan.svg data=synthetic model=dlrm
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import OptimConfig, PlannerConfig, RunConfig
from torchrec_kstep.cost.calibration import Calibration
from torchrec_kstep.data import ensure_prepared, open_dataset
from torchrec_kstep.data.order import BatchOrder
from torchrec_kstep.errors import ConfigError, KStepError
from torchrec_kstep.models import CTRTask, build_model
from torchrec_kstep.ops.batch import MAX_ROWS
from torchrec_kstep.planner.explain import placement_table, pool_lines, reasons, step_lines
from torchrec_kstep.planner.picture import svg
from torchrec_kstep.planner.placement import Placement
from torchrec_kstep.planner.plan import calibration_of, topology_constraints
from torchrec_kstep.planner.run_shape import merge_weight_bytes
from torchrec_kstep.planner.tables import find_tables
from torchrec_kstep.planner.topology_planner import DEFAULT_ZIPF_EXPONENT, Job, TopologyShardingPlanner
from torchrec_kstep.planner.traces import Usage, traced_usage
from torchrec_kstep.routes import choose_routes, drive_here
from torchrec_kstep.sharding import build_sharders
from torchrec_kstep.sharding.sharder import tier_config
from torchrec_kstep.topology import ClusterTopology, find_topology, load_topology, this_machine
from torchrec_kstep.units import format_seconds, parse_bytes
from torchrec_kstep.world import World

EXIT_FAILURE, EXIT_USAGE = 1, 2
_MAX_TABLES = 100_000


@dataclass(frozen=True)
class _Subject:
    """What is planned."""

    module: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    constraints: dict[str, ParameterConstraints]
    usage: Usage
    job: Job
    ssd_paths: tuple[str, ...]
    planner: PlannerConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Plans and prints; returns 0, 1 where nothing fits or a file is wrong, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    try:
        subject = _subject_of_tables(args) if args.table else _subject_of_run(args)
        placements = [(topology, _plan(subject, topology, job)) for topology, job in _cases(subject, args)]
        _print_cases(placements, subject.job.batch_size)
        topology, placement = placements[0]
        _print_placement(placement, topology, calibration_of(subject.planner, topology))
        _print_routes(placement, topology, subject.ssd_paths)
        if args.json is not None:
            _write("--json", args.json, placement.to_json())
            print(f"plan: {args.json}")
        if args.svg is not None:
            _write("--svg", args.svg, svg(placement, topology))
            print(f"picture: {args.svg}")
    except ConfigError as error:
        print(f"torchrec_kstep.plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (KStepError, OSError) as error:
        print(f"torchrec_kstep.plan: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def _plan(subject: _Subject, topology: ClusterTopology, job: Job) -> Placement:
    calibration = calibration_of(subject.planner, topology)
    planner = TopologyShardingPlanner(topology, job, subject.constraints, subject.usage, calibration)
    planner.plan(subject.module, subject.sharders)
    assert planner.placement is not None
    return planner.placement


def _cases(subject: _Subject, args: argparse.Namespace) -> list[tuple[ClusterTopology, Job]]:
    """Every combination of hosts and k that was asked for. With k, each host holds a replica; without, all share one."""
    base = load_topology(find_topology(args.topology)) if args.topology else this_machine(subject.ssd_paths, max(args.hosts or [1]))
    cases = []
    for num_hosts, k in itertools.product(args.hosts or [len(base.hosts)], args.k or [0]):
        topology = base.with_hosts(num_hosts)
        per_host = args.ranks_per_host or len(topology.hosts[0].devices) or 1
        is_merged = k > 0 and num_hosts > 1
        job = _replaced(
            subject.job,
            world_size=per_host if is_merged else per_host * num_hosts,
            local_world_size=per_host,
            k=k if is_merged else 0,
            num_replicas=num_hosts if is_merged else 1,
        )
        cases.append((topology, job))
    return cases


def _replaced(job: Job, **values: int) -> Job:
    return Job(**{**{name: getattr(job, name) for name in job.__dataclass_fields__}, **values})


def _print_cases(placements: Sequence[tuple[ClusterTopology, Placement]], batch_size: int) -> None:
    """One line per case, where there are several."""
    if len(placements) < 2:
        return
    print(f"{'hosts':>6} {'k':>6} {'ranks':>6} {'step':>10} {'+-':>10} {'samples/s':>12}  slowest phase")
    for topology, placement in placements:
        step = placement.step
        ranks = placement.world_size * placement.num_replicas
        slowest = max((phase for phase in step.phases if not phase.is_hidden), key=lambda phase: phase.seconds)
        print(
            f"{len(topology.hosts):>6} {placement.k or '-':>6} {ranks:>6} {format_seconds(step.seconds):>10} "
            f"{format_seconds(step.error_s):>10} {ranks * batch_size / step.seconds:>12,.0f}  {slowest.name}"
        )
    print("\nthe first case in full:")


def _print_placement(placement: Placement, topology: ClusterTopology, calibration: Calibration | None) -> None:
    for line in (*placement_table(placement), "", *step_lines(placement), "", "memory taken by tables:", *pool_lines(placement), ""):
        print(line)
    for line in reasons(placement):
        print(f"- {line}")
    if calibration is not None:
        print(f"- times of software {calibration.told}")
    elif not topology.hosts[0].devices:
        print("- times of software are those of another machine (python -m torchrec_kstep.calibrate fits them to runs)")
    for text in topology.assumed:
        print(f"- assumed, not measured: {text} (python -m torchrec_kstep.probe measures)")


def _print_routes(placement: Placement, topology: ClusterTopology, ssd_paths: Sequence[str]) -> None:
    """Cores, drives and interfaces that `train` would give the ranks on these machines."""
    per_host = placement.world_size * placement.num_replicas // len(topology.hosts)
    per_replica = placement.world_size if placement.num_replicas > 1 else 0
    routes = choose_routes(topology, per_host, ranks_per_replica=per_replica, ssd_paths=ssd_paths, drive_of=drive_here)
    print("\nroutes of ranks (routes=auto):")
    for line in routes.lines():
        print(f"  {line}")


def _subject_of_run(args: argparse.Namespace) -> _Subject:
    """The task, data and settings of a run of `train`."""
    config = load(RunConfig, "train", args.overrides)
    ensure_prepared(config.data)
    dataset = open_dataset(config.data)
    task = CTRTask(build_model(config.model, dataset.schema, seed=config.train.seed, table_device=torch.device("meta")), 1)
    tiers = tier_config(config.tiers) if config.planner.kernel == "tiered" else None
    job = Job(
        batch_size=args.batch or config.train.batch_size,
        kernel=config.planner.kernel,
        threads_per_rank=config.train.num_threads,
        dram_bytes_per_host=None if tiers is None else tiers.num_dram_bytes,
        ssd_bytes_per_host=0 if tiers is None else tiers.num_ssd_bytes,
        prefetch=tiers is None or tiers.prefetch_depth > 0,
        merge_weight_bytes=merge_weight_bytes(config.kstep),
        zipf_exponent=args.zipf,
    )
    sharders = build_sharders(config.planner, config.optim, config.tiers, config.train.accumulation, World())
    tables = find_tables(task)
    constraints = topology_constraints(tables, config.planner)
    stream = dataset.batches("train", BatchOrder(batch_size=job.batch_size, seed=config.train.seed, shuffle=config.data.shuffle))
    with closing(iter(stream)) as batches:
        usage = traced_usage(itertools.islice(batches, math.ceil(config.planner.trace_rows / job.batch_size)), tables)
    planner = replace(config.planner, topology=args.topology, calibration=args.calibration or config.planner.calibration)
    return _Subject(task, sharders, constraints, usage, job, tuple(config.tiers.ssd_paths), planner)


def _subject_of_tables(args: argparse.Namespace) -> _Subject:
    """Tables from the command line."""
    if args.overrides:
        raise ConfigError(f"--table describes all tables, so {args.overrides[0]!r} would change nothing: leave out one of them")
    configs: list[EmbeddingBagConfig] = []
    constraints = {}
    for text in args.table:
        for config, ids in parse_table(text, len(configs)):
            if config.name in constraints:
                raise ConfigError(f"--table {text}: table '{config.name}' was given before; give each --table a name=TEXT of its own")
            configs.append(config)
            constraints[config.name] = ParameterConstraints(pooling_factors=[ids])
    module = nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    optimizer = args.optimizer or ("adam" if args.kernel != "fused" else "rowwise_adagrad")
    sharders = build_sharders(PlannerConfig(kernel=args.kernel), OptimConfig(embedding=optimizer))
    job = Job(args.batch or 4096, kernel=args.kernel, dram_bytes_per_host=args.dram, zipf_exponent=args.zipf)
    planner = PlannerConfig(topology=args.topology, calibration=args.calibration)
    return _Subject(module, sharders, constraints, Usage(), job, tuple(args.ssd_path or ()), planner)


def parse_table(text: str, first: int) -> list[tuple[EmbeddingBagConfig, float]]:
    """Reads `rows=1e8,dim=64[,ids=2.5][,count=26][,name=user]`; returns tables with the ids of one row of data.

    Raises:
        ConfigError: a key is unknown or missing, or a number is none.
    """
    values = dict(part.partition("=")[::2] for part in text.split(","))
    if set(values) - {"rows", "dim", "ids", "count", "name"} or not {"rows", "dim"} <= set(values):
        raise ConfigError(f"--table {text}: expected rows=N,dim=N and perhaps ids=N, count=N, name=TEXT")
    try:
        rows, dim, ids, count = (float(values.get(key, "1")) for key in ("rows", "dim", "ids", "count"))
    except ValueError as error:
        raise ConfigError(f"--table {text}: {error}") from error
    whole = all(number.is_integer() and number >= 1 for number in (rows, dim, count))
    if not whole or not 0 < ids < math.inf or rows > MAX_ROWS or count > _MAX_TABLES or dim % 4:
        raise ConfigError(
            f"--table {text}: expected whole rows (at most 2^48), dim (a multiple of 4) and count of at least 1, and finite ids above 0"
        )
    if not values.get("name", "t") or "." in values.get("name", ""):
        raise ConfigError(f"--table {text}: a table's name becomes that of a parameter: expected some text without '.'")
    names = [
        values.get("name", f"t{first + index}") + (f"_{index}" if "name" in values and count > 1 else "") for index in range(int(count))
    ]
    return [
        (EmbeddingBagConfig(name=name, feature_names=[f"{name}_ids"], num_embeddings=int(rows), embedding_dim=int(dim)), ids)
        for name in names
    ]


def _numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,4,16, got {text!r}") from None
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers not below 0, got {text!r}")
    return values


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _exponent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number not below 0, got {text!r}")
    return value


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_kstep.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run, as for train")
    parser.add_argument("--topology", default="", metavar="NAME|FILE", help="the machines; default: this one")
    parser.add_argument("--calibration", default="", metavar="FILE", help="fitted coefficients; default: those beside the topology's file")
    parser.add_argument("--hosts", type=_numbers, metavar="N[,N...]", help="as many hosts like the topology's; several: compare")
    parser.add_argument("--ranks-per-host", type=_positive, metavar="N", help="default: one per device, or one")
    parser.add_argument("--k", type=_numbers, metavar="K[,K...]", help="each host a replica, merged every K steps; 0: all share one model")
    parser.add_argument("--batch", type=_positive, metavar="N", help="rows of data per rank")
    parser.add_argument("--table", action="append", metavar="rows=N,dim=N[,ids=N][,count=N][,name=TEXT]", help="tables instead of a run's")
    parser.add_argument("--kernel", choices=("tiered", "fused", "dense"), default="tiered", help="with --table")
    parser.add_argument("--optimizer", metavar="NAME", help="with --table, as optim.embedding; default adam, fused: rowwise_adagrad")
    parser.add_argument("--dram", type=_size, metavar="SIZE", help="with --table: DRAM for rows per host; default: what it has")
    parser.add_argument("--ssd-path", action="append", metavar="FOLDER", help="with --table on this machine: one per drive")
    parser.add_argument(
        "--zipf", type=_exponent, default=DEFAULT_ZIPF_EXPONENT, metavar="S", help="of tables without a trace; default 1.05"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan")
    return parser


if __name__ == "__main__":
    sys.exit(main())
