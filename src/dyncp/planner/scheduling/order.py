"""The parts of the timeline scheduler that are compiled: in which order a rank fetches, by whom data enters a node, and
when each computation block runs."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit

FIRST = 1e6  # what work that is possible now counts, against work that needs more


@jit
def fetch_order(ptr: Ints, ends: Ints, away: Ints, near: Ints, work_s: Ints, fetch_s: Ints) -> Ints:
    """float64[M]: when a rank has each need: 0 for its own, then up to 1 for those that are near and up to 2 for the
    others, as a fraction of the time that fetching all of them takes.

    A rank fetches next what makes most computation possible for the time it takes: the work of the blocks whose other
    end is there; where none is, the work of all blocks that wait for it.

    Args:
        ptr: int64[R + 1], as in Needs.
        ends: int32[C, 2], as in Needs.
        away: bool[M], needs that are fetched.
        near: bool[M], needs that are fetched before all others.
        work_s: float64[C], seconds of the block at each place.
        fetch_s: float64[M], seconds that fetching takes.
    """
    needs = len(away)
    first, stop = np.full(needs + 1, 0), np.zeros(needs, np.int64)
    for place in range(len(ends)):
        for k in range(2):
            first[ends[place, k] + 1] += 1
    for need in range(needs):
        first[need + 1] += first[need]
        stop[need] = first[need]
    users = np.empty(2 * len(ends), np.int64)  # places, by need
    for place in range(len(ends)):
        for k in range(2):
            users[stop[ends[place, k]]] = place
            stop[ends[place, k]] += 1
    there = np.zeros(needs, np.bool_)
    gain, promise = np.zeros(needs), np.zeros(needs)  # work that it makes possible now, and in the end
    when = np.zeros(needs)
    for need in range(needs):
        there[need] = not away[need]
    todo = np.empty(needs, np.int64)
    for rank in range(len(ptr) - 1):
        count = 0
        total_s, spent_s = np.zeros(2), np.zeros(2)  # of what is near, and of the rest
        for place in range(ptr[rank], ptr[rank + 1]):
            for k in range(2):
                need, other = ends[place, k], ends[place, 1 - k]
                if there[need]:
                    continue
                if stop[need] >= 0:  # seen first
                    stop[need] = -1
                    todo[count] = need
                    count += 1
                    total_s[0 if near[need] else 1] += fetch_s[need]
                promise[need] += work_s[place]
                if there[other]:
                    gain[need] += work_s[place]
        while count > 0:
            best, best_at = -1.0, 0
            for n in range(count):
                need = todo[n]
                value = (FIRST * gain[need] if gain[need] > 0 else promise[need]) / fetch_s[need]
                if near[need]:
                    value *= FIRST * FIRST
                if value > best:
                    best, best_at = value, n
            need = todo[best_at]
            count -= 1
            todo[best_at] = todo[count]
            there[need] = True
            part = 0 if near[need] else 1
            spent_s[part] += fetch_s[need]
            when[need] = part + spent_s[part] / total_s[part]
            for n in range(first[need], first[need + 1]):
                place = users[n]
                other = ends[place, 0] if ends[place, 1] == need else ends[place, 1]
                if not there[other]:
                    gain[other] += work_s[place]
    return when


@jit
def enter(
    entry_ptr: Ints, by_entry: Ints, rank: Ints, size_bytes: Ints, wave: Ints, last: int, ranks: int
) -> tuple[Ints, Ints]:
    """By which of its needs a piece enters a node, and when the others of the node have it.

    The first to want it fetches it, of several the rank that fetches least; the others have it a wave later.

    Returns:
        int32[E], the need of each entry; `wave` is changed in place.
    """
    way = np.empty(len(entry_ptr) - 1, np.int32)
    crossed = np.zeros((ranks, last + 1))
    for entry in range(len(way)):
        start, stop = entry_ptr[entry], entry_ptr[entry + 1]
        earliest = last
        for n in range(start, stop):
            earliest = min(earliest, wave[by_entry[n]])
        if stop - start > 1 and last > 1:
            earliest = min(earliest, last - 1)
        best, least = by_entry[start], np.inf
        for n in range(start, stop):
            need = by_entry[n]
            # who wants it later may fetch it for the others, but is asked only where it has less to fetch
            load = crossed[rank[need], earliest] + size_bytes[need] * (wave[need] - earliest)
            if load < least:
                best, least = need, load
        way[entry] = best
        crossed[rank[best], earliest] += size_bytes[best]
        wave[best] = earliest
        for n in range(start, stop):
            need = by_entry[n]
            if need != best:
                wave[need] = max(wave[need], earliest + 1)
    return way, wave


@jit
def fill_steps(
    ptr: Ints, ends: Ints, away: Ints, when: Ints, leave: Ints, wave: Ints, work_s: Ints, share: Ints
) -> Ints:
    """int32[C]: the step of the block at each place.

    All ranks work for about as long in a step, so that none holds up the others. While data comes in, a rank takes
    first what needs data of others, in the order in which it comes; blocks that need none fill up. When all is there it
    finishes one partial result after the other, so that they can leave, and what needs nothing of others covers the
    way of the last of them.

    Args:
        ptr: int64[R + 1], as in Needs.
        ends: int32[C, 2], as in Needs.
        away: bool[M], needs that are fetched.
        when: float64[M], the order of fetching, as `fetch_order` returns it.
        leave: float64[M], the same for the way back: what is fetched last is finished first.
        wave: int64[M], the step at which each need is met.
        work_s: float64[C].
        share: float64[S], the part of a rank's work that is done by the end of each step; the last is 1.
    """
    step = np.full(len(ends), -1, np.int32)
    for rank in range(len(ptr) - 1):
        start, stop = ptr[rank], ptr[rank + 1]
        order, ready = np.zeros(stop - start), np.zeros(stop - start, np.int64)
        total_s, last = 0.0, 0
        for place in range(start, stop):
            a, b = ends[place, 0], ends[place, 1]
            ready[place - start] = max(wave[a], wave[b])
            last = max(last, ready[place - start])
            order[place - start] = max(when[a], when[b]) if away[a] or away[b] else np.inf
            total_s += work_s[place]
        by_order = np.argsort(order, kind="mergesort")
        done_s, first = 0.0, 0
        for now in range(len(share)):
            if now == last:
                for place in range(start, stop):
                    order[place - start] = -max(leave[ends[place, 0]], leave[ends[place, 1]])
                by_order = np.argsort(order, kind="mergesort")
                first = 0
            limit_s = share[now] * total_s if now < len(share) - 1 else np.inf
            for n in range(first, len(by_order)):
                place = start + by_order[n]
                if step[place] >= 0 or ready[place - start] > now:
                    continue
                if done_s + work_s[place] / 2 > limit_s:
                    break
                done_s += work_s[place]
                step[place] = now
            while first < len(by_order) and step[start + by_order[first]] >= 0:
                first += 1
    return step


@jit
def last_steps(ends: Ints, step: Ints, needs: int) -> Ints:
    """int64[M]: the last step in which a block adds to each need's piece."""
    latest = np.zeros(needs, np.int64)
    for place in range(len(ends)):
        for k in range(2):
            latest[ends[place, k]] = max(latest[ends[place, k]], step[place])
    return latest
