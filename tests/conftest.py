"""What holds for every test: one thread per process, and examples that are the same on every run."""

import os

import pytest
from hypothesis import settings

# before torch is imported, and inherited by processes that tests start
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU; tests that compile kernels do it in processes without this

settings.register_profile("dyncp", derandomize=True, deadline=None, max_examples=25, print_blob=True)
settings.load_profile("dyncp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the plans in tests/golden anew")
