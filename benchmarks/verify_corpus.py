"""A longer corpus of random batches than the tests': executes each plan and compares it with dense attention."""

import argparse
import sys

import torch

from dyncp.commands.verify import verify_cases
from dyncp.verify import random_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=int, default=2000, help="number of batches")
    parser.add_argument("--seed", type=int, default=1, help="the tests have seed 0")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are threads, and the tensors small
    return verify_cases((random_case(options.seed, number) for number in range(options.corpus)), options.corpus)


if __name__ == "__main__":
    sys.exit(main())
