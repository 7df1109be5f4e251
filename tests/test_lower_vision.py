"""Models that read images: work, communication, parameters and kept activations in closed form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.parameters import vision_parameters
from op_graphs.vocabulary import Communication, MemoryCategory, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.test_lowering import assert_nothing_leaks, linear_flops, step_flops
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

HIDDEN, LAYERS, PATCH = 128, 3, 3 * 8 * 8
VIT: dict[str, Any] = {
    "name": "vit",
    "layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_size": 512,
    "heads": 4,
    "vocab_size": 100,
    "vocab_padding_multiple": 1,
    "activation": "gelu",
    "norm": "layernorm",
    "positions": "none",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "patches": {"image_size": 32, "patch_size": 8, "class_token": True, "position_rows": 17},
}
MEAN_POOLED = {**VIT, "patches": {"image_size": 32, "patch_size": 8, "position_rows": 16, "pre_norm": True}}
IMAGES = 4


def vit(model: dict[str, Any] = VIT, **changes: Any) -> Scenario:
    training = {"micro_batch_size": IMAGES, "num_microbatches": 2}
    return load_scenario(dense_mapping(model=model, training=training, **changes))


def layer_matrices() -> float:
    return 4 * HIDDEN * HIDDEN + 2 * HIDDEN * 512


@pytest.mark.parametrize("model", [VIT, MEAN_POOLED])
@pytest.mark.parametrize(
    "plan", [{}, {"tp": 4}, {"tp": 2, "dp": 2}, {"pp": 3, "dp": 2}, {"dp": 2, "zero": 3}]
)
def test_a_classifier_does_the_products_of_its_layers_patches_and_images(model, plan):
    scenario = vit(model, parallel=plan)
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    tokens, tp = 16 + model["patches"].get("class_token", False), scenario.parallel.tp
    assert scenario.training.seq_len == tokens
    # Attention in both directions: the whole square; 2 products forward, 5 backward (scores again).
    attention = 2 * 2.0 * LAYERS * HIDDEN * tokens**2
    matrices = 3 * 2.0 * LAYERS * layer_matrices() * tokens
    # Every tensor-parallel rank embeds all patches; an image has no gradient, so forward and weight gradient.
    patches = 2 * 2.0 * 16 * PATCH * HIDDEN * tp
    head = 3 * 2.0 * HIDDEN * 100
    image = matrices + 3.5 * attention + patches + head
    images = scenario.global_batch_size
    assert step_flops(graph, scenario) == pytest.approx(images * image, rel=1e-9)


def test_an_encoder_without_head_ends_at_its_norm():
    scenario = vit({**VIT, "vocab_size": 0, "head_bias": False})
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    kinds = set(graph.operations.kind.tolist())
    assert OpKind.LOSS not in kinds
    names = Counter(graph.strings[name] for name in graph.operations.name)
    assert names["final_norm"] == names["final_norm_backward"] == 2
    assert simulate(scenario).report["iteration_time_ms"] > 0


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    # Beside the layers: classifier's logits (3 in the loss), its input's gradient; with sequence parallelism the
    # gathers in front of pooling and behind the patches' gradient.
    [
        (False, {Communication.ALL_REDUCE: 4}),
        (True, {Communication.ALL_REDUCE: 4, Communication.ALL_GATHER: 2}),
    ],
)
def test_tensor_parallel_collectives_at_the_ends(sequence_parallel, expected):
    scenario = vit(MEAN_POOLED, parallel={"tp": 2, "sp": sequence_parallel})
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    operations = graph.operations
    rows = (operations.stream == Stream.TP) & (operations.layer < 0) & (operations.phase <= Phase.RECOMPUTE)
    found = Counter(operations.communication[rows].tolist())
    assert found == {kind: 2 * count for kind, count in expected.items()}


def test_images_are_kept_as_patches():
    graph = lower_scenario(vit())
    sizes = {graph.strings[n]: int(s) for n, s in zip(graph.buffers.name, graph.buffers.size, strict=True)}
    assert sizes["patches"] == 2 * IMAGES * 16 * PATCH
    assert sizes["pooled_output"] == 2 * IMAGES * HIDDEN
    assert sizes["softmax_fp32"] == 4 * IMAGES * 100


def test_mfu_of_a_classifier_counts_its_images():
    simulation = simulate(vit())
    report = simulation.report
    assert report["mfu"] == report["mfu_full_attention"] > 0
    images = report["tokens_per_second_per_gpu"] / 17
    flops = 3 * (
        2.0 * LAYERS * (layer_matrices() * 17 + 2 * HIDDEN * 17**2) + 2.0 * HIDDEN * (16 * PATCH + 100)
    )
    assert report["model_tflops_per_gpu"] * 1e12 == pytest.approx(images * flops, rel=1e-9)


# -- vision-language models --------------------------------------------------------------------------------------

ENCODER = {key: value for key, value in VIT.items() if key not in ("name", "vocab_size", "head_bias")}
VISION = {"merge_size": 2, "projector_sizes": [192], "projector_bias": True, "encoder": ENCODER}
THREE = {"merge_size": 2, "projector_sizes": [192, 192], "encoder": ENCODER}
ONE = {"merge_size": 1, "encoder": ENCODER}
JOINED = 4 * HIDDEN
LANGUAGE_HIDDEN = 256


def with_images(vision: dict[str, Any] = VISION, **changes: Any) -> Scenario:
    return load_scenario(dense_mapping(model__vision=vision, **changes))


PLANS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"pp": 2, "dp": 2},
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 2},
    {"tp": 2, "sp": True, "pp": 2, "layout": "E|t*4L"},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(
    ("vision", "tokens", "cut", "whole"),
    [
        # (linears shared by tensor-parallel ranks, linears each of them computes)
        (VISION, 4, JOINED * 192 + 192 * LANGUAGE_HIDDEN, 0),
        (THREE, 4, JOINED * 192 + 192 * 192, 192 * LANGUAGE_HIDDEN),
        (ONE, 16, 0, HIDDEN * LANGUAGE_HIDDEN),
    ],
)
def test_an_image_adds_the_encoder_and_the_projector(plan, images, vision, tokens, cut, whole):
    changes: dict[str, Any] = {"training__images_per_sample": images, "parallel": plan}
    scenario = with_images(vision, **changes)
    graph = lower_scenario(scenario)
    assert_nothing_leaks(graph)
    without = load_scenario(dense_mapping(parallel=plan))
    tp = scenario.parallel.tp
    # 17 tokens are padded to 18 for two ranks that share the sequence.
    length = 18 if scenario.parallel.sp and tp == 2 else 17
    encoder = 3 * 2.0 * LAYERS * layer_matrices() * length + 3.5 * 2 * 2.0 * LAYERS * HIDDEN * length**2
    image = encoder + 2 * 2.0 * 16 * PATCH * HIDDEN * tp + 3 * 2.0 * tokens * (cut + whole * tp)
    added = step_flops(graph, scenario) - step_flops(lower_scenario(without), without)
    assert added == pytest.approx(scenario.global_batch_size * images * image, rel=1e-9)


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"pp": 2}])
def test_the_encoder_lies_on_the_first_stage(plan):
    scenario, without = with_images(parallel=plan), load_scenario(dense_mapping(parallel=plan))
    graphs = lower_scenario(scenario), lower_scenario(without)

    def weights(graph: OpGraph, rank: int) -> int:
        buffers = graph.buffers
        rows = np.flatnonzero((buffers.rank == rank) & (buffers.category == MemoryCategory.WEIGHTS))
        return int(buffers.size[rows].sum())

    own = sum(t.elements for t in vision_parameters(scenario.model, scenario.parallel.tp))
    added = [weights(graphs[0], rank) - weights(graphs[1], rank) for rank in range(len(graphs[0].ranks))]
    assert added == [2 * own, *[0] * (len(added) - 1)]
    modules = np.array([graphs[0].strings[m] if m >= 0 else "" for m in graphs[0].operations.module])
    vision = np.char.startswith(modules, "vision_")
    assert set(graphs[0].operations.rank[vision].tolist()) == {0}


@pytest.mark.parametrize(
    "recompute", ["full", {"method": "block", "layers": 2}, {"modules": ["core_attn", "mlp"]}]
)
def test_recompute_holds_for_the_encoder_too(recompute):
    graph = lower_scenario(with_images(training__recompute=recompute))
    assert_nothing_leaks(graph)
    modules = np.array([graph.strings[m] if m >= 0 else "" for m in graph.operations.module])
    again = (graph.operations.phase == Phase.RECOMPUTE) & np.char.startswith(modules, "vision_model.")
    layers = {"full": 3, "block": 2}.get(
        recompute if isinstance(recompute, str) else recompute.get("method", ""), 3
    )
    assert len(set(graph.operations.layer[again].tolist())) == layers


def test_a_split_backward_of_a_model_with_images(tmp_path):
    (tmp_path / "split.csv").write_text("0F0,0I0,0W0\r\n")
    changes: dict[str, Any] = {"training__num_microbatches": 1, "parallel": {"dp": 2}}
    whole = lower_scenario(with_images(**changes))
    split = lower_scenario(with_images(**changes, schedule=str(tmp_path / "split.csv")))
    assert_nothing_leaks(split)
    names = [
        Counter(
            (g.strings[n], g.strings[m])
            for n, m in zip(g.operations.name, g.operations.module, strict=True)
            if m >= 0
        )
        for g in (whole, split)
    ]
    assert names[0] == names[1]


def test_image_tokens_of_the_report():
    """Model FLOPs of a step grow by those of the images in it."""
    reports = [
        simulate(s).report
        for s in (with_images(training__images_per_sample=2), load_scenario(dense_mapping()))
    ]
    flops = [r["model_tflops_per_gpu"] * 1e12 * r["iteration_time_ms"] / 1e3 for r in reports]
    encoder = 2.0 * LAYERS * (layer_matrices() * 17 + 2 * HIDDEN * 17**2) + 2.0 * HIDDEN * 16 * PATCH
    image = 3 * (encoder + 2.0 * 4 * (JOINED * 192 + 192 * LANGUAGE_HIDDEN))
    samples = 4
    assert flops[0] - flops[1] == pytest.approx(samples * 2 * image, rel=1e-9)
    assert linear_flops(with_images()) == linear_flops(load_scenario(dense_mapping()))


# -- the fields --------------------------------------------------------------------------------------------------


LANGUAGE = {**dense_mapping()["model"], "vision": VISION}


@pytest.mark.parametrize(
    ("model", "training", "parallel", "said"),
    [
        (
            VIT,
            {"seq_len": 16},
            {},
            "training.seq_len: 16 (from scenario) is not the 17 tokens that vit makes of an image",
        ),
        (
            VIT,
            {},
            {"tp": 2, "sp": True},
            "the 17 tokens of an image do not divide over tp = 2 ranks; set sp: false",
        ),
        (VIT, {}, {"cp": 2}, "parallel.cp: 2 (from scenario) vit reads images"),
        (VIT, {"images_per_sample": 2}, {}, "vit has no vision encoder; leave it out"),
        (LANGUAGE, {"seq_len": 128}, {"cp": 2}, "parallel.cp: 2 (from scenario) small reads images"),
        (
            LANGUAGE,
            {"seq_len": 128, "images_per_sample": 33},
            {},
            "4 tokens an image is 132, more than seq_len = 128",
        ),
        (LANGUAGE, {"seq_len": 128, "images_per_sample": 0}, {}, "must be a whole number from 1"),
        (LANGUAGE, {"seq_len": 128}, {"tp": 8}, "vision encoder: 4 heads do not divide by it"),
        (
            {**LANGUAGE, "vision": {**VISION, "projector_sizes": [190]}},
            {"seq_len": 128},
            {"tp": 4},
            "linear 0 of the vision projector, 190 x 512, does not divide by it",
        ),
    ],
)
def test_what_is_refused(model, training, parallel, said):
    with pytest.raises(ScenarioError) as error:
        load_scenario(dense_mapping(model=model, training=training, parallel=parallel))
    assert said in str(error.value)
    assert "has a problem" in str(error.value)


def test_a_scenario_writes_its_images_back():
    for scenario in (vit(), with_images(training__images_per_sample=3)):
        assert load_scenario(scenario_to_mapping(scenario)) == scenario
