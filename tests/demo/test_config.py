from pathlib import Path

import pytest

from dyncp.demo import DemoConfig


def test_the_configuration_survives_json():
    config = DemoConfig(
        ranks=6, nodes=2, masks=("causal", "lambda:sink=1,window=9"), strategy="ring", data=Path("/tmp"), out=Path("x")
    )
    assert DemoConfig.from_json(config.to_json()) == config
    assert DemoConfig.from_json(DemoConfig(strategy="ring").to_json()) == DemoConfig(strategy="ring")
    assert (config.cluster.nodes, config.cluster.ranks) == (2, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"ranks": 4, "nodes": 3}, "4 ranks cannot be shared by 3 nodes"),
        ({"max_length": 1}, "max_length is 1"),
        ({"tokens": 100, "max_length": 200}, "lower max_length or raise tokens"),
        ({"masks": ()}, "no masks"),
        ({"masks": ("causal", "diagonal")}, "unknown mask kind 'diagonal'"),
        ({"masks": ("lambda:sink=4",)}, "mask kind 'lambda'"),
        ({"masks": ("prefix_lm:prefix=9000",)}, "prefix is 9000"),
        ({"strategy": "psychic"}, "unknown strategy 'psychic'"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"keep": "some"}, "unknown keep 'some'"),
        ({"kappa": -1}, "kappa is -1"),
        ({"workers": -1}, "workers is -1"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**{"strategy": "ring", **options})
