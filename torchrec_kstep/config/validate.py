"""Checks the values of a configuration: each by itself, and against each other. Opens nothing.

`CHOICES` and `BOUNDS` name a rule for every key that needs one; rules over several keys are functions below.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchrec_kstep.config.core_list import parse_cores
from torchrec_kstep.config.findings import Finding, Findings
from torchrec_kstep.config.keys import Key, schema_keys
from torchrec_kstep.config.schema import DataConfig, RunConfig, TiersConfig
from torchrec_kstep.config.suggest import did_you_mean
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.tier_config import MAX_PATHS, MAX_PREFETCH_DEPTH, MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES, MIN_SEGMENTS
from torchrec_kstep.units import format_bytes, parse_bytes

_SHARDINGS = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise")
COLUMN_MULTIPLE = 4  # FBGEMM's kernels read rows in groups of four floats

CHOICES: Mapping[str, tuple[str, ...]] = {
    "data.name": ("movielens_100k", "movielens_1m", "frappe", "criteo", "avazu", "synthetic"),
    "data.encoding": ("vocabulary", "hash"),
    "model.name": ("dlrm", "deepfm", "wide_deep", "dcn", "dcnv2"),
    "model.pooling": ("sum", "mean"),
    "planner.sharding": ("auto", *_SHARDINGS),
    "planner.kernel": ("dense", "fused", "tiered"),
    "planner.tables": _SHARDINGS,
    "planner.engine": ("topology", "torchrec"),
    "tiers.name": ("dram", "dram_ssd"),
    "tiers.dram_layout": ("auto", "direct", "packed"),
    "routes.name": ("auto", "off"),
    "routes.cores": ("node", "own", "any"),
    "optim.dense": ("adam", "sgd", "adagrad"),
    "optim.embedding": ("adam", "sgd", "adagrad", "rowwise_adagrad"),
    "optim.l2_absent_rows": ("skip", "replay"),
    "optim.clip_covers": ("dense", "all"),
    "optim.schedule": ("constant", "linear", "cosine"),
    "optim.warmup_covers": ("all", "dense"),
    "optim.clip": ("none", "cowclip"),
    "optim.scaling": ("none", "linear", "sqrt", "sqrt_l2_kept", "cowclip"),
    "kstep.recipe": ("default", "paper"),
    "kstep.row_merge": ("recipe", "union", "mean", "touched"),
    "kstep.moments": ("recipe", "renew", "delta"),
    "kstep.bias_correction": ("recipe", "row", "global"),
    "kstep.row_states": ("all", "weights", "auto"),
    "kstep.wire": ("fp32", "bf16", "int8"),
    "kstep.variant": ("local", "frozen"),
    "train.pipeline": ("sparse_dist", "base", "plain"),
    "train.device": ("cpu", "cuda"),
    "checkpoint.tables": ("store", "full"),
    "checkpoint.verify": ("full", "quick"),
    "metrics.progress": ("auto", "bar", "lines", "none"),
    "distributed.backend": ("gloo", "nccl"),
}


@dataclass(frozen=True)
class Bounds:
    """A range of numbers; an end that is not included is strict."""

    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True

    def holds(self, value: float) -> bool:
        """Whether `value` is a finite number in the range."""
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """Says the range in words."""
        words = f"at least {self.low}" if self.includes_low else f"above {self.low}"
        if math.isinf(self.high):
            return words
        return f"{words} and {'at most' if self.includes_high else 'below'} {self.high}"


ANY_COUNT = Bounds(0)
AT_LEAST_ONE = Bounds(1)
ROWS_PER_BATCH = Bounds(1, 2**24)  # the ids of a batch are counted in 32 bits, and there may be a hundred for each row
COLUMNS = Bounds(1, 2048)  # the widest row that the kernels of tiered tables take
POSITIVE = Bounds(0, includes_low=False)
NOT_NEGATIVE = Bounds(0)
FRACTION = Bounds(0, 1, includes_high=False)
SEED = Bounds(0, 2**63 - 1)  # what torch.manual_seed takes without wrapping around

BOUNDS: Mapping[str, Bounds] = {
    "data.limit": ANY_COUNT,
    "data.shuffle_row_groups": AT_LEAST_ONE,
    "data.prefetch_batches": ANY_COUNT,
    "data.num_hash_rows": Bounds(4),  # three reserved ids, and one for values
    "data.min_count": AT_LEAST_ONE,
    "data.max_bad_lines": ANY_COUNT,
    "data.rows_per_row_group": AT_LEAST_ONE,
    "data.validation_fraction": FRACTION,
    "data.test_fraction": FRACTION,
    "data.split_seed": Bounds(0, 2**32 - 1),  # what numpy's RandomState takes, which splits MovieLens
    "data.synthetic.num_train_rows": AT_LEAST_ONE,
    "data.synthetic.num_eval_rows": AT_LEAST_ONE,
    "data.synthetic.num_dense": ANY_COUNT,
    "data.synthetic.num_rows_per_table": AT_LEAST_ONE,
    "data.synthetic.max_ids_per_bag": AT_LEAST_ONE,
    "data.synthetic.zipf_exponent": NOT_NEGATIVE,
    "data.synthetic.seed": SEED,
    "model.embedding_dim": COLUMNS,
    "model.mlp": AT_LEAST_ONE,
    "model.bottom_mlp": AT_LEAST_ONE,
    "model.dropout": FRACTION,
    "model.num_cross_layers": AT_LEAST_ONE,
    "model.cross_rank": ANY_COUNT,
    "model.embedding_init_std": NOT_NEGATIVE,
    "planner.trace_rows": ANY_COUNT,
    "tiers.prefetch_depth": Bounds(0, MAX_PREFETCH_DEPTH),
    "tiers.lookahead": Bounds(0, MAX_PREFETCH_DEPTH),
    "routes.drive_shares": NOT_NEGATIVE,
    "optim.lr": POSITIVE,
    "optim.embedding_lr": POSITIVE,
    "optim.beta1": FRACTION,
    "optim.beta2": FRACTION,
    "optim.eps": POSITIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.embedding_l2": NOT_NEGATIVE,
    "optim.l2_replay_max_steps": Bounds(0, 2**31 - 1),
    "optim.clip_norm": NOT_NEGATIVE,
    "optim.warmup_steps": ANY_COUNT,
    "optim.clip_ratio": POSITIVE,
    "optim.clip_zeta": NOT_NEGATIVE,
    "optim.base_batch_size": ANY_COUNT,
    "kstep.k": ANY_COUNT,
    "kstep.ranks_per_replica": ANY_COUNT,
    "kstep.num_warmup_steps": ANY_COUNT,
    "kstep.lr_factor": NOT_NEGATIVE,
    "kstep.m_period_rounds": AT_LEAST_ONE,
    "kstep.v_period_rounds": AT_LEAST_ONE,
    "kstep.overlap_steps": ANY_COUNT,
    "kstep.timeout_s": POSITIVE,
    "train.batch_size": ROWS_PER_BATCH,
    "train.accumulation": AT_LEAST_ONE,
    "train.eval_batch_size": ROWS_PER_BATCH,
    "train.epochs": AT_LEAST_ONE,
    "train.max_steps": ANY_COUNT,
    "train.seed": SEED,
    "train.eval_every_epochs": AT_LEAST_ONE,
    "train.early_stop_patience": ANY_COUNT,
    "train.log_every_steps": AT_LEAST_ONE,
    "train.num_threads": AT_LEAST_ONE,
    "checkpoint.every_steps": ANY_COUNT,
    "checkpoint.keep": AT_LEAST_ONE,
    "distributed.timeout_s": POSITIVE,
    "distributed.start_timeout_s": POSITIVE,
    "distributed.prepare_timeout_s": POSITIVE,
}


def check(config: object) -> None:
    """Checks a configuration dataclass.

    Raises:
        ConfigError: lists everything that is wrong with it.
    """
    found = Findings()
    found.add_unrelated(findings(config))
    found.raise_if_any()


def findings(config: object) -> list[Finding]:
    """Returns everything that is wrong with the values of a configuration dataclass.

    Where a value is wrong by itself, rules over several keys that read it are left out.
    """
    found = Findings()
    schema_cls: type = type(config)
    for path, key in schema_keys(schema_cls).leaves.items():
        for text in _value_faults(key, _value(config, path)):
            found.add(f"{path}: {text}" + (f" ({key.comment})" if key.comment else ""), path)
    if isinstance(config, RunConfig):
        found.add_unrelated(_run_rules(config))
    data = getattr(config, "data", None)
    if isinstance(data, DataConfig):
        found.add_unrelated(_data_rules(data))
    return found.items


def _value(config: object, path: str) -> object:
    value = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _value_faults(key: Key, value: object) -> Iterator[str]:
    """Checks one value, or each item of a list or mapping, by the rule of its key; lists of names may not repeat one."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    choices, bounds = CHOICES.get(key.path), BOUNDS.get(key.path)
    for item in items:
        if choices is not None and item not in choices:
            yield f"{item!r} is no choice; {did_you_mean(str(item), choices)}"
        if bounds is not None and isinstance(item, int | float) and not bounds.holds(item):
            yield f"expected {'' if math.isfinite(item) else 'a finite number '}{bounds}, got {item}"
        elif bounds is None and isinstance(item, float) and not math.isfinite(item):
            yield f"expected a finite number, got {item}"
    names = [item for item in items if isinstance(item, str)] if isinstance(value, list) else []
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"{name!r} stands {names.count(name)} times; names must differ"


def _data_rules(data: DataConfig) -> Iterator[Finding]:
    if data.validation_fraction + data.test_fraction >= 1:
        yield Finding(
            f"data.validation_fraction={data.validation_fraction} and data.test_fraction={data.test_fraction} leave no rows to train on: "
            "their sum must be below 1",
            ("data.validation_fraction", "data.test_fraction"),
        )
    if data.name == "synthetic" and not data.synthetic.num_rows_per_table:
        yield Finding(
            "data.synthetic.num_rows_per_table is empty: a model needs at least one table", ("data.synthetic.num_rows_per_table",)
        )


def _run_rules(config: RunConfig) -> Iterator[Finding]:
    yield from _model_rules(config)
    yield from _fused_rules(config)
    yield from _tier_rules(config)
    yield from _route_rules(config)
    yield from _planner_rules(config)
    yield from _kstep_rules(config)
    yield from _large_batch_rules(config)
    planner, optim, train = config.planner, config.optim, config.train
    if planner.kernel == "dense" and optim.embedding == "rowwise_adagrad":
        yield Finding(
            "optim.embedding=rowwise_adagrad with planner.kernel=dense: torch.optim has no row-wise Adagrad; "
            "choose planner.kernel=fused or optim.embedding=adagrad",
            ("optim.embedding", "planner.kernel"),
        )
    if train.max_steps and optim.warmup_steps > train.max_steps:
        yield Finding(
            f"optim.warmup_steps={optim.warmup_steps} is more than train.max_steps={train.max_steps}: the warm-up would never end",
            ("optim.warmup_steps", "train.max_steps"),
        )
    if config.distributed.backend == "nccl" and train.device == "cpu":
        yield Finding(
            "distributed.backend=nccl with train.device=cpu: NCCL moves CUDA tensors only; choose distributed.backend=gloo",
            ("distributed.backend", "train.device"),
        )


def _large_batch_rules(config: RunConfig) -> Iterator[Finding]:
    """Says what CowClip and the scaling rules need."""
    planner, optim = config.planner, config.optim
    if optim.scaling != "none" and not optim.base_batch_size:
        yield Finding(
            f"optim.scaling={optim.scaling} without optim.base_batch_size: name the rows per step for which the rates were tuned",
            ("optim.scaling", "optim.base_batch_size"),
        )
    if optim.clip == "none":
        return
    if planner.kernel != "tiered":
        why = {
            "fused": "FBGEMM's COWCLIP is another rule (row-wise Adagrad, a running counter), and it has no CPU kernel",
            "dense": "dense tables step every row with torch.optim, which has no row-wise clip",
        }[planner.kernel]
        yield Finding(
            f"optim.clip=cowclip with planner.kernel={planner.kernel}: {why}; choose planner=tiered", ("optim.clip", "planner.kernel")
        )


def _model_rules(config: RunConfig) -> Iterator[Finding]:
    model = config.model
    if model.embedding_dim % COLUMN_MULTIPLE and config.planner.kernel != "tiered":
        yield Finding(
            f"model.embedding_dim={model.embedding_dim}: FBGEMM's kernels need a multiple of {COLUMN_MULTIPLE} columns; "
            f"choose {model.embedding_dim + -model.embedding_dim % COLUMN_MULTIPLE}",
            ("model.embedding_dim",),
        )


def _fused_rules(config: RunConfig) -> Iterator[Finding]:
    """Says what FBGEMM, which updates rows inside the backward pass, cannot do."""
    planner, optim, train = config.planner, config.optim, config.train
    if planner.kernel != "fused":
        return
    if optim.embedding == "adam":
        yield Finding(
            "planner.kernel=fused with optim.embedding=adam: FBGEMM has no Adam on CPU; "
            "choose optim.embedding=adagrad, rowwise_adagrad or sgd, or planner.kernel=dense",
            ("planner.kernel", "optim.embedding"),
        )
    if train.accumulation > 1:
        yield Finding(
            f"planner.kernel=fused with train.accumulation={train.accumulation}: fused tables step inside every backward, so each "
            "micro-batch would be a step of its own; choose planner.kernel=dense or train.accumulation=1",
            ("planner.kernel", "train.accumulation"),
        )
    if optim.embedding_l2 > 0:
        yield Finding(
            f"planner.kernel=fused with optim.embedding_l2={optim.embedding_l2}: the fused update sees touched rows only and would not "
            "reach the others; choose planner.kernel=dense or optim.embedding_l2=0",
            ("planner.kernel", "optim.embedding_l2"),
        )
    if optim.clip_norm > 0 and optim.clip_covers == "all":
        yield Finding(
            f"planner.kernel=fused with optim.clip_norm={optim.clip_norm} and optim.clip_covers=all: fused tables step inside backward, "
            "before the norm of the gradient is known; choose planner.kernel=dense or tiered, or optim.clip_covers=dense",
            ("planner.kernel", "optim.clip_norm", "optim.clip_covers"),
        )
    replicated = [name for name, sharding in planner.tables.items() if sharding == "data_parallel"]
    if planner.sharding == "data_parallel" or replicated:
        which = "planner.sharding=data_parallel" if planner.sharding == "data_parallel" else f"planner.tables.{replicated[0]}=data_parallel"
        yield Finding(
            f"planner.kernel=fused with {which}: a replicated table's gradients are averaged over ranks before the update, which only "
            "planner.kernel=dense does; choose it, or another sharding",
            ("planner.kernel", "planner.sharding", "planner.tables"),
        )


def _kstep_rules(config: RunConfig) -> Iterator[Finding]:
    """Says what replicas cannot be merged of."""
    kstep, planner, optim = config.kstep, config.planner, config.optim
    if not kstep.k:
        return
    if planner.kernel == "fused":
        yield Finding(
            f"kstep.k={kstep.k} with planner.kernel=fused: replicas are merged by the rules of Adam, and FBGEMM has no fused Adam on the "
            "CPU; choose planner=tiered, or planner=dense, whose tables then update the rows of a batch only",
            ("kstep.k", "planner.kernel"),
        )
    shardings = {"planner.sharding": planner.sharding, **planner.tables}
    replicated = [name for name, sharding in shardings.items() if sharding == "data_parallel"]
    if planner.kernel == "dense" and replicated:
        yield Finding(
            f"kstep.k={kstep.k} with data_parallel ({', '.join(replicated)}): TorchRec averages the gradients of replicated tables over "
            "all ranks of the job in every step, not over those of a replica; choose another sharding",
            ("kstep.k", "planner.sharding", "planner.tables"),
        )
    for key, value in (("optim.dense", optim.dense), ("optim.embedding", optim.embedding)):
        if value != "adam":
            yield Finding(f"kstep.k={kstep.k} with {key}={value}: replicas are merged by the rules of Adam; choose adam", ("kstep.k", key))
    if optim.l2_absent_rows == "replay" and optim.embedding_l2:
        yield Finding(
            f"kstep.k={kstep.k} with optim.l2_absent_rows=replay: replicas would have replayed different steps of a row, and rounds weigh "
            "its moves by touches alone; choose optim.l2_absent_rows=skip",
            ("kstep.k", "optim.l2_absent_rows"),
        )
    if kstep.overlap_steps >= kstep.k:
        yield Finding(
            f"kstep.overlap_steps={kstep.overlap_steps} with kstep.k={kstep.k}: a round must end before the next begins; choose at most "
            f"{kstep.k - 1}",
            ("kstep.overlap_steps", "kstep.k"),
        )
    if kstep.is_amsgrad and kstep.variant == "local":
        yield Finding(
            "kstep.is_amsgrad with kstep.variant=local, which shares no second moment that could fall; choose kstep.variant=frozen",
            ("kstep.is_amsgrad", "kstep.variant"),
        )
    if kstep.variant == "frozen" and kstep.row_states == "weights":
        yield Finding(
            "kstep.variant=frozen with kstep.row_states=weights: no round merges second moments of rows, so none would be frozen; choose "
            "kstep.row_states=all",
            ("kstep.variant", "kstep.row_states"),
        )
    if kstep.variant == "frozen" and kstep.overlap_steps:
        yield Finding(
            f"kstep.variant=frozen with kstep.overlap_steps={kstep.overlap_steps}: replicas are not equal when a late round ends, so no "
            "second moment is common; choose kstep.overlap_steps=0",
            ("kstep.variant", "kstep.overlap_steps"),
        )
    for stage in kstep.stages:
        if not re.fullmatch(r"[0-9]+:[1-9][0-9]*", stage):
            yield Finding(f"kstep.stages: {stage!r} is no '<from step>:<k>', e.g. '5000:50'", ("kstep.stages",))


def _planner_rules(config: RunConfig) -> Iterator[Finding]:
    """Says which keys TorchRec's own planner does not read."""
    if config.planner.engine == "topology":
        return
    for name in ("topology", "calibration", "plan_cache"):
        if getattr(config.planner, name):
            yield Finding(
                f"planner.{name} with planner.engine={config.planner.engine}: TorchRec's planner does not read it; "
                "choose planner.engine=topology",
                (f"planner.{name}", "planner.engine"),
            )


def _route_rules(config: RunConfig) -> Iterator[Finding]:
    """Says which routes cannot be meant."""
    routes, tiers = config.routes, config.tiers
    for name in ("cpus", "interfaces", "drive_shares"):
        if routes.name == "off" and getattr(routes, name):
            yield Finding(f"routes.{name} with routes.name=off: it is not read; choose routes=auto", (f"routes.{name}", "routes.name"))
    for text in routes.cpus:
        try:
            parse_cores(text)
        except ConfigError as error:
            yield Finding(f"routes.cpus: {error}", ("routes.cpus",))
    if any(not name.strip() for name in routes.interfaces):
        yield Finding("routes.interfaces: a name is empty; leave the list empty for the interfaces of the topology", ("routes.interfaces",))
    num_paths = max(1, len(tiers.ssd_paths))
    for key, values in (("routes.drive_shares", routes.drive_shares), ("tiers.ssd_limits", tiers.ssd_limits)):
        if values and (tiers.name != "dram_ssd" or len(values) != num_paths):
            found = f"{num_paths} tiers.ssd_paths" if tiers.name == "dram_ssd" else f"tiers.name={tiers.name}"
            yield Finding(
                f"{key} has {len(values)} entries with {found}: expected one for each of tiers.ssd_paths", (key, "tiers.ssd_paths")
            )
    if routes.drive_shares and not sum(routes.drive_shares) > 0:
        yield Finding("routes.drive_shares are all 0: give the drive that rows are to lie on a share above 0", ("routes.drive_shares",))


def _size_rules(tiers: TiersConfig) -> Iterator[Finding]:
    """Says which sizes of tiers cannot be, before a store is opened with them."""
    if tiers.lookahead < tiers.prefetch_depth:
        yield Finding(
            f"tiers.lookahead={tiers.lookahead} is less than tiers.prefetch_depth={tiers.prefetch_depth}",
            ("tiers.lookahead", "tiers.prefetch_depth"),
        )
    if len(tiers.ssd_paths) > MAX_PATHS:
        yield Finding(f"tiers.ssd_paths: {len(tiers.ssd_paths)} folders, expected at most {MAX_PATHS}", ("tiers.ssd_paths",))
    sizes: dict[str, int] = {}
    for name in ("dram_bytes", "segment_bytes", "ssd_bytes"):
        text = getattr(tiers, name)
        try:
            sizes |= {name: parse_bytes(text)} if text or name != "ssd_bytes" else {}
        except ConfigError as error:
            hint = "; write 0B for a cache of nothing" if text == "0" and name == "dram_bytes" else ""
            yield Finding(f"tiers.{name}: {error}{hint}", (f"tiers.{name}",))
    segment_bytes = sizes.get("segment_bytes")
    if segment_bytes is None:
        return
    if not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
        yield Finding(
            f"tiers.segment_bytes={tiers.segment_bytes}: expected {format_bytes(MIN_SEGMENT_BYTES)} to {format_bytes(MAX_SEGMENT_BYTES)}",
            ("tiers.segment_bytes",),
        )
    elif "ssd_bytes" in sizes and sizes["ssd_bytes"] < MIN_SEGMENTS * segment_bytes:
        yield Finding(
            f"tiers.ssd_bytes={tiers.ssd_bytes} with tiers.segment_bytes={tiers.segment_bytes}: a row store needs at least {MIN_SEGMENTS} "
            f"segments, {format_bytes(MIN_SEGMENTS * segment_bytes)}; raise the one or lower the other",
            ("tiers.ssd_bytes", "tiers.segment_bytes"),
        )


def _tier_rules(config: RunConfig) -> Iterator[Finding]:
    """Says what tiered tables cannot do, and when tiers are set up for nothing."""
    planner, tiers, optim, train = config.planner, config.tiers, config.optim, config.train
    if tiers.name == "dram_ssd":
        if planner.kernel != "tiered":
            yield Finding(
                f"tiers.name=dram_ssd with planner.kernel={planner.kernel}: only tiered tables use tiers; choose planner=tiered",
                ("tiers.name", "planner.kernel"),
            )
        yield from _size_rules(config.tiers)
    if planner.kernel != "tiered":
        return
    if optim.embedding == "adagrad" and not config.kstep.k:  # which takes adam only, and says so
        yield Finding(
            "planner.kernel=tiered with optim.embedding=adagrad: tiered tables have row-wise Adagrad only; "
            "choose optim.embedding=adam, sgd or rowwise_adagrad, or planner=dense",
            ("planner.kernel", "optim.embedding"),
        )
    if train.device != "cpu":
        yield Finding(
            f"planner.kernel=tiered with train.device={train.device}: rows are looked up on the CPU; choose train.device=cpu or "
            "planner=dense",
            ("planner.kernel", "train.device"),
        )
    replicated = [name for name, sharding in planner.tables.items() if sharding == "data_parallel"]
    if planner.sharding == "data_parallel" or replicated:
        which = "planner.sharding=data_parallel" if planner.sharding == "data_parallel" else f"planner.tables.{replicated[0]}=data_parallel"
        yield Finding(
            f"planner.kernel=tiered with {which}: rows in tiers have one owner; choose another sharding, or planner=dense",
            ("planner.kernel", "planner.sharding", "planner.tables"),
        )
    columns = [name for name, sharding in planner.tables.items() if sharding == "column_wise"]
    if optim.embedding == "rowwise_adagrad" and (planner.sharding == "column_wise" or columns):
        yield Finding(
            "optim.embedding=rowwise_adagrad with column_wise tiered tables: its accumulator is the mean over all columns of a row; "
            "choose another sharding or optimizer",
            ("planner.kernel", "planner.sharding", "planner.tables", "optim.embedding"),
        )
