"""Model presets, their parameters and FLOPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.model import ModelDescription, ModelError
from op_graphs.model_flops import attention_flops_per_token, model_flops_per_token
from op_graphs.parameters import (
    count_parameters,
    elements_of,
    layer_parameters,
    local_kv_heads,
    parameters_on_stage,
    tensor_parallel_problem,
)
from op_graphs.presets import list_models, load_model

# Exact counts: the safetensors metadata of the checkpoints on Hugging Face (a tied matrix counted once); for GPT-2's
# 12-layer shape with 2,048 positions, 124,439,808 of the published GPT-2 plus 1,024 more positions of 768.
PUBLISHED_COUNTS = {
    # The Hub says 81,324,862,720 of the checkpoint, with its head for further tokens.
    "qwen3-next-80b-a3b": 81_324_862_720 - 1_650_471_424,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt3-125m": 124_439_808 + 1024 * 768,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    # Without the correction that routers add to scores, which the checkpoints keep beside the parameters: one number
    # an expert, in every layer with experts.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama4-scout": 108_641_793_536,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron3-nano-30b-a3b": 31_577_937_344,
    # Of the 123,611,012,096 of the checkpoint 2,942,324,736 are the prediction head.
    "nemotron3-super-120b-a12b": 123_611_012_096 - 2_942_324_736,
    "qwen2.5-vl-7b": 8_292_166_656,
    # timm's vit_large_patch16_224 and vit_huge_patch14_224, heads of 1,000 classes.
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
}

# Millions, as printed: Brown et al. 2020, Table 2.1, and Korthikanti et al. 2022, Table 3 (models named by size).
# The tolerance covers the rounding of the names and what the authors left out (positions, for one).
ROUNDED_MILLIONS = {
    "gpt3-125m": (125, 0.005),
    "gpt3-350m": (350, 0.02),
    "gpt3-760m": (760, 0.005),
    "gpt3-1.3b": (1300, 0.015),
    "gpt3-2.7b": (2700, 0.025),
    "gpt3-6.7b": (6700, 0.01),
    "gpt3-13b": (13000, 0.015),
    "gpt3-175b": (175000, 0.005),
    "megatron-22b": (22000, 0.02),
    "megatron-175b": (175000, 0.005),
    "megatron-530b": (530000, 0.005),
    "megatron-1t": (1000000, 0.01),
    # arXiv:2504.03624: named by size.
    "nemotron-h-47b": (47000, 0.005),
    "nemotron-h-56b": (56000, 0.006),
    # Liu et al. 2025 (arXiv:2502.16982): 15.29 billion without the two matrices of 163,840 x 2,048.
    "moonlight-16b-a3b": (15290 + 2 * 335.544, 0.0005),
}

# Windows, sinks, biases of experts and image patches are held to closed forms in test_models_experts.py and
# test_models_vision.py.
WITH_PARTS = {"gpt-oss-20b", "gpt-oss-120b", "llama4-scout", "qwen2.5-vl-7b", "vit-l", "vit-h"}

LEARNED_POSITION_PRESETS = [name for name in list_models() if name.startswith(("gpt3", "megatron"))]

GQA = ModelDescription("gqa", 2, 512, 1536, heads=16, kv_heads=4, head_size=32, vocab_size=1000)


def test_every_preset_has_a_count_to_be_held_to():
    assert set(list_models()) == set(PUBLISHED_COUNTS) | set(ROUNDED_MILLIONS)


@pytest.mark.parametrize(("name", "count"), PUBLISHED_COUNTS.items())
def test_parameters_equal_the_published_count(name: str, count: int):
    assert count_parameters(load_model(name)) == count


@pytest.mark.parametrize(("name", "published"), ROUNDED_MILLIONS.items())
def test_parameters_agree_with_the_rounded_count(name: str, published: tuple[float, float]):
    millions, tolerance = published
    assert count_parameters(load_model(name)) / 1e6 == pytest.approx(millions, rel=tolerance)


@pytest.mark.parametrize("name", LEARNED_POSITION_PRESETS)
def test_gpt_parameters_equal_the_closed_form(name: str):
    # Narayanan et al. 2021 (arXiv:2104.04473), equation 2: P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)); it leaves
    # out the 2h of the final norm.
    m = load_model(name)
    layers, h = m.layers, m.hidden_size
    closed_form = 12 * layers * h * h + 13 * layers * h + (m.vocab_size + m.max_positions) * h
    assert count_parameters(m) == closed_form + 2 * h


@pytest.mark.parametrize("name", list_models())
def test_a_preset_names_itself_and_its_source(name: str):
    m = load_model(name)
    assert m.name == name
    assert "arXiv:" in m.source or "config.json of" in m.source
    assert tensor_parallel_problem(m, 1) == ""


def test_presets_are_listed_by_family_and_size():
    names = list_models()
    assert [n for n in names if n.startswith("gpt3")] == [
        "gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b",
    ]  # fmt: skip
    assert [n for n in names if n.startswith("megatron")][-1] == "megatron-1t"


# --- vocabulary padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "rows"),
    [
        ("gpt3-175b", 1, 50304),
        ("gpt3-175b", 2, 50432),
        ("gpt3-175b", 4, 50688),
        ("gpt3-175b", 8, 51200),
        ("llama3-8b", 2, 128256),
        ("llama3-8b", 4, 128512),
        ("megatron-1t", 8, 51200),
    ],
)
def test_vocabulary_is_padded_as_megatron_pads_it(name: str, tp: int, rows: int):
    m = load_model(name)
    assert m.padded_vocab(tp) == rows
    matrices = 1 if m.tied_embeddings else 2
    added = (rows - m.vocab_size) * m.hidden_size * matrices
    assert count_parameters(m, padded_for_tp=tp) == count_parameters(m) + added


# --- one rank's share -----------------------------------------------------------------------------------------------


def test_the_tensors_of_a_layer_come_in_forward_order_with_their_sharding():
    model = replace(GQA, qkv_bias=True, attention_output_bias=True, mlp_bias=True, qk_norm=True)
    found = [
        (t.name.removeprefix("decoder.layers.7."), t.shape, t.role, t.tp_axis, t.reduced_over_tp)
        for t in layer_parameters(model, tp=4, sequence_parallel=True, layer=7)
    ]
    assert found == [
        ("input_layernorm.weight", (512,), "norm", None, True),
        ("self_attention.linear_qkv.weight", (128 + 2 * 32, 512), "weight", 0, False),
        ("self_attention.linear_qkv.bias", (128 + 2 * 32,), "bias", 0, False),
        ("self_attention.q_layernorm.weight", (32,), "norm", None, True),
        ("self_attention.k_layernorm.weight", (32,), "norm", None, True),
        ("self_attention.linear_proj.weight", (512, 128), "weight", 1, False),
        ("self_attention.linear_proj.bias", (512,), "bias", None, True),
        ("pre_mlp_layernorm.weight", (512,), "norm", None, True),
        ("mlp.linear_fc1.weight", (2 * 384, 512), "weight", 0, False),
        ("mlp.linear_fc1.bias", (2 * 384,), "bias", 0, False),
        ("mlp.linear_fc2.weight", (512, 384), "weight", 1, False),
        ("mlp.linear_fc2.bias", (512,), "bias", None, True),
    ]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "expected"),
    [(1, True, set()), (4, False, {"q_layernorm", "k_layernorm"})],
)
def test_replicated_gradients_are_summed_only_where_each_rank_sees_a_part(
    tp: int, sequence_parallel: bool, expected: set[str]
):
    tensors = layer_parameters(replace(GQA, qk_norm=True), tp, sequence_parallel)
    assert {t.name.split(".")[-2] for t in tensors if t.reduced_over_tp} == expected


def test_the_first_stage_has_the_embedding_and_positions_and_the_last_norm_and_head():
    m = load_model("gpt3-125m")
    first = parameters_on_stage(m, range(6), 2, False, has_embedding=True, has_head=False)
    last = parameters_on_stage(m, range(6, 12), 2, False, has_embedding=False, has_head=True)
    assert [(t.name, t.shape) for t in first[:2]] == [
        ("embedding.word_embeddings.weight", (50432 // 2, 768)),
        ("embedding.position_embeddings.weight", (2048, 768)),
    ]
    assert [(t.name, t.shape) for t in last[-3:]] == [
        ("decoder.final_layernorm.weight", (768,)),
        ("decoder.final_layernorm.bias", (768,)),
        ("output_layer.weight", (50432 // 2, 768)),
    ]
    assert [t.name for t in first + last if t.tied] == [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    ]
    assert [t.layer for t in last if t.role == "weight"][::4] == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["llama3.2-1b", "gpt3-350m", "qwen3-0.6b"])
def test_a_tied_head_is_a_tensor_of_its_own_only_across_stages(name: str):
    m = load_model(name)
    whole = parameters_on_stage(m, range(m.layers), 1, False, has_embedding=True, has_head=True)
    split = parameters_on_stage(m, range(3), 1, False, has_embedding=True, has_head=False)
    split += parameters_on_stage(m, range(3, m.layers), 1, False, has_embedding=False, has_head=True)
    assert elements_of(whole) == count_parameters(m, padded_for_tp=1)
    assert elements_of(split) == elements_of(whole) + m.padded_vocab() * m.hidden_size


@given(
    heads_per_group=st.integers(1, 8),
    kv_heads=st.integers(1, 8),
    head_size=st.sampled_from([32, 64, 128]),
    tp=st.sampled_from([1, 2, 4, 8]),
    bias=st.booleans(),
    tied=st.booleans(),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    activation=st.sampled_from(["swiglu", "gelu"]),
)
@settings(max_examples=60, deadline=None)
def test_the_shards_of_all_ranks_together_are_the_model(
    heads_per_group, kv_heads, head_size, tp, bias, tied, norm, activation
):
    heads = heads_per_group * kv_heads
    model = ModelDescription(
        "m", 3, 256, 1024, heads, kv_heads, head_size, 999,
        activation=activation, norm=norm, qkv_bias=bias, attention_output_bias=bias, mlp_bias=bias,
        tied_embeddings=tied,
    )  # fmt: skip
    if tensor_parallel_problem(model, tp):
        with pytest.raises(ModelError, match=f"tp {tp} does not fit m"):
            parameters_on_stage(model, range(3), tp, True, has_embedding=True, has_head=True)
        return
    local = parameters_on_stage(model, range(3), tp, True, has_embedding=True, has_head=True)
    gathered = sum(t.elements * (1 if t.tp_axis is None else tp) for t in local)
    replicated_heads = tp * local_kv_heads(model, tp) - kv_heads
    copies = 3 * 2 * replicated_heads * head_size * (256 + bias)
    assert gathered == count_parameters(model, padded_for_tp=tp) + copies


@pytest.mark.parametrize(
    ("model", "tp", "heads_a_rank"),
    [
        ("llama3-8b", 1, 8),
        ("llama3-8b", 8, 1),
        ("llama3-8b", 16, 1),
        ("qwen2.5-3b", 4, 1),
        ("llama2-7b", 8, 4),
    ],
)
def test_each_rank_has_at_least_one_key_value_head(model: str, tp: int, heads_a_rank: int):
    m = load_model(model)
    assert tensor_parallel_problem(m, tp) == ""
    assert local_kv_heads(m, tp) == heads_a_rank


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        (
            load_model("llama3-8b"),
            3,
            "tp 3 does not fit llama3-8b: 32 heads do not divide by it; .* ffn_size 14336 .* is 2",
        ),
        (load_model("qwen2.5-7b"), 8, "28 heads do not divide by it. The nearest tp that fits is 4"),
        (load_model("llama3-8b"), 64, "32 heads do not divide by it. The nearest tp that fits is 32"),
        (load_model("llama3-8b"), 0, "it must be at least 1. The nearest tp that fits is 1"),
        (replace(GQA, heads=24, kv_heads=6), 4, "6 key-value heads do not divide by it, nor it by them"),
    ],
)
def test_a_tp_that_does_not_fit_says_why_and_what_would(model: ModelDescription, tp: int, message: str):
    with pytest.raises(ModelError, match=message):
        parameters_on_stage(model, range(2), tp, False, has_embedding=True, has_head=True)


def test_learned_positions_take_the_sequence_length_where_the_model_leaves_them_open():
    open_ended = replace(load_model("gpt3-125m"), max_positions=0)
    assert count_parameters(open_ended, seq_len=2048) == count_parameters(load_model("gpt3-125m"))
    with pytest.raises(ModelError, match="gpt3-125m has learned positions: give max_positions"):
        count_parameters(open_ended)


# --- model FLOPs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNED_POSITION_PRESETS)
def test_gpt_flops_equal_the_closed_form(name: str):
    # Korthikanti et al. 2022 (arXiv:2205.05198), equation 7, for one token: 72 L h^2 (1 + s/(6h) + v/(12 h L)).
    m = load_model(name)
    h, s, vocab = m.hidden_size, 2048, m.padded_vocab(8)
    closed_form = 72 * m.layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * m.layers))
    flops = model_flops_per_token(m, s, causal=False, convention="megatron", tp=8)
    assert flops == pytest.approx(closed_form, rel=1e-12)


def test_palm_counts_six_a_parameter_and_full_attention():
    # 6 N + 12 L H Q T with N without the embedding table, for Llama 3 8B at 8,192 tokens.
    n = 8_030_261_248 - 128_256 * 4096
    expected = 6 * n + 12 * 32 * 32 * 128 * 8192
    assert model_flops_per_token(load_model("llama3-8b"), 8192, convention="palm") == expected


def test_palm_counts_a_tied_head_like_an_untied_one():
    tied = load_model("llama3.2-1b")
    untied = replace(tied, tied_embeddings=False)
    assert model_flops_per_token(tied, 4096, convention="palm") == model_flops_per_token(
        untied, 4096, convention="palm"
    )


@pytest.mark.parametrize("name", sorted(set(list_models()) - WITH_PARTS))
@pytest.mark.parametrize("causal", [True, False])
def test_palm_exceeds_the_operators_by_what_is_no_matrix(name: str, causal: bool):
    m = load_model(name)
    kinds = [(m.letter(layer), m.mixer(layer)) for layer in range(m.layers)]
    layers = {kind: layer for layer, kind in enumerate(kinds)}
    vectors = sum(
        times * sum(t.elements for t in layer_parameters(m, layer=layers[kind]) if t.role in ("norm", "bias"))
        for kind, times in Counter(kinds).items()
    )
    vectors += m.hidden_size * (2 if m.norm == "layernorm" else 1)
    palm = model_flops_per_token(m, 4096, causal, "palm")
    assert palm - model_flops_per_token(m, 4096, causal, "operators") == 6 * vectors


@pytest.mark.parametrize(
    ("convention", "halved_by_default"), [("operators", True), ("palm", False), ("megatron", True)]
)
def test_the_causal_mask_halves_attention_and_nothing_else(convention, halved_by_default: bool):
    m = load_model("qwen3-8b")
    full = model_flops_per_token(m, 4096, False, convention)
    half = model_flops_per_token(m, 4096, True, convention)
    assert full - half == 3 * attention_flops_per_token(m, 4096, causal=True)
    assert model_flops_per_token(m, 4096, convention=convention) == (half if halved_by_default else full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"convention": "chinchilla"}, "'chinchilla' is not one of operators, palm, megatron"),
        ({"seq_len": 0}, "seq_len 0 and tp 1 must both be at least 1"),
    ],
)
def test_flops_refuse_what_has_no_meaning(arguments: dict, message: str):
    with pytest.raises(ModelError, match=message):
        model_flops_per_token(load_model("llama3-8b"), **{"seq_len": 4096, **arguments})


def test_the_table_of_the_docs_is_what_the_code_gives():
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    printed = {row[0]: row[1:] for row in rows if row[0] in list_models()}
    columns = [
        ("operators", True),
        ("operators", False),
        ("megatron", True),
        ("megatron", False),
        ("palm", False),
    ]
    assert len(printed) == 4
    for name, figures in printed.items():
        computed = [
            model_flops_per_token(load_model(name), 4096, causal, kind, tp=8) for kind, causal in columns
        ]
        assert figures == [f"{flops / 1e9:.2f}" for flops in computed]
