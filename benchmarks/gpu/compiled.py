"""Compile every configuration of the Triton kernels, without a GPU, and say what each takes of one.

    PYTHONPATH=src python -m benchmarks.gpu.compiled [--targets 90] [--dtypes bfloat16] [--dims 128] [--out FILE.json]

For each kernel, shape and target: registers per thread, bytes of stack per thread (what did not fit into registers is
spilled there), shared memory, and the matrix instructions in it. Exits 1 where a kernel takes more than its target has.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dyncp.ir.shape import AttentionShape
from dyncp.runtime.kernels.configs import tiles_of
from dyncp.runtime.kernels.triton import attention_constants, move_constants
from dyncp.runtime.kernels.triton_attention import attend_backward, attend_forward
from dyncp.runtime.kernels.triton_moves import copy_slots, merge_outputs, sum_gradients

SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STATISTICS = ("lse", "delta")
FP32 = (*STATISTICS, "o", "dq", "dk", "dv")
VARIED = ((128, 128), "bfloat16", 90)  # what is also compiled with a softcap, and for an odd number of heads
ODD_HEADS = 7  # in a head group; then slots may lie at multiples of 8 bytes only
OPTIONS = ("num_warps", "num_stages")
Case = tuple[str, Any, AttentionShape, int, dict[str, Any]]
MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def cases(dtypes: list[str], targets: list[int], dims: Sequence[tuple[int, int]] = DIMS) -> Iterator[Case]:
    """Name, kernel, shape, target and constants of all that is compiled."""
    for dtype in dtypes:
        for each in dims:
            shape = AttentionShape(8, 2, *each, dtype)
            for target in targets:
                yield from attention_cases("", shape, target, {"UNIT": 16, "SOFTCAP": False})
                if (each, dtype, target) == VARIED:
                    yield from attention_cases(", softcap", shape, target, {"UNIT": 16, "SOFTCAP": True})
                    odd = AttentionShape(ODD_HEADS, 1, *each, dtype)
                    yield from attention_cases(", odd heads", odd, target, {"UNIT": 8, "SOFTCAP": False})
                for kernel in (merge_outputs, sum_gradients, copy_slots):
                    yield kernel.__name__, kernel, shape, target, move_constants(shape, kernel, 16)


def attention_cases(name: str, shape: AttentionShape, target: int, settings: dict[str, Any]) -> Iterator[Case]:
    """Both passes."""
    forward, backward = tiles_of(shape, target)
    yield f"forward{name}", attend_forward, shape, target, attention_constants(shape, forward) | settings
    yield f"backward{name}", attend_backward, shape, target, attention_constants(shape, backward) | settings


def source(kernel: Any, shape: AttentionShape, constants: dict[str, Any]) -> ASTSource:
    """A kernel as the runtime would compile it for tensors of this shape."""
    signature, known, attributes = {}, dict(constants), {}
    for number, name in enumerate(kernel.arg_names):
        field, _, part = name.rpartition("_")
        aligned = True
        if name in known:
            signature[name] = "constexpr"
            continue
        if name in ("arena", "kept"):
            signature[name] = "*u8"
        elif part == "local":
            signature[name] = "*" + ("fp32" if field in FP32 else TYPES[shape.dtype])
        elif part in ("pitch", "head"):
            signature[name], aligned = "i32", field not in STATISTICS
            if field in STATISTICS and part == "head":
                signature[name], known[name] = "constexpr", 1
        elif name in ("scale", "softcap"):
            signature[name], aligned = "fp32", False
        else:
            signature[name] = "*i32"  # tables
        if aligned:
            attributes[number,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in known.items()}
    return ASTSource(kernel, signature, places, attributes)


def compiled(name: str, kernel: Any, shape: AttentionShape, target: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel, and what it takes."""
    began_s = time.perf_counter()
    options = {option: constants[option] for option in OPTIONS if option in constants}
    code = {key: value for key, value in constants.items() if key not in OPTIONS}
    made = triton.compile(source(kernel, shape, code), target=GPUTarget("cuda", target, 32), options=options)
    registers, stack = resources(made.asm["cubin"])
    ptx = made.asm["ptx"]
    return {
        "kernel": name,
        "dims": [shape.head_dim, shape.value_dim],
        "dtype": shape.dtype,
        "target": target,
        "registers": registers,
        "stack_bytes": stack,
        "shared_kb": made.metadata.shared / 1024,
        "matrix": sum(ptx.count(instruction) for instruction in MATRIX.values()),
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx)),
        "waits": waits_in_loops(made.asm["ttgir"]),
        "seconds": time.perf_counter() - began_s,
    }


def waits_in_loops(ir: str) -> list[int]:
    """How often each innermost loop waits for what it loads. More than a few times in one go through a loop, and it
    loads one thing after the other, none of them ahead."""
    loops = [part.split("scf.yield")[0] for part in ir.split("scf.for")[1:]]
    return [loop.count("ttg.async_wait") for loop in loops]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of each thread, as NVIDIA's own tool reads them from the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    registers, stack = found[-1]
    return int(registers), int(stack)


def line(row: dict[str, Any]) -> str:
    """One row of the report."""
    dims = "/".join(map(str, row["dims"]))
    return (
        f"{row['kernel']:22} {dims:>8} {row['dtype']:9} sm_{row['target']:<4} {row['registers']:>9} "
        f"{row['stack_bytes']:>6} {row['shared_kb']:>10.0f} {row['matrix']:>7} {row['seconds']:>8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100], choices=list(SHARED_KB))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(TYPES))
    parser.add_argument("--dims", type=int, nargs="+", choices=[d for d, _ in DIMS], help="of keys; all when left out")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    arguments = parser.parse_args()
    print(f"{'kernel':22} {'dims':>8} {'dtype':9} {'target':7} registers  stack  shared KB  matrix  seconds")
    rows = []
    dims = [each for each in DIMS if not arguments.dims or each[0] in arguments.dims]
    for case in cases(arguments.dtypes, arguments.targets, dims):
        rows.append(compiled(*case))
        print(line(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    too_large = [row for row in rows if row["shared_kb"] > SHARED_KB[row["target"]]]
    print(f"{len(rows)} kernels compiled, {len(too_large)} of them too large for their target")
    sys.exit(bool(too_large))


if __name__ == "__main__":
    main()
