"""Planning ahead, measured: how much of it is hidden, and what plans, stores and the loader cost.

    PYTHONPATH=src python -m benchmarks.lookahead.run [--only hidden] [--quick] [--out FILE.json]

See docs/lookahead-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lookahead import hidden, latency, overhead, rate, remote, table
from benchmarks.lookahead.machine import described
from benchmarks.network.quiet import busy_share

SECTIONS: dict[str, Callable[[bool], dict[str, list[dict[str, Any]]]]] = {
    "hidden": hidden.measure,
    "rate": rate.measure,
    "stores": latency.measure,
    "loader": overhead.measure,
    "remote": remote.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be given several times")
    parser.add_argument("--quick", action="store_true", help="small and rough: whether everything runs")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": described(), "others_share": {}, "tables": {}}
    for name, measure in SECTIONS.items():
        if options.only and name not in options.only:
            continue
        result["others_share"][name] = busy_share(0.2 if options.quick else 2.0)
        busy = result["others_share"][name]
        print(f"bench-lookahead: {name}; other work takes {busy:.0%} of the processors", file=sys.stderr, flush=True)
        result["tables"] |= measure(options.quick)
    print(table.result_text(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
