"""Plain text tables, and numbers with their units."""

from __future__ import annotations

from collections.abc import Sequence

# (unit, its bytes, from how many bytes on); MB go up to 10,000, as plans are compared in MB
UNITS = (("GB", 10**9, 10**10), ("MB", 10**6, 10**6), ("kB", 10**3, 10**3))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of aligned columns: the first column to the left, the others to the right. A row may be
    shorter than the others; a row of one cell is printed as it is and does not widen the column."""
    count = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if 1 < len(row) > i), default=0) for i in range(count)]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(size_bytes: float) -> str:
    """Bytes in decimal units, three or more digits: `1.23 MB`, `1,484 MB`."""
    for unit, scale, least in UNITS:
        if size_bytes >= least:
            value = size_bytes / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{size_bytes:,.0f} B"


def format_seconds(time_s: float) -> str:
    """A duration: `1.23 s`, or `45.6 ms` below a second."""
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.1f} ms"
