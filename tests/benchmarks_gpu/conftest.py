"""Makes the benchmark's modules importable: they are no part of the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
