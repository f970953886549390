"""KStepAdam: replicas train alone for k steps, then merge what they touched."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

from torchrec_kstep.errors import CheckpointError, ConfigError, MergeError, RankFailure
from torchrec_kstep.merge.dense import FIRST, SECOND, WEIGHT, DenseMerger, ReplicaMean
from torchrec_kstep.merge.gradients import GradientExchange
from torchrec_kstep.merge.rows import RowMerger
from torchrec_kstep.merge.transport import ProcessGroupTransport
from torchrec_kstep.merge_spec import RECIPES, MergeSpec, RecipeName, mixture_warnings
from torchrec_kstep.optim.build import mark_tables, split_parameters
from torchrec_kstep.optim.clipping import ClipCovers, GlobalNormClipping
from torchrec_kstep.optim.frozen import FrozenAdam
from torchrec_kstep.optim.keyed import TorchOptimizer, torch_optimizer
from torchrec_kstep.optim.kstep_model import (
    buffers_of,
    check_clipping,
    check_data_parallel,
    check_recipe,
    check_replicated,
    check_settings,
    check_state,
    check_table_rule,
    check_tables,
    counts_touches,
    plan_of,
    table_spec,
    variant_warnings,
)
from torchrec_kstep.optim.period import Period, few_rounds_warning
from torchrec_kstep.optim.rounds import RoundTotals
from torchrec_kstep.optim_spec import AdamSpec, BiasCorrection
from torchrec_kstep.replicas import KStepEnv, plan_digest
from torchrec_kstep.sharding.plain import PlainKernel, plain_kernels, watched_kernels
from torchrec_kstep.sharding.tiered.kernel import TieredKernel
from torchrec_kstep.sharding.tiered.state import kernels_of_model

Variant = Literal["local", "frozen"]
STATE_KEY = "kstep"


class KStepAdam(OptimizerWrapper):  # type: ignore[misc]  # torchrec has no type information
    """Adam over a sharded model whose replicas exchange nothing for k steps and are merged then. See docs/kstep.md.

    Tiered tables are stepped by their own kernels as their `AdamSpec` says, tables with TorchRec's dense kernel by the same rule
    (`table_adam`), those with its fused kernels as FBGEMM does it, dense parameters by Adam as said here. A step is one call of
    `step()`, however many backwards came before. After k steps without exchange a *round* merges the rows that any replica touched,
    the dense parameters and the buffers; afterwards all replicas hold the same bits. k = 1 is synchronous training: gradients are
    averaged over replicas before every step. One replica is plain Adam for every k.

    Call `merge()` on all ranks before the model is evaluated, saved or exported, and at the end: between rounds replicas differ,
    and `state_dict` refuses. `zero_grad`, `step` and `merge` are collective; all ranks must take equally many steps.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        *,
        env: KStepEnv,
        k: int | Mapping[int, int] = 20,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        clip_covers: ClipCovers = "dense",
        variant: Variant = "local",
        is_amsgrad: bool = False,
        recipe: RecipeName = "default",
        merge: MergeSpec | None = None,
        table_adam: AdamSpec | None = None,
        lr_factor: float | None = None,
        num_warmup_steps: int = 0,
        num_steps_per_pass: int | None = None,
        summed_buffers: Sequence[str] = (),
    ) -> None:
        """Makes the dense part, checks that all ranks agree, and starts all replicas alike. Collective; make it before the first step.

        Args:
            dmp: sharded with `env.dmp_kwargs()` and `env.localize(plan)`.
            env: the replicas.
            k: steps from one round to the next; or k by the step from which it holds.
            lr: learning rate of dense parameters; tables have that of their `AdamSpec`.
            betas: decays of the dense moments.
            eps: of the dense part.
            weight_decay: L2 added to dense gradients; tables have that of their `AdamSpec`.
            clip_norm: bound on the norm of the gradient; of one replica in local steps, of the mean over replicas at k = 1; 0 = none.
            clip_covers: "dense": the norm is that of dense parameters, and tables are left alone; "all": of dense parameters and
                tables together, and all are scaled. Rows are then updated in `step` instead of inside backward.
            variant: "local": every replica divides by its own second moment; "frozen": by the larger of its own and the one of the last
                round.
            is_amsgrad: in the frozen variant, never lets the shared second moment fall.
            recipe: what belongs together, "default" or "paper".
            merge: how rounds merge, in place of a recipe; refused beside one that it contradicts. Its `k` and `timeout_s` are not used.
            table_adam: rule of tables with TorchRec's dense kernel, which update the rows of a batch as tiered tables do, not all rows as
                `torch.optim.Adam` would; what rounds need is added to it. None = `lr`, `betas`, `eps` and the recipe's bias correction.
            lr_factor: factor on all learning rates in local steps; None = the recipe's, or 1 where `merge` is given.
            num_warmup_steps: steps at the start with k = 1.
            num_steps_per_pass: steps of one pass over the data, to warn where it has too few rounds.
            summed_buffers: names of buffers that add up over ranks; the other floating point ones are averaged.

        Raises:
            ConfigError: tables that cannot be merged, by name and reason; or values out of range.
            LaunchError: ranks differ in what they were told.
        """
        self.env = env
        self.period = Period(k, num_warmup_steps)
        check_recipe(recipe, merge)
        self.spec = replace(merge or MergeSpec.of_recipe(recipe), k=max(self.period.largest, 1), timeout_s=env.timeout_s)
        own_factor = 1.0 if merge is not None else RECIPES[recipe].lr_factor(env.num_replicas)
        self._lr_factor = own_factor if lr_factor is None or env.num_replicas == 1 else lr_factor
        self._kernels: list[TieredKernel | PlainKernel] = [*kernels_of_model(dmp)]
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "clip_norm": clip_norm}
        check_settings(variant, is_amsgrad, clip_covers, numbers, self._lr_factor, self.spec, self.period)
        self._dense_adam: FrozenAdam | None = None
        self._clips_tables = clip_norm > 0 and clip_covers == "all"
        if self._clips_tables:
            check_clipping(dmp)
        given = table_adam or AdamSpec(lr, betas=betas, eps=eps, bias_correction=RECIPES[recipe].bias_correction)
        check_table_rule(dmp, given)
        rule = given if env.num_replicas == 1 else table_spec(given, self.spec, variant, is_amsgrad)
        self._plain = plain_kernels(dmp.module, rule, env.sharding_group)
        fused = watched_kernels(dmp.module, self.spec.num_trackers) if env.num_replicas > 1 else []
        self._kernels += [*self._plain, *fused]
        optimizer = self._make_optimizer(dmp, lr, betas, eps, weight_decay, clip_norm, variant, is_amsgrad)
        super().__init__(optimizer)
        self.num_steps = 0
        self.num_rounds = 0
        self._rows: RowMerger | None = None
        self._is_tracking = True  # as row groups begin
        self._rows_key = f"rows_{env.layout.position}"  # ranks at different positions hold different tables
        self.totals = RoundTotals()
        self._num_unmerged_steps = 0
        self._is_equal = True  # whether replicas hold the same bits, moments included
        self._num_steps_pending = 0
        self._is_pending = False
        if env.num_replicas > 1:
            dense = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip_norm": clip_norm, "clip_covers": clip_covers}
            told = {**dense, "lr_factor": self._lr_factor, "variant": variant, "is_amsgrad": is_amsgrad}
            self._prepare_replicas(dmp, betas, summed_buffers, told, num_steps_per_pass)
        self._set_mode()

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step averages gradients over replicas."""
        return self.env.num_replicas > 1 and self.period(self.num_steps) == 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and hands learning rates to tables."""
        with self._scaled_rates():
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes one step, and merges if k steps have passed. Collective.

        Args:
            closure: must be None with several replicas.

        Raises:
            RankFailure: another rank went away, or did not come within the deadline; names it and the phase.
            MergeError: ranks differ in step, k or plan.
            DivergenceError: a replica holds a value that is not finite; names the parameter or table.
            ConfigError: a closure is given, whose gradients would come after replicas averaged theirs.
        """
        if closure is not None and self.env.num_replicas > 1:
            raise ConfigError("KStepAdam.step: replicas average gradients before a closure could make any; call backward() before step()")
        is_synchronous = self.is_synchronous
        if is_synchronous:
            self._average_gradients()
        with self._scaled_rates():
            self._optimizer.step(closure)
        self.num_steps += 1
        if self.env.num_replicas > 1 and not is_synchronous:
            self._after_local_step()
        self._set_mode()

    def merge(self) -> None:
        """Makes all replicas equal, moments included, whatever their periods. Collective over all ranks; costs little if they are.

        Raises:
            RankFailure, MergeError, DivergenceError: as `step`.
        """
        if self.env.num_replicas == 1:
            return
        self.env.free()
        if self._is_equal and not self._num_unmerged_steps:
            self._agree("flush", self._dense.find_ill(self._dense.collect(self.num_rounds)))
            with self._naming("buffers"):
                self._dense.merge_buffers()
        else:
            self._merge(is_full=True)
        self._set_mode()

    def take_scalars(self) -> dict[str, float]:
        """Returns what the rounds since the last call cost and did on this rank; empty without any. Not collective."""
        return self.totals.take(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, the same on all replicas. Not collective.

        Raises:
            CheckpointError: replicas differ since the last round: call `merge()` first.
        """
        if self._num_unmerged_steps or not self._is_equal or self._is_pending:
            raise CheckpointError(
                f"replicas have trained alone for {self._num_unmerged_steps} steps since the last round: call merge() on all ranks before "
                "the state is read"
            )
        state: dict[str, Any] = self._optimizer.state_dict()
        own: dict[str, Any] = {"num_steps": self.num_steps, "num_rounds": self.num_rounds}
        if self._rows is not None and self.spec.row_states == "auto":  # as text: which tables are decided differs from time to time
            own[self._rows_key] = json.dumps(self._rows.state_dict())
        return {**state, STATE_KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state, of any k and number of replicas; the running interval is forgotten. Load the same on all ranks.

        Raises:
            CheckpointError: it is that of another model or variant.
        """
        check_state(self._optimizer.state_dict()["state"], state_dict.get("state", {}))
        super().load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        own = state_dict.get(STATE_KEY) or {"num_steps": self._num_steps_of_parts(), "num_rounds": 0}  # not of a KStepAdam
        self.num_steps, self.num_rounds = int(own["num_steps"]), int(own["num_rounds"])
        self._num_unmerged_steps, self._is_equal = 0, True
        self._is_pending = False  # a round under way is waited for here, and its result dropped
        if self.env.num_replicas > 1:
            self._dense.restart()
        if self._rows is not None:
            self._rows.reset()
            if self._rows_key in own:
                self._rows.load_state_dict(json.loads(own[self._rows_key]))
        self._set_mode()

    def _num_steps_of_parts(self) -> int:
        """Returns the steps that tables or dense parameters have done."""
        tables = [kernel.fused_optimizer.num_steps for kernel in self._kernels]
        return max([0, *tables, *(int(self._dense_state[name]["step"]) for name in self._dense_params)])

    def _make_optimizer(
        self,
        dmp: DistributedModelParallel,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
        variant: Variant,
        is_amsgrad: bool,
    ) -> KeyedOptimizer:
        """Joins dense Adam and the optimizers of the tables."""
        parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = []
        dense, tables_with_gradients = split_parameters(dmp)
        own = {f"{kernel.path}.{shard.table}.weight" for kernel in self._plain for shard in kernel.shards}
        check_replicated(name for name in tables_with_gradients if name not in own)
        self._dense_params = dense
        if dense:
            params: list[torch.Tensor] = list(dense.values())
            if variant == "frozen":
                self._dense_adam = FrozenAdam(params, lr, betas, eps, weight_decay, is_amsgrad)
            inner = self._dense_adam or torch_optimizer("adam", params, lr, betas, eps, weight_decay)
            optimizer: KeyedOptimizer = TorchOptimizer(dense, inner)
            self._dense_state = {name: inner.state[param] for name, param in dense.items()}
            clips_dense = clip_norm > 0 and not self._clips_tables
            parts.append(GradientClippingOptimizer(optimizer, GradientClipping.NORM, clip_norm) if clips_dense else optimizer)
        parts += [(kernel.path, kernel.fused_optimizer) for kernel in self._plain]
        parts.append(dmp.fused_optimizer)
        for tables in (dmp.fused_optimizer, *(kernel.fused_optimizer for kernel in self._plain)):
            mark_tables(tables)
        combined = CombinedOptimizer(parts)
        if not self._clips_tables:
            return combined
        return GlobalNormClipping(combined, list(dense.values()), [], clip_norm, self.env.sharding_group)

    def _prepare_replicas(
        self,
        dmp: DistributedModelParallel,
        betas: tuple[float, float],
        summed_buffers: Sequence[str],
        told: Mapping[str, Any],
        num_steps_per_pass: int | None,
    ) -> None:
        """Checks tables, and that all ranks were `told` the same; warns of what is known to lose; starts replicas alike. Collective."""
        env = self.env
        merges_rows = self.period.largest > 1
        check_data_parallel(dmp, env.layout.sharding_ranks(env.replica))
        check_tables(dmp, self._kernels, self.spec, self.period)
        plan = plan_of(dmp)
        self._plan_digest = plan_digest(plan, env.layout.sharding_ranks(env.replica)[0])
        shapes = {name: list(param.shape) for name, param in self._dense_params.items()}
        env.check_same(
            "KStepAdam",
            {
                "k": str(self.period),
                "sharding plan": self._plan_digest,
                **{name: str(value) for name, value in told.items()},
                "dense parameters": str(shapes),
                **{f"merge {name}": value for name, value in asdict(self.spec).items()},
            },
        )
        specs = [kernel.group.optimizer for kernel in self._kernels]
        rules = [f"tables {', '.join(shard.table for shard in kernel.shards[:3])}" for kernel in self._kernels]
        env.check_same_shards("tables", {f"rule of {name} ({number})": str(specs[number]) for number, name in enumerate(rules)})
        if env.world.is_main and merges_rows:
            biases: list[BiasCorrection | None] = [spec.bias_correction for spec in specs if isinstance(spec, AdamSpec)] or [None]
            mixtures = dict.fromkeys(text for bias in biases for text in mixture_warnings(self.spec, bias, env.num_replicas))
            found = [*mixtures, *variant_warnings(specs, told["variant"], told["is_amsgrad"])]
            if num_steps_per_pass is not None and (text := few_rounds_warning(self.period.largest, num_steps_per_pass)):
                found.append(text)
            for text in found:
                warnings.warn(text, stacklevel=3)
        states = {
            name: {WEIGHT: param.detach(), FIRST: self._dense_state[name]["exp_avg"], SECOND: self._dense_state[name]["exp_avg_sq"]}
            for name, param in self._dense_params.items()
        }
        for kernel in self._kernels:
            for weight in () if isinstance(kernel, TieredKernel) else kernel.weights():
                dist.broadcast(weight, src=env.layout.merge_ranks(env.layout.position)[0], group=env.merge_group)
        self._agreement = env.round_agreement()
        steps = [self._dense_state[name]["step"] for name in self._dense_params]
        self._dense = DenseMerger(env, self.spec, states, buffers_of(dmp), betas, steps, summed_buffers)
        groups = [kernel.group for kernel in self._kernels]
        self._gradients = GradientExchange(groups, env.merge_group)
        self._gradient_mean = ReplicaMean(env)
        if groups and merges_rows:
            num_shard_rows = [[shard.num_rows for shard in kernel.shards] for kernel in self._kernels]
            self._rows = RowMerger(groups, self.spec, ProcessGroupTransport(env.row_group, env.timeout_s), num_shard_rows)

    def _set_mode(self) -> None:
        """Has tables keep gradients for the next step, or update rows in backward, and counts touches where they will be merged.

        Hands the next step's rates to tables: whoever clears gradients before a round calls no `zero_grad` between it and backward.
        """
        is_synchronous = self.is_synchronous
        is_tracking = self._rows is not None and not is_synchronous
        for kernel in self._kernels:
            kernel.group.set_deferred(is_synchronous or self._clips_tables or kernel.fused_optimizer.is_deferred)
            if is_tracking is not self._is_tracking and counts_touches(kernel.group):
                kernel.group.set_tracking(is_tracking)
        self._is_tracking = is_tracking
        with self._scaled_rates():
            for kernel in self._kernels:
                kernel.fused_optimizer.hand_over()

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        """Applies the recipe's factor to all learning rates, in local steps."""
        factor = 1.0 if self.is_synchronous else self._lr_factor
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def _average_gradients(self) -> None:
        """Averages all gradients over replicas, for the step that follows. Collective."""
        self.env.free()
        with self._naming("gradients"):
            self._average_dense_gradients()
            for kernel, gradients in zip(self._kernels, self._gradients.exchange(), strict=True):
                if gradients.unique_rows.numel():
                    kernel.fused_optimizer.take_over(gradients)
        self.totals.add_gradients(self._gradients.num_bytes_sent + self._gradient_mean.num_bytes_sent)

    def _average_dense_gradients(self) -> None:
        """A parameter without gradient on one replica counts as zero there; without any it keeps none."""
        params = list(self._dense_params.values())
        if not params:
            return
        has_grad = torch.tensor([float(param.grad is not None) for param in params])
        parts = [param.grad if param.grad is not None else torch.zeros(param.shape) for param in params]
        flat = self._gradient_mean.mean(torch.cat([has_grad, *(part.reshape(-1) for part in parts)]))
        begin = len(params)
        for param, share in zip(params, flat[: len(params)].tolist(), strict=True):
            mean = flat[begin : begin + param.numel()].view(param.shape)
            begin += param.numel()
            if param.grad is not None:
                param.grad.copy_(mean)
            elif share:
                param.grad = mean.clone()

    def _after_local_step(self) -> None:
        self._num_unmerged_steps += 1
        if self._is_pending:
            self._num_steps_pending += 1
            if self._num_steps_pending >= self.spec.overlap_steps:
                self._finish_pending()
        is_last = self.period(self.num_steps) == 1  # synchronous steps need equal replicas, moments included
        if not is_last and self._num_unmerged_steps < self.period(self.num_steps - 1):
            return
        self.env.free()
        if self.spec.overlap_steps and not is_last:
            self._begin()
        else:
            self._merge(is_full=is_last)

    def _merge(self, is_full: bool) -> None:
        """One round while training waits."""
        collected = self._dense.collect(self.num_rounds, is_full)
        self._agree("flush" if is_full else "round", self._dense.find_ill(collected))
        with self._naming("dense parameters"):
            begin_s = perf_counter()
            drift = self._dense.merge(collected, self.num_rounds)
            self.totals.add_dense(drift, perf_counter() - begin_s, self._dense.num_bytes_sent)
        if self._rows is not None:
            for kernel in self._kernels:
                kernel.fused_optimizer.hand_over(self.num_steps)  # by which the bias of v_hat is corrected
            with self._naming("rows"):
                self.totals.add_rows(self._rows.merge(self.num_rounds, self._num_unmerged_steps, is_full=is_full))
            for kernel in self._kernels:
                kernel.fused_optimizer.hand_over()
        if SECOND in collected.states and self._dense_adam is not None:
            self._dense_adam.freeze()
        self._end_round(is_equal=is_full or self._moves_all())

    def _begin(self) -> None:
        """Starts a round that goes on while training does."""
        collected = self._dense.collect(self.num_rounds)
        self._agree("round", self._dense.find_ill(collected))
        with self._naming("the start of a round"):
            self._dense.begin(collected, self.num_rounds)
            if self._rows is not None:
                self._rows.begin(self.num_rounds, self._num_unmerged_steps)
        self._is_pending, self._num_steps_pending = True, 0
        self.env.occupy(self._finish_pending)
        self._end_round(is_equal=False)

    def _finish_pending(self) -> None:
        """Waits for a round on its way, if there is one, and corrects the present values."""
        if not self._is_pending:
            return
        with self._naming("dense parameters"):
            begin_s = perf_counter()
            drift = self._dense.finish(self._num_steps_pending)
            self.totals.add_dense(drift, perf_counter() - begin_s, self._dense.num_bytes_sent)
        if self._rows is not None:
            with self._naming("rows"):
                self.totals.add_rows(self._rows.finish(self._num_steps_pending))
        self._is_pending = False

    def _end_round(self, is_equal: bool) -> None:
        self.num_rounds += 1
        self._num_unmerged_steps = 0
        self._is_equal = is_equal

    def _moves_all(self) -> bool:
        """Whether every round makes all states equal."""
        spec = self.spec
        return spec.m_period_rounds == spec.v_period_rounds == 1 and (self._rows is None or spec.row_states == "all")

    def _agree(self, what: str, ill: str) -> None:
        facts = {
            "round": self.num_rounds,
            "step": self.num_steps,
            "steps since the last round": self._num_unmerged_steps,
            "k": self.period(max(self.num_steps - 1, 0)),
            "reason": what,
            "sharding plan": self._plan_digest,
        }
        self._agreement.agree(facts, ill)

    @contextmanager
    def _naming(self, phase: str) -> Iterator[None]:
        """Says what was being exchanged when another rank went away."""
        try:
            yield
        except (RuntimeError, MergeError, TimeoutError) as error:
            if isinstance(error, MergeError) and not isinstance(error.__cause__, RuntimeError):
                raise  # replicas differ, which is no loss of a rank
            env = self.env
            raise RankFailure(
                f"rank {env.world.rank} (replica {env.replica}) lost another rank in round {self.num_rounds} after step {self.num_steps}, "
                f"exchanging {phase}: {error}"
            ) from error
