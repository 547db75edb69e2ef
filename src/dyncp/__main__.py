"""`python -m dyncp` is the `dyncp` command."""

from __future__ import annotations

import sys

from dyncp.cli import main

if __name__ == "__main__":
    sys.exit(main())
