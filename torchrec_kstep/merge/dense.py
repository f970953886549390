"""Merging dense parameters, their moments, and buffers: one flat vector a round.

The ranks of a replica hold equal dense parameters, so each merges its part of the vector with the ranks at its position of
the other replicas, and the parts are gathered inside the replica: between hosts every value travels once a replica.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.merge_spec import MergeSpec
from torchrec_kstep.replicas import KStepEnv

WEIGHT, FIRST, SECOND = "weight", "m", "v"
_UP, _DOWN = 0, 1  # legs of a round, which have noise of their own


class ReplicaMean:
    """The mean of a flat vector over replicas, the same bits on all ranks.

    Each rank owns a part of the vector: it receives that part of all replicas, sums in the order of the replicas, and sends
    the mean back.
    """

    def __init__(self, env: KStepEnv, seed: int = 0) -> None:
        """Needs several replicas; `seed` is that of random rounding."""
        self._env = env
        self._seed = seed
        self.num_bytes_sent = 0  # by this rank to other replicas

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of `values` `[n]`, float32 or float64, sent as they are. Collective."""
        return self._exchange(values, None)

    def mean_rounded(self, values: torch.Tensor, round_index: int) -> torch.Tensor:
        """Returns the mean of `values` `[n]`, sent in bfloat16 and rounded at random, so that it is right on average. Collective."""
        return self._exchange(values.float(), round_index)

    def _exchange(self, values: torch.Tensor, round_index: int | None) -> torch.Tensor:
        env, layout = self._env, self._env.layout
        num_replicas = layout.num_replicas
        piece = -(-values.numel() // (num_replicas * layout.ranks_per_replica))
        padded = values.new_zeros(piece * num_replicas * layout.ranks_per_replica)
        padded[: values.numel()] = values
        own = padded.view(layout.ranks_per_replica, num_replicas, piece)[layout.position]
        sent = self._encode(own, round_index, _UP)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=env.merge_group)
        total = values.new_zeros(piece)
        for part in self._decode(received, round_index):
            total += part
        back = self._encode((total / num_replicas).unsqueeze(0), round_index, _DOWN)
        pieces = [torch.empty_like(back) for _ in range(num_replicas)]
        dist.all_gather(pieces, back, group=env.merge_group)
        self.num_bytes_sent += (num_replicas - 1) * (sent.nbytes // num_replicas + back.nbytes)
        merged = self._decode(torch.cat(pieces), round_index).reshape(-1)
        if layout.ranks_per_replica > 1:
            parts = [torch.empty_like(merged) for _ in range(layout.ranks_per_replica)]
            dist.all_gather(parts, merged, group=env.gather_group)
            merged = torch.cat(parts)
        return merged[: values.numel()]

    def _encode(self, values: torch.Tensor, round_index: int | None, leg: int) -> torch.Tensor:
        """Returns what travels of `[rows, n]`: the same, or `[rows, 2 n]` bytes."""
        if round_index is None:
            return values.contiguous()
        generator = torch.Generator().manual_seed(hash((self._seed, round_index, leg, self._env.world.rank)) & (2**63 - 1))
        bits = values.contiguous().view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
        rounded = (bits + noise) & ~0xFFFF  # adds less than one step of bfloat16, which carries with the right probability
        return rounded.view(torch.float32).to(torch.bfloat16).view(torch.uint8)

    @staticmethod
    def _decode(values: torch.Tensor, round_index: int | None) -> torch.Tensor:
        return values if round_index is None else values.view(torch.bfloat16).float()


@dataclass(frozen=True)
class DenseRound:
    """What a rank brings to a round.

    Attributes:
        states: which states take part, weights first.
        values: `[n]` float32 (float64 if a parameter is): all parameters' weights, then their first moments, and so on.
    """

    states: tuple[str, ...]
    values: torch.Tensor


class DenseMerger:
    """Merges dense parameters and their moments over replicas by their plain mean, and buffers over all ranks.

    Floating point buffers, such as the running statistics of batch normalisation, become their mean over all ranks, or base
    plus all ranks' changes where they are named as sums. Constants, which no rank has changed since the last round, are left
    alone, and may be infinite, as the masks of attention are. Whole-number buffers count steps, which are the same everywhere;
    they are kept.
    """

    def __init__(
        self,
        env: KStepEnv,
        spec: MergeSpec,
        states: Mapping[str, Mapping[str, torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        betas: tuple[float, float],
        steps: Sequence[torch.Tensor],
        summed_buffers: Sequence[str] = (),
    ) -> None:
        """Takes over the tensors, which it changes in place. Broadcasts weights and buffers of replica 0: collective.

        Args:
            env: the replicas, several of them.
            spec: wire and periods.
            states: of each parameter by name: `weight`, `m` and `v`, tensors of one shape.
            buffers: by name.
            betas: decay of the moments, for corrections that come late.
            steps: of each parameter the number of its updates, by which the bias of its moments is corrected: scalars.
            summed_buffers: names of buffers that add up over ranks.

        Raises:
            ConfigError: such a name is that of no floating point buffer.
        """
        self._env = env
        self._spec = spec
        self._states = states
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()}
        self._steps = steps
        self._decay = {WEIGHT: 1.0, FIRST: betas[0], SECOND: betas[1]}
        self._summed = [name for name in self._buffers if name in summed_buffers]
        if unknown := ", ".join(repr(name) for name in summed_buffers if name not in self._buffers):
            known = ", ".join(self._buffers) or "none"
            raise ConfigError(f"summed_buffers: {unknown}: not among the model's floating point buffers ({known})")
        self._mean = ReplicaMean(env, spec.seed)
        self._background: ThreadPoolExecutor | None = None
        self._pending: tuple[DenseRound, Future[torch.Tensor]] | None = None
        self._base: dict[str, torch.Tensor] = {}  # states as of the last round, where changes travel
        self._buffer_base: dict[str, torch.Tensor] = {}  # as of the last round
        self._start_alike()

    @property
    def num_bytes_sent(self) -> int:
        """Bytes that this rank has sent to other replicas."""
        return self._mean.num_bytes_sent

    def collect(self, round_index: int, is_full: bool = False) -> DenseRound:
        """Copies what takes part in a round: weights, and moments that are due or all of them. Not collective."""
        periods = {WEIGHT: 1, FIRST: self._spec.m_period_rounds, SECOND: self._spec.v_period_rounds}
        states = tuple(state for state, period in periods.items() if is_full or (round_index + 1) % period == 0)
        return DenseRound(states, self._flat(states))

    def find_ill(self, collected: DenseRound) -> str:
        """Names a tensor that is not finite, and how; "" if all are well. Not collective."""
        if not (ill := self._ill_buffers()) and bool(collected.values.isfinite().all()):
            return ""
        for name, states in self._states.items():
            for state in collected.states:
                if num_bad := int((~states[state].isfinite()).sum()):
                    return f"{num_bad} of {states[state].numel()} values of dense parameter {name!r} ({state}) are NaN or infinite"
        return f"buffer {ill[0]!r} has become NaN or infinite"

    def merge(self, collected: DenseRound, round_index: int) -> float:
        """Makes the collected states and all buffers equal on all replicas. Collective over all ranks.

        Returns:
            How far this replica's weights were from the merged ones: root of the mean square.
        """
        merged = self._merged(collected, round_index)
        self._write(collected.states, merged)
        self.merge_buffers(SECOND in collected.states)
        return self._drift(collected, merged)

    def begin(self, collected: DenseRound, round_index: int) -> None:
        """Starts a round in the background. Collective over all ranks."""
        assert self._pending is None, "a dense round is on its way already"
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "kstep-dense")
        self._pending = (collected, self._background.submit(self._merged, collected, round_index))

    def finish(self, num_steps_late: int) -> float:
        """Waits for the round that `begin` started and corrects the present values by its result. Returns as `merge`.

        Args:
            num_steps_late: steps taken since; moments have forgotten part of what is corrected by then.
        """
        assert self._pending is not None, "no dense round is on its way"
        collected, future = self._pending
        merged = future.result(timeout=self._env.timeout_s * 2)
        self._pending = None
        now = self._flat(collected.states)
        size = now.numel() // len(collected.states)
        for index, state in enumerate(collected.states):
            part = slice(index * size, (index + 1) * size)
            now[part] += (merged[part] - collected.values[part]) * self._decay[state] ** num_steps_late
        self._write(collected.states, now)
        self.merge_buffers(SECOND in collected.states)
        return self._drift(collected, merged)

    def merge_buffers(self, has_moments: bool = True) -> None:
        """Averages buffers over all ranks; those of one replica differ too, as each rank sees rows of its own. Collective.

        Args:
            has_moments: whether second moments were merged, with which the numbers of updates go. A replica that had no gradient for
                a parameter counts fewer; they become the mean, as under `row_merge="mean"`.
        """
        steps = self._steps if has_moments else ()
        if not self._buffers and not steps:
            return
        changed = [float(self._has_changed(name)) for name in self._buffers]
        told = torch.tensor([*(float(step) for step in steps), *changed], dtype=torch.float64)
        flat = torch.cat([told, self._flat_buffers()])
        dist.all_reduce(flat)
        num_ranks, begin = self._env.world.world_size, told.numel()
        totals = flat[:begin].tolist()
        for step, total in zip(steps, totals, strict=False):
            step.fill_(max(round(total / num_ranks), 1) if total else 0)
        for (name, buffer), num_changed in zip(self._buffers.items(), totals[len(steps) :], strict=True):
            value = flat[begin : begin + buffer.numel()].view(buffer.shape)
            begin += buffer.numel()
            if num_changed:
                is_sum = name in self._summed
                buffer.data.copy_(value - (num_ranks - 1) * self._buffer_base[name] if is_sum else value / num_ranks)
        self._buffer_base = self._buffer_values()

    def _has_changed(self, name: str) -> bool:
        return not torch.equal(_bits(self._buffers[name]), _bits(self._buffer_base[name]))

    def _ill_buffers(self) -> list[str]:
        return [name for name, buffer in self._buffers.items() if not bool(buffer.isfinite().all()) and self._has_changed(name)]

    def _flat_buffers(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.float64)
        return torch.cat([empty, *(buffer.detach().double().reshape(-1) for buffer in self._buffers.values())])

    def _merged(self, collected: DenseRound, round_index: int) -> torch.Tensor:
        if self._spec.wire == "fp32" or not collected.values.numel():
            return self._mean.mean(collected.values)
        base = torch.cat([self._base[state] for state in collected.states])
        merged = base + self._mean.mean_rounded(collected.values - base, round_index)
        self._keep_base(collected.states, merged)
        return merged

    def _start_alike(self) -> None:
        """Sends the weights and buffers of replica 0 to the others; moments start at zero everywhere."""
        source = self._env.layout.merge_ranks(self._env.layout.position)[0]
        flat = torch.cat([self._flat((WEIGHT,)), self._flat_buffers()])  # float64
        dist.broadcast(flat, src=source, group=self._env.merge_group)
        num_weights = sum(states[WEIGHT].numel() for states in self._states.values())
        self._write((WEIGHT,), flat[:num_weights])
        self._write_buffers(flat[num_weights:])
        self.restart()

    def restart(self) -> None:
        """Takes the present values as those of the last round, e.g. after a checkpoint was loaded. Not collective.

        A round under way is waited for and dropped.
        """
        if self._pending is not None:
            self._pending[1].result(timeout=self._env.timeout_s * 2)
            self._pending = None
        if self._spec.wire != "fp32":
            self._keep_base((WEIGHT, FIRST, SECOND), self._flat((WEIGHT, FIRST, SECOND)))
        self._buffer_base = self._buffer_values()

    def _keep_base(self, states: tuple[str, ...], values: torch.Tensor) -> None:
        for state, part in zip(states, values.chunk(len(states)), strict=True):
            self._base[state] = part.clone()

    def _flat(self, states: tuple[str, ...]) -> torch.Tensor:
        parts = [tensors[state].detach().reshape(-1) for state in states for tensors in self._states.values()]
        return torch.cat([torch.empty(0), *parts])

    def _write(self, states: tuple[str, ...], values: torch.Tensor) -> None:
        begin = 0
        with torch.no_grad():
            for state in states:
                for tensors in self._states.values():
                    target = tensors[state]
                    part = values[begin : begin + target.numel()].view(target.shape)
                    target.copy_(part.clamp(min=0) if state == SECOND else part)  # a rounded change may overshoot a small v
                    begin += target.numel()

    def _write_buffers(self, values: torch.Tensor) -> None:
        begin = 0
        for buffer in self._buffers.values():
            buffer.data.copy_(values[begin : begin + buffer.numel()].view(buffer.shape))
            begin += buffer.numel()

    def _buffer_values(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @staticmethod
    def _drift(collected: DenseRound, merged: torch.Tensor) -> float:
        size = merged.numel() // len(collected.states)
        return float((merged[:size] - collected.values[:size]).square().mean().sqrt()) if size else 0.0


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, which are equal also where values are NaN."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
