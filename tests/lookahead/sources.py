"""Streams, batch samplers and a view of draws that the tests of sources share."""

from __future__ import annotations

import numpy as np
from lookahead.loading import LENGTHS, Counting


class Stream:
    """Samples in an order that depends on the epoch; counts what was read."""

    def __init__(self, lengths=LENGTHS, shuffled=False):
        self.samples = Counting(lengths).samples
        self.shuffled = shuffled
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = range(len(self.samples))
        if self.shuffled:
            order = np.random.default_rng(self.epoch).permutation(len(self.samples))
        for index in order:
            self.read += 1
            yield {"input_ids": self.samples[index], "number": index}


class ByEpoch:
    """A batch sampler of single samples whose order depends on the epoch, as torch's DistributedSampler has it."""

    def __init__(self, samples):
        self.samples = samples
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in np.random.default_rng(self.epoch).permutation(self.samples):
            yield [index]


def content(draws):
    return [
        (d.iteration, d.step, d.ends_step, d.samples.tolist(), d.lengths.tolist(), d.num_label_tokens, d.digest)
        for d in draws
    ]
