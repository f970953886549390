"""What merge rounds do to the caches over drives: which rows a round has to bring up, and which it leaves to the steps after it."""

from typing import NamedTuple

from torchrec_kstep.cost.access import AccessCurve

_NUM_PARTS = 64  # into which the way of a round is cut
_MAX_SAMPLES = 8  # of the steps between two rounds at which misses are computed


class RoundMisses(NamedTuple):
    """Rows of a table that were not in its cache.

    Attributes:
        per_step: asked for by a step of training, mean over the steps between two rounds.
        per_round: that a round has to read.
    """

    per_step: float
    per_round: float


def round_misses(curve: AccessCurve, draws: float, k: int, num_replicas: int, cached_rows: float) -> RoundMisses:
    """Misses of a cache that keeps the rows used last, in the steady state.

    A round goes once over all rows that any replica touched since the one before, so afterwards the cache holds those of them that the
    round came to last, whatever their frequency; training then displaces the rest of these first. During the round itself, rows that other
    replicas touched displace own rows that the round has not come to yet.

    Args:
        curve: of the table.
        draws: ids that one replica looks up in a step.
        k: steps from one round to the next.
        num_replicas: that merge.
        cached_rows: of the whole table, in each replica.
    """
    if cached_rows >= curve.num_accessible_rows * (1 - 1e-9):  # which is a sum
        return RoundMisses(0.0, 0.0)
    num_rows, own_draws = curve.num_rows, draws * k
    window = curve.window(cached_rows)
    met_own, met_any = curve.met(own_draws), curve.met(own_draws * num_replicas)
    met_before = curve.met(max(own_draws * num_replicas, window))  # a cache larger than the union also holds rows of earlier rounds

    def held_share(num_draws: float) -> float:
        """Of the rows before this interval: the part that is still held after so many draws of it."""
        met = curve.met(num_draws)
        room, behind = cached_rows - float((num_rows * met).sum()), float((num_rows * met_before * (1 - met)).sum())
        return min(max(room, 0.0) / behind, 1.0) if behind > 0 else 0.0

    num_samples = min(k, _MAX_SAMPLES)
    missed = 0.0
    for sample in range(num_samples):
        done = min(draws * (sample + 0.5) * k / num_samples - 0.5 * draws, window)
        absent = (1 - curve.met(done)) * (1 - met_before * held_share(done))
        missed += float((num_rows * curve.met(draws) * absent).sum()) / num_samples
    touched, others = float((num_rows * met_own).sum()), float((num_rows * (met_any - met_own)).sum())
    share = held_share(min(own_draws, window))
    held = float((num_rows * (met_any - met_own) * met_before).sum()) * share
    return RoundMisses(missed, _missed_on_the_way(touched, others, held, cached_rows))


def _missed_on_the_way(touched: float, others: float, held: float, cached_rows: float) -> float:
    """Rows that a round reads, going evenly through own rows and those that only others touched.

    What it brings up displaces rows of earlier intervals first, then own ones that it has not come to yet.

    Args:
        touched: rows that this replica touched, used last.
        others: rows that only other replicas touched.
        held: of the others, those that the cache holds when the round begins.
        cached_rows: of the cache.
    """
    older, older_share = max(cached_rows - touched, 0.0), 1.0  # rows of earlier intervals, and the part of them still held
    displaced = max(touched - cached_rows, 0.0)  # own rows to come that the cache does not hold
    missed = 0.0
    for part in range(_NUM_PARTS):
        left = 1 - (part + 0.5) / _NUM_PARTS
        own_share = min(displaced / (touched * left), 1.0) if touched else 0.0
        brought_up = (others - held * older_share + touched * own_share) / _NUM_PARTS
        missed += brought_up
        room = max(older - held * (1 - left), 0.0) * older_share
        older_share *= max(1 - brought_up / room, 0.0) if room > 0 else 0.0
        displaced += max(brought_up - room, 0.0) - touched * own_share / _NUM_PARTS
    return missed
