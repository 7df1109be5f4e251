"""Image encoders and vision-language models: counts, one rank's share, FLOPs, and wrong values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from op_graphs.model import ModelError, PatchInput
from op_graphs.model_flops import model_flops_per_token, vision_flops_per_image
from op_graphs.parameters import (
    count_parameters,
    count_vision_parameters,
    elements_of,
    parameters_on_stage,
    tensor_parallel_problem,
    vision_parameters,
)
from op_graphs.presets import load_model, model_from_mapping


@pytest.mark.parametrize(
    ("name", "text"),
    # Published counts of the whole less those of the language model: Qwen2.5-7B; for Llama 4 the sum of its tensors.
    [("qwen2.5-vl-7b", 7_615_616_512), ("llama4-scout", 107_769_861_120)],
)
def test_encoder_and_language_model_are_the_published_whole(name: str, text: int):
    m = load_model(name)
    assert count_parameters(replace(m, vision=None)) == text
    assert count_parameters(m) == text + count_vision_parameters(m)


@pytest.mark.parametrize(
    ("name", "patches", "tokens"),
    [("qwen2.5-vl-7b", 1024, 256), ("llama4-scout", 576, 144), ("vit-l", 196, None), ("vit-h", 256, None)],
)
def test_an_image_has_its_tokens(name: str, patches: int, tokens: int | None):
    m = load_model(name)
    encoder = m.vision.encoder if m.vision else m
    assert encoder.patches is not None
    assert encoder.patches.patches == patches
    assert (m.vision.tokens_per_image if m.vision else None) == tokens


def test_a_classifier_begins_with_patches_and_ends_with_classes():
    m = load_model("vit-l")
    tensors = parameters_on_stage(m, range(24), 2, False, has_embedding=True, has_head=True)
    assert [(t.name, t.shape) for t in tensors[:4]] == [
        ("embedding.patch_embedding.weight", (1024, 768)),
        ("embedding.patch_embedding.bias", (1024,)),
        ("embedding.class_token", (1, 1024)),
        ("embedding.position_embeddings.weight", (197, 1024)),
    ]
    assert [(t.name, t.shape, t.tp_axis) for t in tensors[-2:]] == [
        ("output_layer.weight", (500, 1024), 0),
        ("output_layer.bias", (500,), 0),
    ]


def test_the_encoder_lies_with_the_embedding_or_where_it_is_put():
    m = load_model("qwen2.5-vl-7b")
    first = parameters_on_stage(m, (0,), 1, False, has_embedding=True, has_head=False)
    bare = parameters_on_stage(m, (0,), 1, False, has_embedding=True, has_head=False, has_vision=False)
    alone = parameters_on_stage(m, (), 1, False, has_embedding=False, has_head=False, has_vision=True)
    assert [t for t in first if t.in_vision] == alone == vision_parameters(m)
    assert [t for t in first if not t.in_vision] == bare
    assert elements_of(alone) == 676_550_144
    assert [t.shape for t in alone[-4:]] == [(5120, 5120), (5120,), (3584, 5120), (3584,)]


def test_the_shards_of_the_encoder_together_are_the_encoder():
    m = load_model("llama4-scout")
    local = vision_parameters(m, tp=4)
    gathered = sum(t.elements * (1 if t.tp_axis is None else 4) for t in local)
    assert gathered == count_vision_parameters(m) == 871_932_416
    # Of three linears behind each other the first two are cut as a pair.
    projector = [(t.shape, t.tp_axis) for t in local if t.name.startswith("vision_projection")]
    assert projector == [((1024, 5632), 0), ((4096, 1024), 1), ((5120, 4096), None)]


def test_tp_must_fit_the_encoder_too():
    m = load_model("qwen2.5-vl-7b")
    wide = replace(m, heads=32, head_size=112)
    assert "vision encoder: ffn_size 3420 does not divide by it" in tensor_parallel_problem(wide, 8)
    assert tensor_parallel_problem(wide, 4) == ""


def test_vit_flops_are_those_of_its_linears_over_all_patches():
    m = load_model("vit-l")
    per_image = 197 * model_flops_per_token(m, 197)
    linears = 197 * 24 * 12 * 1024**2 + 196 * 768 * 1024 + 1000 * 1024
    assert per_image == pytest.approx(6 * linears + 12 * 24 * 1024 * 197**2)
    # Dosovitskiy et al. and timm: 61.6 billion multiply-adds forward.
    assert per_image / 6 / 1e9 == pytest.approx(61.6, rel=0.01)
    assert model_flops_per_token(m, 197, causal=True) == model_flops_per_token(m, 197, causal=False)


def test_the_encoder_of_qwen_attends_within_windows_of_64_patches():
    m = load_model("qwen2.5-vl-7b")
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    linears = 1024 * (32 * layer + 1176 * 1280) + 256 * (5120**2 + 5120 * 3584)
    attention = 12 * 1280 * 1024 * (28 * 64 + 4 * 1024)
    assert vision_flops_per_image(m) == pytest.approx(6 * linears + attention)
    assert vision_flops_per_image(load_model("llama3-8b")) == 0


def test_the_language_model_is_counted_without_the_encoder():
    m = load_model("qwen2.5-vl-7b")
    for convention in ("operators", "palm", "megatron"):
        assert model_flops_per_token(m, 4096, convention=convention) == model_flops_per_token(
            load_model("qwen2.5-7b"), 4096, convention=convention
        )


def test_the_image_size_of_a_base_can_be_changed():
    changed = model_from_mapping(
        {"base": "qwen2.5-vl-7b", "vision": {"encoder": {"patches": {"image_size": 896}}}}
    )
    assert changed.vision is not None
    assert changed.vision.tokens_per_image == 1024
    assert count_parameters(changed) == count_parameters(load_model("qwen2.5-vl-7b"))


PATCHES = {"image_size": 224, "patch_size": 16}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "vit-l",
            {"patches": {"patch_size": 15}},
            "patches.image_size: 224 is not a multiple of patch_size 15; nearest: 210",
        ),
        (
            "vit-l",
            {"patches": {"position_rows": 100}},
            "patches.position_rows: 100 are fewer than the 197 tokens of an image",
        ),
        (
            "vit-l",
            {"positions": "learned"},
            "positions: the table of learned positions of patches is patches.position_rows",
        ),
        ("vit-l", {"causal": True}, "causal: image patches see each other; set causal: false"),
        ("vit-l", {"tied_embeddings": True}, "tied_embeddings: a model of image patches has no embedding"),
        ("llama4-scout", {"patches": PATCHES}, "vision: a model of image patches has no second encoder"),
        (
            "llama4-scout",
            {"vision": {"merge_size": 5}},
            "vision.merge_size: 5 does not divide the 24 patches of an image's side",
        ),
        (
            "llama4-scout",
            {"vision": {"projector_sizes": [0]}},
            "vision.projector_sizes: must be a list of whole numbers, not [0]",
        ),
        ("llama4-scout", {"vision": {"encoder": {"patches": None}}}, "vision.encoder.patches: is missing"),
        (
            "llama4-scout",
            {"vision": {"encoder": {"heads": 0}}},
            "vision.encoder.heads: must be a whole number from 1",
        ),
        (
            "llama4-scout",
            {"vision": {"encoder": {"vocab_size": 10}}},
            "vision.encoder.vocab_size: 10, but an encoder inside a model has no output head",
        ),
        (
            "llama4-scout",
            {"vision": {"encoder": {"kv_heads": 3}}},
            "vision.encoder.kv_heads: 3 does not divide heads 16",
        ),
    ],
)
def test_a_wrong_encoder_names_key_value_and_limit(model: str, changes: dict, message: str):
    with pytest.raises(ModelError) as error:
        model_from_mapping({"base": model, **changes})
    assert message in str(error.value)


def test_patches_of_several_frames_have_more_inputs():
    assert PatchInput(448, 14, temporal_patch=2).patch_elements == 2 * 3 * 14 * 14
