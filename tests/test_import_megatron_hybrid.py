"""Hybrid models in argument lists of Megatron-LM: patterns of layers, their stages and prediction heads."""

from __future__ import annotations

import pytest

from tests.megatron_lists import EXPERTS, problems_of, scenario_of

HYBRID = {
    "hybrid-layer-pattern": "M-M*|M-ME/*E/*E",
    "num-layers": None,
    "pipeline-model-parallel-size": 2,
    "mamba-num-heads": 16,
    "mamba-num-groups": 4,
    "mamba-state-dim": 64,
    "position-embedding-type": "none",
    "mtp-use-repeated-layer": True,
    "moe-latent-size": 128,
    **EXPERTS,
}


def test_a_hybrid_pattern_says_layers_stages_and_heads():
    scenario = scenario_of(HYBRID)
    model = scenario.model
    assert (model.layer_pattern, model.layers, model.mtp_pattern, model.mtp_layers) == (
        "M-M*M-ME",
        8,
        "*E",
        2,
    )
    assert (model.mtp_repeated, model.moe.latent_size) == (True, 128)
    assert (model.state_space.heads, model.state_space.head_size, model.state_space.state_size) == (
        16,
        64,
        64,
    )
    assert (scenario.parallel.layout, scenario.parallel.vpp) == ("Et*4|t*4mmL", 1)
    without_bars = {**HYBRID, "hybrid-layer-pattern": "M-M*M-ME", "mtp-num-layers": None}
    assert scenario_of(without_bars).parallel.layout is None
    chunks = scenario_of({**HYBRID, "hybrid-layer-pattern": "M-|M*|M-|ME"})
    assert (chunks.parallel.vpp, chunks.schedule) == (2, "interleaved-1f1b")


@pytest.mark.parametrize(
    ("shares", "pattern"),
    # By hand: 7 state spaces in 4 sections of 1.75; 7 of them in front of 3 MLPs, 2.33 each; 5 in 6 of 0.83.
    [
        ((0.3, 0.0), "MM*MM*M*MM"),
        ((0.0, 0.3), "MM-MMM-MM-"),
        ((0.5, 0.5), "-*-*-**-*-"),
        ((0.0, 0.0), "M" * 10),
    ],
)
def test_layers_are_allotted_by_shares(shares, pattern):
    arguments = {"hybrid-attention-ratio": shares[0], "hybrid-mlp-ratio": shares[1], "is-hybrid-model": True}
    assert scenario_of({**arguments, "num-layers": 10}).model.layer_pattern == pattern


def test_the_older_pattern_gives_the_same_model():
    older = {
        **HYBRID,
        "hybrid-layer-pattern": None,
        "hybrid-override-pattern": "M-M*M-ME",
        "mtp-hybrid-override-pattern": "*E",
        "mtp-num-layers": 2,
        "is-hybrid-model": True,
        "num-layers": 8,
    }
    assert scenario_of(older).model == scenario_of(HYBRID).model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid-layer-pattern": "M-MD|M"}, "'D' is no layer that is simulated; known are M, G, *, -, E"),
        (
            {"hybrid-layer-pattern": "M-|M-|M*"},
            "has 3 stages, which --pipeline-model-parallel-size 2 does not divide",
        ),
        (
            {"hybrid-layer-pattern": None, "hybrid-override-pattern": "M-M*M-ME", "num-layers": 9},
            "names 8 layers, --num-layers says 9",
        ),
        ({"hybrid-layer-pattern": "ME|M*/*E/E"}, "prediction heads of different layers have no rule"),
        ({"disable-mamba-mem-eff-path": True}, "keeps what each kernel of the scan reads"),
        ({"pipeline-model-parallel-layout": "Et*4|t*4mmL"}, "the pattern of layers says the stages already"),
    ],
)
def test_a_hybrid_pattern_that_cannot_be_is_refused(changes, message):
    assert message in problems_of({**HYBRID, **changes})
