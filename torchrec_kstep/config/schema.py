"""The schema of every configuration key: one frozen dataclass per group of `conf/`.

A key's comment gives its meaning and unit. A group is added together with the feature that reads it. Values are checked
against each other in `config.validate`; nothing here opens a file.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SyntheticConfig:
    """A seeded Criteo-shaped stream: Zipf ids, multi-hot bags, labels from a planted teacher."""

    num_train_rows: int = 1_000_000  # rows in the training split
    num_eval_rows: int = 50_000  # rows in the validation and in the test split, each
    num_dense: int = 13  # dense columns
    num_rows_per_table: list[int] = field(default_factory=lambda: [100_000] * 26)  # rows of each table, one entry a feature
    max_ids_per_bag: int = 1  # bag sizes are uniform in 1..this many ids
    zipf_exponent: float = 1.05  # p(i) ~ i^-s over each table's rows
    seed: int = 1  # seed of the stream and of its teacher, apart from the run's seed


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and how raw logs become files."""

    name: str = "movielens_100k"  # movielens_100k | movielens_1m | frappe | criteo | avazu | synthetic
    source: str = ""  # raw files: a file, folder or glob; "" = the copy inside the recbole package (movielens_100k only)
    path: str = ""  # folder of the prepared set; "" = prepared/<name>
    limit: int = 0  # rows of the training split used; 0 = all
    shuffle: bool = True  # shuffle training rows each epoch, by seed
    shuffle_row_groups: int = 16  # row groups mixed at a time: more mixes better and holds more rows in memory
    prefetch_batches: int = 2  # batches decoded ahead by a background thread; 0 = none
    # --- used by `prepare` only ---
    encoding: str = "vocabulary"  # vocabulary | hash: how raw categorical values become row ids
    num_hash_rows: int = 100_000  # rows of each table under encoding=hash, reserved ids included
    min_count: int = 1  # values seen fewer times in the training split share the id "unseen"
    max_bad_lines: int = 0  # malformed lines skipped and counted before preparation fails
    rows_per_row_group: int = 65_536  # rows in a Parquet row group, the unit of shuffling and of splitting over ranks
    validation_fraction: float = 0.1  # share of rows held out for validation, where the source has no split of its own
    test_fraction: float = 0.1  # share of rows held out for the test
    split_seed: int = 2026  # seed of that random split
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass(frozen=True)
class ModelConfig:
    """Which CTR model, and its sizes."""

    name: str = "deepfm"  # dlrm | deepfm | wide_deep | dcn | dcnv2
    embedding_dim: int = 16  # columns of every embedding table
    mlp: list[int] = field(default_factory=lambda: [256, 128])  # widths of the deep (over) network
    bottom_mlp: list[int] = field(default_factory=lambda: [64])  # widths of DLRM's dense network before the last, embedding_dim
    dropout: float = 0.0  # probability of dropping a unit of the deep network
    num_cross_layers: int = 3  # cross layers of DCN and DCNv2
    cross_rank: int = 0  # rank of DCNv2's cross matrices; 0 = full
    pooling: str = "sum"  # sum | mean: how a bag of several ids is pooled
    embedding_init_std: float = 0.01  # standard deviation of the normal initial rows


@dataclass(frozen=True)
class PlannerConfig:
    """How tables are sharded."""

    sharding: str = "auto"  # auto | data_parallel | table_wise | row_wise | column_wise | table_row_wise
    kernel: str = "tiered"  # dense: gradients and torch.optim; fused: FBGEMM updates rows inside backward; tiered: our row store does
    tables: dict[str, str] = field(default_factory=dict)  # sharding of single tables by name, e.g. {user_id: row_wise}
    engine: str = "topology"  # topology: places tables by what a step takes on the machines; torchrec: TorchRec's own planner
    topology: str = ""  # the machines: a file, or a name in conf/topology; "" = hosts like this one, without measuring (engine=topology)
    calibration: str = ""  # file written by `calibrate`; "" = the one beside the topology's file, if there is one (engine=topology)
    trace_rows: int = 50_000  # rows of data read to see how often which ids occur; 0 = a Zipf law (engine=topology)
    renew: bool = False  # plan anew when a run is continued, instead of keeping the plan it began with (run_dir/plan.json)
    plan_cache: str = ""  # folder of plans, to be found again for the same task on the same machines; "" = none (engine=topology)


@dataclass(frozen=True)
class TiersConfig:
    """Where the rows of tiered tables live (planner.kernel=tiered). Sizes are per host, over all its ranks."""

    name: str = "dram"  # dram: all rows in DRAM; dram_ssd: a cache in DRAM over SSD
    dram_layout: str = "auto"  # auto | direct | packed: memory for all rows at once, or for touched ones through an index (dram)
    dram_bytes: str = "1GiB"  # cache of rows, e.g. 8GiB (dram_ssd)
    ssd_paths: list[str] = field(default_factory=list)  # folders, one per drive, for this run alone; [] = run_dir/rows/host<n> (dram_ssd)
    ssd_bytes: str = ""  # quota over all paths, e.g. 1TiB; "" = what the drives hold (dram_ssd)
    ssd_limits: list[str] = field(default_factory=list)  # most that a row store asks of each path, "50MB/s" or "" = no bound (dram_ssd)
    segment_bytes: str = "64MiB"  # size of the files in which rows are written (dram_ssd)
    prefetch_depth: int = 2  # batches whose rows are brought up ahead (dram_ssd)
    lookahead: int = 8  # batches known ahead when choosing what to evict, at least prefetch_depth (dram_ssd)


@dataclass(frozen=True)
class RoutesConfig:
    """Which cores, drives and network interfaces each rank uses; chosen from the machines of planner.topology, carried out at the start."""

    name: str = "auto"  # auto: chosen from the machines; off: cores, drives and interfaces stay as the launcher left them
    cores: str = "node"  # node | own | any: ranks keep to the cores of their NUMA node, to an equal part of these, or to none
    cpus: list[str] = field(default_factory=list)  # cores by number and local rank, e.g. ["0-3","4-7"]; one entry for all; [] = by cores
    interfaces: list[str] = field(default_factory=list)  # to other hosts by local rank, one entry for all; [] = those of the topology
    drive_shares: list[float] = field(default_factory=list)  # part of the rows on each ssd_path, over their sum; [] = by the drives' speed


@dataclass(frozen=True)
class OptimConfig:
    """Optimizers of the dense parameters and of the tables."""

    dense: str = "adam"  # adam | sgd | adagrad: optimizer of the dense parameters
    embedding: str = "adam"  # adam | sgd | adagrad | rowwise_adagrad: of tables (dense: not the last, fused: not adam, tiered: not adagrad)
    lr: float = 1e-3  # learning rate of the dense parameters
    embedding_lr: float = 1e-3  # learning rate of the tables
    beta1: float = 0.9  # decay of Adam's first moment, per step
    beta2: float = 0.999  # decay of Adam's second moment, per step
    eps: float = 1e-8  # added to Adam's and Adagrad's root
    weight_decay: float = 0.0  # L2 added to the gradient of dense parameters
    embedding_l2: float = 0.0  # L2 added to gradients of rows (dense: all; tiered: see l2_absent_rows; kstep: of the batch; not fused)
    l2_absent_rows: str = "skip"  # skip | replay: rows absent from a batch stand still, or decay too, exactly, when next used (tiered)
    l2_replay_max_steps: int = 0  # a row stands still after so many steps of absence, which bounds the work (replay); 0 = never
    clip_norm: float = 0.0  # bound on the norm of the gradient, scaled down where it is larger; 0 = none
    clip_covers: str = "dense"  # dense | all: what clip_norm counts and scales: dense parameters, or tables too (not kernel=fused)
    schedule: str = "constant"  # constant | linear | cosine: decay after the warm-up, to zero when the last step is done
    warmup_steps: int = 0  # steps of linear warm-up; step i of n takes i/n of the rate
    warmup_covers: str = "all"  # all | dense: whether the tables' rate is warmed up too
    clip: str = "none"  # none | cowclip: clip each row's summed gradient by its count and norm (tiered tables only)
    clip_ratio: float = 1.0  # CowClip's r; a factor of a row's norm
    clip_zeta: float = 1e-5  # CowClip's zeta: a row counts as at least this large, times the root of its columns
    clip_exempt: list[str] = field(default_factory=lambda: ["wide_*"])  # names of tables that are not clipped, * and ? allowed
    scaling: str = "none"  # none | linear | sqrt | sqrt_l2_kept | cowclip: how rates follow the batch from base_batch_size
    base_batch_size: int = 0  # rows per step for which the rates above were tuned; needed by scaling


@dataclass(frozen=True)
class KStepConfig:
    """Replicas that train alone for k steps and are merged then (planner.kernel=tiered or dense, Adam)."""

    k: int = 0  # steps from one merge round to the next; 1 = replicas average gradients in every step; 0 = no replicas, all ranks share one
    ranks_per_replica: int = 0  # ranks that share a replica; 0 = those of a host; any divisor or multiple of these
    num_warmup_steps: int = 0  # steps at the start with k=1
    stages: list[str] = field(default_factory=list)  # later values of k, each "<from step>:<k>", e.g. ["5000:50"]
    recipe: str = "default"  # default | paper: row_merge, moments, bias_correction and lr_factor that belong together
    row_merge: str = "recipe"  # recipe | union | mean | touched: weight of the replicas' changes of a row
    moments: str = "recipe"  # recipe | renew | delta: how moments of rows are merged
    bias_correction: str = "recipe"  # recipe | row | global: the step that corrects the bias of the tables' Adam: a row's own, or the job's
    lr_factor: float = 0.0  # factor on all rates in local steps; 0 = the recipe's
    row_states: str = "all"  # all | weights | auto: moments of rows sent always, never, or for tables of which much is touched in a round
    m_period_rounds: int = 1  # rounds, of k steps each, from one merge of first moments to the next
    v_period_rounds: int = 1  # rounds, of k steps each, from one merge of second moments to the next
    wire: str = "fp32"  # fp32 | bf16 | int8: how values travel between replicas; narrow ones are rounded at random, right on average
    overlap_steps: int = 0  # steps that training goes on while a round travels, whose result is applied that late; 0 = it waits
    variant: str = "local"  # local | frozen: divide by the replica's own second moment, or by the larger of it and that of the last round
    is_amsgrad: bool = False  # variant=frozen: the shared second moment never falls
    bucket_bytes: str = "64MiB"  # memory of a round's buffers, however many rows were touched
    timeout_s: float = 120.0  # seconds that ranks wait for one another in a round before the job fails


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    batch_size: int = 256  # rows per rank and micro-batch
    accumulation: int = 1  # micro-batches per optimizer step
    eval_batch_size: int = 4096  # rows per rank in evaluation
    epochs: int = 10  # passes over the training split
    max_steps: int = 0  # optimizer steps at most; 0 = no bound
    seed: int = 1  # seed of initial weights, order of rows and dropout
    eval_every_epochs: int = 1  # evaluate on validation after this many epochs
    early_stop_patience: int = 2  # evaluations without a better validation AUC before stopping; 0 = never stop early
    log_every_steps: int = 50  # steps between log lines
    pipeline: str = "sparse_dist"  # sparse_dist | base | plain: TorchRec's train pipelines, or none
    device: str = "cpu"  # cpu | cuda
    num_threads: int = 1  # CPU threads of a rank for computing, as torchrun sets it; small batches gain nothing from more


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every_steps: int = 0  # optimizer steps between checkpoints; 0 = at the end of each epoch only
    keep: int = 2  # newest checkpoints kept
    tables: str = "store"  # store | full: tables on SSD by snapshots of their row stores, at the cost of what changed, or copied whole
    verify: str = "full"  # full | quick: what is read of snapshots of row stores before resuming: all bytes, or manifests and ends of files
    resume: bool = True  # continue from the newest good checkpoint in the run directory, if there is one


@dataclass(frozen=True)
class MetricsConfig:
    """Where numbers go."""

    tensorboard: bool = True  # write TensorBoard events into the run directory
    report: bool = True  # write report.html into the run directory at the end
    progress: str = "auto"  # auto | bar | lines | none: a bar on a terminal, lines elsewhere


@dataclass(frozen=True)
class DistributedConfig:
    """Ranks and their deadlines."""

    timeout_s: float = 120.0  # seconds that any collective may wait before the job fails
    start_timeout_s: float = 20.0  # seconds that ranks wait for one another before training starts
    prepare_timeout_s: float = 86_400.0  # seconds that ranks wait for rank 0 to prepare the data set; a dead rank 0 is noticed sooner
    backend: str = "gloo"  # gloo | nccl


@dataclass(frozen=True)
class RunConfig:
    """Everything `python -m torchrec_kstep.train` reads."""

    run_dir: str = ""  # folder of this run; "" = runs/<date>_<time>_<model>_<data>, made by rank 0
    chdir: bool = False  # change into run_dir once it is made; relative paths of the configuration still start at the launch directory
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    routes: RoutesConfig = field(default_factory=RoutesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    kstep: KStepConfig = field(default_factory=KStepConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class StudyConfig:
    """Everything `python -m torchrec_kstep.study` reads: which trainings to compare."""

    name: str = "study"  # what the study is called
    work: str = ""  # folder of its runs, table and page; "" = runs/study_<name>
    train: list[str] = field(default_factory=list)  # overrides of `train` in every run, e.g. experiment=ml1m_deepfm
    extra: list[str] = field(default_factory=list)  # more of them, of this machine, e.g. [data.source=raw/ml-1m,train.num_threads=2]
    models: list[str] = field(default_factory=lambda: ["deepfm"])  # models, one curve each
    variants: dict[str, str] = field(default_factory=dict)  # name -> overrides with blanks between them; one curve each
    points_of: dict[str, str] = field(default_factory=dict)  # variant -> the points it is run at, with blanks between; default all
    axis: str = "train.batch_size"  # key of `train` that varies along a curve
    points: list[str] = field(default_factory=list)  # its values, in order
    seeds: list[int] = field(default_factory=lambda: [1])  # values of train.seed; curves show the mean
    run_limit_s: float = 14_400.0  # seconds that one run may take


@dataclass(frozen=True)
class PrepareConfig:
    """Everything `python -m torchrec_kstep.prepare` reads."""

    data: DataConfig = field(default_factory=DataConfig)
    overwrite: bool = False  # replace a prepared set made from other sources or options
