import pytest

from benchmarks.network import table
from benchmarks.network.table import order_kept, result_text


def row(strategy, measured_s, predicted_s):
    spread = {"least_s": measured_s - 0.01, "most_s": measured_s + 0.01}
    passes = {"forward_s": measured_s / 3, "backward_s": measured_s * 2 / 3}
    figures = {"strategy": strategy, "link_bytes": 1e6, "measured_s": measured_s, "predicted_s": predicted_s}
    figures |= {"others_share": 0.02, "tokens": 1.5, "by_pairs_s": predicted_s * 2}
    return figures | spread | passes


@pytest.fixture
def cases():
    rows = [row("ring", 0.4, 0.3), row("dynamic", 0.2, 0.21), {"strategy": "ulysses", "refused": "too few heads"}]
    return [{"name": "single-16/causal", "tokens": 16, "sequences": 1, "strategies": rows}]


def test_the_table_says_what_was_measured_and_predicted(cases):
    link = dict.fromkeys(table.LINK_WORDS) | {"message_s": 1e-3, "bytes_per_s": 1e7, "duplex_bytes_per_s": 9e6}
    rate = {"bits_per_s": 100e6, "why": "chosen"}
    result = {"hosts": 4, "processors": 2, "rate": rate, "link": link, "slower": [1.0, 1.1]}
    result |= {"share": 0.35, "cores": None, "alone_s": 1e-3, "alone_priced_s": 2e-3}
    result["masks"] = [{"priced_s": 1.5, "measured_s": 1.0}]
    lines = result_text({**result, "cases": cases}).splitlines()
    assert lines[0].startswith("4 hosts on links of 100 Mbit/s")
    dynamic, ring = (next(line for line in lines if line.startswith(name)) for name in ("dynamic", "ring"))
    assert "each host has 0.350 of a processor; a block takes 1.00 ms, and 2.00 by the table; hosts at" in lines[3]
    assert lines[4] == "blocks with masks, by the table: +50% to +50% off, 50% in the median"
    assert dynamic.split() == [
        "dynamic",
        "1.50",
        "1.0",
        "200",
        "190",
        "210",
        "67",
        "133",
        "1.00",
        "x",
        "210",
        "+5%",
        "420",
    ]
    assert ring.split()[-5:] == ["2.00", "x", "300", "-25%", "600"]
    assert "ulysses: too few heads" in lines
    assert "error of predictions, median of all: 15.0%; by strategy: ring 25%; dynamic 5%" in lines
    assert "with masks priced by their pairs alone: 80.0%" in lines
    assert "largest: 25%" in lines


def test_hosts_that_share_processors_say_so():
    text = table.computation_text({"share": None, "cores": 1.8})
    assert text == "hosts share the processors, as on 1.80 cores"


def test_only_pairs_that_differ_clearly_count(cases):
    assert order_kept(cases) == (1, 1)
    cases[0]["strategies"].append(row("zigzag", 0.405, 0.2))
    assert order_kept(cases) == (1, 2)
