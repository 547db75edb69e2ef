"""How few bytes any placement can move: a proven lower bound, from the masks alone, so for every way of cutting blocks.

The bytes are those of `Nets`: each part that touches the query side or the KV side of a token in a head group, and does
not own the token, costs that side's bytes (`c_q`, `c_k`) once. So they are a sum over parts, masks and sequences, and
each sequence under each mask is bounded on its own. Take one: L tokens, and P pairs in each of G head groups. Part r
owns `t_r` of the tokens, those of all groups alike, and computes `W_r` of the G P pairs; by the limits on balance
`t_r <= T` and `W_r <= W`. To touch owned rows and keys costs nothing, so a part may as well touch them all: in a group
it touches `t + q` rows and `t + k` keys at a cost of `c_q q + c_k k`, and computes w pairs of them.

**Whole parts.** There are at most `own` pairs among t tokens: t (t + 1) / 2 if the mask is one-sided (no query sees a
later key, or none an earlier one), else t^2. All others among those touched are at most `(t + q)(t + k) - t^2`. So w
pairs cost at least `e(w - own)`, where `e(x) = min {c_q q + c_k k : (t + q)(t + k) >= t^2 + x}`, and 0 for x < 0. For
x >= 0 the slope of e is min(c_q, c_k) / t and then, once both q and k are used, sqrt(c_q c_k / (t^2 + x)), which is
less: e is concave, so of all groups' pairs beyond `own` it is cheapest to compute all in one group. As a mean is at
least the geometric one, part r costs

    at least e(W_r - G own) >= 2 sqrt(c_q c_k V_r) - (c_q + c_k) t_r,    V_r = max(0, W_r - z t_r)

where `G own - t^2 <= z t` for all t <= T (and where W_r < G own, V_r is below t_r^2 and the right side not positive).
Sum over the parts: the t_r add up to L and the V_r to G P - z L or more, and the sum of a concave function of V_r in
[0, W] is least if as many as can be are W and one is the rest. For one causal sequence on R equal parts this is the
bound of the communication-avoiding matrix product, `(1 + q)(1 + k) >= G R / 2` in units of owned tokens.

**Prices.** That is weak where a row sees few keys (windows), and where parts are few and owned tokens most of what they
need. Let no row see more than d keys. In a one-sided mask the i-th owned row sees at most i + k of the touched keys:

    w <= w0 + q min(d, t + k),    w0 = sum over i = 1..t of min(d, i + k)    (if it is not one-sided, t min(d, t + k))

Let f(w, t) be the least cost that this allows. Now let a computed pair be worth `alpha` and an owned token cost `beta`.
If no part can gain, whatever its t <= T and its pairs w of each group, at most W in total:

    sum over groups of (alpha w - f(w, t)) <= beta t,    then the sum over parts says    bytes >= alpha G P - beta L,

so any such prices give a bound. For 0 <= lambda <= alpha the left side is at most `(alpha - lambda) W + G F(lambda, t)`
with `F = max of lambda w - f(w, t) over w <= w1 = min(P, W)`. As f is a minimum over k of functions of w that are flat
up to w0 and straight from there, F is reached with q = 0 (`near`) or with w = w1 (`far`). The beta that alpha needs is
the largest value of the left side / t. It is bounded from above in cells t0 <= t <= t1 that cover 1..T, in each with
`lambda = alpha - gamma t`:

- near, k = 0: `lambda w0 / t`, which grows with lambda and t;
- near, k > 0, only where lambda t > c_k: w0 is concave in k, so the best k is about `d - c_k / lambda` (`d - t` if not
  one-sided), and the value / t grows with lambda and t. If this k has more than w1 pairs everywhere in the cell, one
  below it gains no more than far does;
- far: `(alpha w1 - f(w1, t)) / t - gamma w1`. f falls with t, and so is at least f(w1, t1). It is also at least one of
  two lines in t, over which the quotient is largest at an end. With A = t + q and B = t + k they are
  `c_q A + c_k B - (c_q + c_k) t` where A B >= w1 + t^2 - own and B <= d, and `c_q A + c_k k - c_q t` where
  A d >= w1 + (d - k)(d - k - 1) / 2 (w1 if not one-sided) and B >= d: replace t by t0 or t1 in what remains.

A part without tokens does not gain if alpha <= f(w1, 0) / w1, as f(w, 0) is concave in w. All this holds for rows and
keys exchanged, too, and for fewer pairs than the mask has: where few rows see many keys, d of them count. In
cross-attention an owned token is a row or a key; it is taken for both, which makes the bound lower.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.ir.slices import HI, HI_STEP, LO, LO_STEP, Q_START, Q_STOP

CELLS = (24, 64)  # of the owned tokens, which grow towards T: at least, at most
CELLS_OF_ALL = 1 << 12  # of all sequences, where there are many
GRID = 8  # prices of a pair that are tried first
STEPS = 9  # of the golden-section search around the best of them
RUNS = 3  # longest runs of rows whose degree is tried as d
ROUNDING = 1e-9  # of the limits; of the bytes a thousandth of it


@dataclass(frozen=True, slots=True)
class PassBound:
    """No placement moves fewer bytes than these (of several masks, their weighted sum)."""

    total_bytes: float  # between ranks
    inter_node_bytes: float  # between nodes, each piece once for each node that touches it


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds for the forward pass alone and for both passes with one placement (at least the sum of both alone)."""

    forward: PassBound
    both: PassBound


def lower_bound(
    batch: Batch, shape: AttentionShape, cluster: Cluster, epsilon: float, token_epsilon: float, keep: str, wire: str
) -> Bound:
    """The bytes that every placement of a batch moves at least, whatever its blocks.

    Args:
        batch: what is placed.
        shape: of the attention; it says how many bytes a token has.
        cluster: the ranks and nodes.
        epsilon: how far the pairs of a rank may lie above the mean of all ranks, as a fraction, under each mask. A
            placement that exceeds it may move less: give what the placement has.
        token_epsilon: how far the tokens of a rank may lie above the mean, as a fraction. Limits that no placement can
            meet (below the mean, rounded up) are raised.
        keep: what the forward keeps for the backward, as in `Options`.
        wire: dtype of partial results in transfers, as in `Options`.
    """
    groups, nodes = shape.groups, cluster.nodes
    sides = np.array([side_token_bytes(shape, pass_, keep, wire) for pass_ in PASSES], float)
    sides = np.cumsum(sides, axis=0)  # of the forward, of both
    pass_bytes = np.stack([sides[:, Side.Q_IN] + sides[:, Side.Q_OUT], sides[:, Side.KV_IN] + sides[:, Side.KV_OUT]])
    tokens = np.array([sequence.length + (sequence.kv_length or 0) for sequence in batch.sequences], float)
    owned = floor(_limit(float(tokens.sum()), cluster.ranks, token_epsilon))
    bounds = np.zeros((2, 2))  # levels (ranks, nodes), passes (forward, both)
    for name, weight in (batch.weights or {}).items():
        profile = _Profile.of_batch(batch, name)
        work = _limit(groups * float(profile.pairs.sum()), cluster.ranks, epsilon)
        for level, ranks in enumerate((1, cluster.ranks_per_node)):  # of a part
            if level == 0 or nodes > 1:
                bounds[level] += weight * _of_mask(profile, tokens, pass_bytes, groups, work * ranks, owned * ranks)
    total, inter_node = np.maximum(bounds, bounds[1]), bounds[1]
    forward, both = (PassBound(float(total[0, at]), float(inter_node[at])) for at in range(2))
    return Bound(forward, both)


def _limit(total: float, ranks: int, epsilon: float) -> float:
    """The most of whole things that a rank may have."""
    mean = total / ranks
    return min(max(ceil(mean), (1 + epsilon) * mean), total) * (1 + ROUNDING)


@dataclass(frozen=True, slots=True, eq=False)
class _Profile:
    """What the bound knows of the sequences' masks. A cut is a choice of d, and the pairs left of a mask when each of
    its rows (or of its keys, for the cuts of the second half) counts with d of its pairs at most.
    """

    pairs: Ints  # float64[S], of one head group
    one_sided: Ints  # bool[S]
    degree: Ints  # float64[K, S], d of each cut
    left: Ints  # float64[K, S], pairs left by each cut

    @classmethod
    def of_batch(cls, batch: Batch, name: str) -> _Profile:
        masks = [sequence.masks[name] for sequence in batch.sequences]
        count = len(masks)
        slices = np.concatenate([mask.slices for mask in masks])
        sequence = np.repeat(np.arange(count), [len(mask.slices) for mask in masks])
        q_start, q_stop, lo, lo_step, hi, hi_step = slices.T
        rows = q_stop - q_start
        pairs = rows * (hi - lo) + (hi_step - lo_step) * (rows * (rows - 1) // 2)
        # lines are straight, so what holds for the first and the last row holds between them
        later = (hi > q_start + 1) | (hi + hi_step * (rows - 1) > q_stop)
        earlier = (lo < q_start) | (lo + lo_step * (rows - 1) < q_stop - 1)
        sees_later, sees_earlier = (np.bincount(sequence, seen, count) > 0 for seen in (later, earlier))
        same = np.array([given.kv_length is None for given in batch.sequences])  # queries and keys are the same tokens
        cuts = [_cuts(*_runs(sequence, *steps), count) for steps in (_row_steps(slices), _key_steps(slices))]
        degree, left = (np.concatenate(parts) for parts in zip(*cuts, strict=True))
        return cls(np.bincount(sequence, pairs, count), same & ~(sees_later & sees_earlier), degree, left)


def _row_steps(slices: Ints) -> tuple[Ints, Ints, Ints]:
    """How many keys a row sees, as a sum of steps: from each position on, `constant + slope * row` more."""
    q_start, q_stop, lo, lo_step, hi, hi_step = slices.T
    slope = hi_step - lo_step
    constant = hi - lo - slope * q_start
    return np.concatenate([q_start, q_stop]), np.concatenate([constant, -constant]), np.concatenate([slope, -slope])


def _key_steps(slices: Ints) -> tuple[Ints, Ints, Ints]:
    """The same for the rows that see a key: those whose lo has come to it, without those whose hi has."""
    rows = slices[:, Q_STOP] - slices[:, Q_START]
    position, constant, slope = [], [], []
    for line, step, sign in ((LO, LO_STEP, 1), (HI, HI_STEP, -1)):
        at, moves = slices[:, line], slices[:, step]
        position += [at, at + rows]
        constant += [sign * np.where(moves, 1 - at, rows), sign * np.where(moves, rows - 1 + at, 0)]
        slope += [sign * moves, -sign * moves]
    return np.concatenate(position), np.concatenate(constant), np.concatenate(slope)


def _runs(sequence: Ints, position: Ints, constant: Ints, slope: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(sequence, length, least value, slope), each int64[N], of the runs in which a sum of steps rises straight; a run
    that falls is turned around."""
    sequence = np.tile(sequence, len(position) // len(sequence)) if len(sequence) else sequence
    order = np.lexsort((position, sequence))
    sequence, position = sequence[order], position[order]
    constant, slope = np.cumsum(constant[order])[:-1], np.cumsum(slope[order])[:-1]
    length = np.diff(position)
    some = (sequence[1:] == sequence[:-1]) & (length > 0)
    sequence, length, slope = sequence[:-1][some], length[some], slope[some]
    first = constant[some] + slope * position[:-1][some]
    last = first + slope * (length - 1)
    least = np.minimum(first, last)
    seen = (first > 0) | (last > 0)
    return sequence[seen], length[seen], least[seen], np.abs(slope[seen])


def _cuts(sequence: Ints, length: Ints, least: Ints, slope: Ints, count: int) -> tuple[Ints, Ints]:
    """float64[RUNS + 1, S] twice: the largest degree and those at the top of the longest runs, and the pairs left."""
    top = least + slope * (length - 1)
    degree = np.zeros((RUNS + 1, count), np.int64)
    np.maximum.at(degree[0], sequence, top)
    degree[1:] = degree[0]
    order = np.lexsort((-length, sequence))
    ordered = sequence[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    longest = place < RUNS
    degree[1 + place[longest], ordered[longest]] = top[order[longest]]
    left = []
    for most in degree[:, sequence]:
        below = np.clip((most - least) // np.maximum(slope, 1) + 1, 0, length)  # rows up to there have d at most
        below = np.where(slope > 0, below, np.where(least <= most, length, 0))
        sums = below * least + slope * (below * (below - 1) // 2) + (length - below) * most
        left.append(np.bincount(sequence, sums, count))
    return degree.astype(float), np.array(left)


@dataclass(frozen=True, slots=True, eq=False)
class _Cases:
    """Sequences, each with the bytes of some passes and one of its cuts. Arrays broadcast."""

    q_bytes: Ints  # c_q
    kv_bytes: Ints  # c_k
    tokens: Ints  # L
    pairs: Ints  # P
    degree: Ints  # d
    one_sided: Ints  # bool
    work: Ints  # W
    owned: Ints  # T, at most L

    def pick(self, index: Ints) -> _Cases:
        """Row `index[n]` of every column n."""
        columns = np.arange(len(index))
        table = np.broadcast_arrays(*(getattr(self, field.name) for field in fields(self)))
        return _Cases(*(values[index, columns][:, None] for values in table))


def _of_mask(profile: _Profile, tokens: Ints, pass_bytes: Ints, groups: int, work: float, owned: float) -> Ints:
    """float64[2]: the bound of each pass, on parts with these limits."""
    needs = (groups * profile.pairs > work) | (tokens > owned)  # others fit into one part as a whole
    index = np.tile(np.flatnonzero(needs & (profile.pairs > 0)), 2)
    if not len(index):
        return np.zeros(2)
    q_bytes, kv_bytes = np.repeat(pass_bytes, len(index) // 2, axis=1)
    exchanged = np.arange(len(profile.degree))[:, None] > RUNS
    cases = _Cases(
        np.where(exchanged, kv_bytes, q_bytes),
        np.where(exchanged, q_bytes, kv_bytes),
        tokens[index],
        profile.left[:, index],
        profile.degree[:, index],
        profile.one_sided[index],
        np.array(work),
        np.minimum(owned, tokens[index]),
    )
    whole = _whole_parts(cases.pick(np.zeros(len(index), int)), groups)
    priced = _priced(cases.pick(np.argmax(_estimate(cases, groups), axis=0)), groups)
    bounds: Ints = np.maximum(whole, priced)[:, 0].reshape(2, -1).sum(axis=1)
    return bounds


def _whole_parts(case: _Cases, groups: int) -> Ints:
    """The bound from whole parts, float64[N, 1]; of the first cut, which leaves all pairs."""
    own = np.where(case.one_sided, (case.owned + 1) / 2, case.owned)  # for each owned token
    z = np.maximum(0, groups * own - case.owned)
    work = np.maximum(0, groups * case.pairs - z * case.tokens)
    parts = np.floor(work / case.work)
    roots = parts * np.sqrt(case.work) + np.sqrt(work - parts * case.work)
    touched = 2 * np.sqrt(case.q_bytes * case.kv_bytes) * roots
    bound: Ints = np.maximum(touched * (1 - ROUNDING / 1000) - (case.q_bytes + case.kv_bytes) * case.tokens, 0)
    return bound


def _least_bytes(case: _Cases, pairs: Ints, owned: Ints) -> Ints:
    """f(w, t) with k a real number, which is never more."""
    c_q, c_k, d = case.q_bytes, case.kv_bytes, case.degree
    product = pairs + np.where(case.one_sided, np.maximum(owned * (owned - 1), 0) / 2, 0)
    most = np.maximum(owned, np.minimum(d, product / np.maximum(owned, 1e-30)))
    keys = np.clip(np.sqrt(c_q * product / c_k), owned, most)
    below = c_q * (np.maximum(owned, product / keys) - owned) + c_k * (keys - owned)  # t + k <= d
    # From there on each row has all of its d keys, but for the first owned ones. Unless rows must be fetched it is best
    # to fetch as few keys as will do.
    enough = d - 1 - np.sqrt(2 * np.maximum(owned * d - pairs, 0))
    k = np.maximum(np.where(case.one_sided, np.minimum(d - 1 - c_k * d / c_q, enough), 0), np.maximum(d - owned, 0))
    above = c_q * np.maximum((pairs + _lacking(case, k)) / d - owned, 0) + c_k * k
    bytes_: Ints = np.minimum(np.where(owned <= d, below, np.inf), above)
    return bytes_


def _lacking(case: _Cases, keys: Ints) -> Ints:
    """What rows with d keys each lack if k >= d - t keys are fetched, at least."""
    lack: Ints = np.where(case.one_sided, np.maximum(case.degree - 1 - keys, 0) ** 2 / 2, 0)
    return lack


def _estimate(case: _Cases, groups: int) -> Ints:
    """About what the prices will give, to choose a cut: as few parts as the limits allow, all alike."""
    parts = np.maximum(groups * case.pairs / case.work, case.tokens / case.owned)
    owned, most = case.tokens / parts, np.minimum(case.pairs, case.work)
    spread = groups * parts * _least_bytes(case, case.pairs / parts, owned)
    apart = groups * case.pairs / most * _least_bytes(case, most, owned)
    estimate: Ints = np.minimum(spread, apart)
    return estimate


class _Cells(NamedTuple):
    """What does not depend on prices, float64[N, cells]. A line `(a, b)` says that f(w1, t) >= a - b t."""

    start: Ints  # t0
    stop: Ints  # t1
    most: Ints  # w1
    own: Ints  # own / t at t1, with degrees cut at d
    least: Ints  # f(w1, t1)
    lines: tuple[tuple[Ints, Ints], ...]

    @classmethod
    def of_case(cls, case: _Cases) -> _Cells:
        c_q, c_k, d, one_sided = case.q_bytes, case.kv_bytes, case.degree, case.one_sided
        cells = min(max(CELLS_OF_ALL // len(case.owned), CELLS[0]), CELLS[1])
        edges = np.maximum(np.round(case.owned * (np.arange(cells + 1) / cells) ** 1.5), 1)
        start, stop = edges[:, :-1], edges[:, 1:]
        most = np.minimum(case.pairs, case.work)
        within = np.minimum(stop, d)
        own = within - np.where(one_sided, within * (within - 1) / 2, 0) / stop
        product = most + np.where(one_sided, start * (start - 1) / 2, 0)
        keys = np.clip(np.sqrt(c_q * product / c_k), start, np.maximum(start, np.minimum(d, product / start)))
        below = np.where(start <= d, c_q * np.maximum(start, product / keys) + c_k * keys, np.inf)
        k = np.maximum(np.where(one_sided, d - 1 - c_k * d / c_q, 0), np.maximum(d - stop, 0))
        above = c_q * (most + _lacking(case, k)) / d + c_k * k
        return cls(start, stop, most, own, _least_bytes(case, most, stop), ((below, c_q + c_k), (above, c_q)))


def _priced(case: _Cases, groups: int) -> Ints:
    """The bound from prices, float64[N, 1]: the best worth of a pair of a grid, and of a search around it."""
    cells = _Cells.of_case(case)
    income = groups * case.pairs

    def bound(worth: Ints) -> Ints:
        value: Ints = worth * income * (1 - ROUNDING / 1000) - case.tokens * _token_price(case, cells, groups, worth)
        return value

    most = _least_bytes(case, cells.most, np.zeros_like(cells.most)) / cells.most  # from there on t = 0 would gain
    of_grid = np.stack([bound(most * step / GRID) for step in range(1, GRID + 1)])
    best, top = np.maximum(of_grid.max(axis=0), 0), of_grid.argmax(axis=0) + 1
    low, high = most * (top - 1) / GRID, most * np.minimum(top + 1, GRID) / GRID
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    of_left, of_right = bound(left), bound(right)
    for _ in range(STEPS):
        best = np.maximum(best, np.maximum(of_left, of_right))
        down = of_left > of_right
        low, high = np.where(down, low, left), np.where(down, right, high)
        new = np.where(down, high - ratio * (high - low), low + ratio * (high - low))
        of_new = bound(new)
        left, right = np.where(down, new, right), np.where(down, left, new)
        of_left, of_right = np.where(down, of_new, of_right), np.where(down, of_left, of_new)
    return np.maximum(best, of_new)


def _token_price(case: _Cases, cells: _Cells, groups: int, worth: Ints) -> Ints:
    """float64[N, 1]: beta, not less than what makes an owned token worth its price when a pair is worth `worth`."""
    start, stop = cells.start, cells.stop
    gain = worth * cells.most
    lines = [np.maximum((gain - constant) / start, (gain - constant) / stop) + slope for constant, slope in cells.lines]
    far = np.maximum(*lines)
    gain = gain - cells.least
    far = np.minimum(far, np.maximum(gain / start, gain / stop))
    # gamma: none, where near and far meet if k = 0, and the least with which k = 0 is best
    meet = (far - worth * cells.own) / np.maximum(cells.most - start * cells.own, 1)
    none_fetched = (worth - case.kv_bytes / stop) / start * (1 + ROUNDING)
    gamma = np.clip(np.stack([np.zeros_like(start), meet, none_fetched]), 0, worth / stop)
    near = _near(case, cells, np.maximum(worth - gamma * start, 0), np.maximum(worth - gamma * stop, 0))
    price = gamma * case.work + groups * np.maximum(near, far - gamma * cells.most)
    beta: Ints = np.maximum(price.min(axis=0).max(axis=1, keepdims=True), 0)
    return beta


def _near(case: _Cases, cells: _Cells, most: Ints, least: Ints) -> Ints:
    """The largest (lambda w - f(w, t)) / t in a cell if no row is fetched; lambda lies between `least` and `most`."""
    c_k, d, half = case.kv_bytes, case.degree, np.where(case.one_sided, 0.5, 0.0)
    none_fetched = most * cells.own
    # what the first rows lack in keys if the best k > 0 is fetched, and this k
    lack = np.minimum(c_k / np.maximum(most, 1e-300), d - 1)
    k = d - np.where(case.one_sided, lack + 1, np.minimum(cells.stop, d))
    some_fetched = most * d - (half * most * lack**2 + c_k * k) / cells.stop
    lack = np.minimum(c_k / np.maximum(least, 1e-300), d) + 1
    possible = (most * cells.stop > c_k) & (cells.start * d - half * lack**2 <= cells.most)
    near: Ints = np.where(possible, np.maximum(none_fetched, some_fetched), none_fetched)
    return near
