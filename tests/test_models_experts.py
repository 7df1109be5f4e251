"""Experts, latent attention, windows and prediction heads: counts, one rank's share, FLOPs, and wrong values."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.model import LatentAttention, LayerOverride, MixtureOfExperts, ModelDescription, ModelError
from op_graphs.model_flops import (
    attended_tokens,
    attention_flops_per_token,
    layer_matrix_elements,
    model_flops_per_token,
    mtp_flops_per_token,
)
from op_graphs.parameters import (
    count_active_parameters,
    count_mtp_parameters,
    count_parameters,
    elements_of,
    expert_parallel_problem,
    layer_parameters,
    parameters_on_stage,
    tensor_parallel_problem,
)
from op_graphs.presets import list_models, load_model, model_from_mapping

SMALL_MOE = MixtureOfExperts(experts=8, top_k=2, expert_ffn_size=96)
SMALL = ModelDescription("small", 4, 64, 128, 4, 4, 16, 1000, moe=SMALL_MOE)
LATENT = LatentAttention(
    kv_lora_rank=32, qk_nope_head_size=16, qk_rope_head_size=8, v_head_size=20, q_lora_rank=48
)
SMALL_LATENT = replace(SMALL, latent_attention=LATENT, head_size=24)


# Billions active for a token. With the embedding: Mixtral (arXiv:2401.04088: 13B of 47B; 8x22B: 39B), DeepSeek-V2
# (arXiv:2405.04434: 21B), Qwen 3 (arXiv:2505.09388), Kimi K2 (arXiv:2507.20534, 32.6B). Without the embedding table,
# with the head: DeepSeek-V2-Lite (2.4B), DeepSeek-V3 (its weights' description: 36.7B with one 0.9B matrix), gpt-oss
# (arXiv:2508.10925, Table 1). Without both matrices: Moonlight (arXiv:2502.16982: 2.24B).
@pytest.mark.parametrize(
    ("name", "billions", "decimals", "matrices"),
    [
        ("mixtral-8x7b", 12.88, 2, 2),
        ("mixtral-8x22b", 39, 0, 2),
        ("deepseek-v2", 21, 0, 2),
        ("qwen3-30b-a3b", 3.3, 0, 2),
        ("qwen3-235b-a22b", 22, 0, 2),
        ("kimi-k2", 33, 0, 2),
        ("deepseek-v2-lite", 2.4, 0, 1),
        ("deepseek-v3", 36.6, 1, 1),
        ("gpt-oss-20b", 3.61, 2, 1),
        ("gpt-oss-120b", 5.13, 2, 1),
        ("llama4-scout", 17, 0, 1),
        ("moonlight-16b-a3b", 2.24, 2, 0),
    ],
)
def test_active_parameters_agree_with_the_published_figure(
    name: str, billions: float, decimals: int, matrices: int
):
    m = load_model(name)
    active = count_active_parameters(m, with_embedding=matrices == 2)
    active -= m.vocab_size * m.hidden_size if matrices == 0 else 0
    assert active / 1e9 == pytest.approx(billions, abs=0.6 * 10**-decimals)


def test_a_dense_model_is_active_as_a_whole():
    m = load_model("llama3-8b")
    assert count_active_parameters(m) == count_parameters(m) == 8_030_261_248
    assert count_active_parameters(m, with_embedding=False) == 8_030_261_248 - 128_256 * 4096


def test_the_prediction_head_of_deepseek_v3_makes_its_checkpoint_whole():
    # The safetensors metadata counts 3,918,786,560 BF16 and 680,571,043,840 F8_E4M3 elements: the model, the
    # prediction head, and its own copies of the two vocabulary matrices. The rest is fp32 (scales, corrections).
    m = load_model("deepseek-v3")
    copies = 2 * m.vocab_size * m.hidden_size
    assert count_parameters(m) + count_mtp_parameters(m) + copies == 3_918_786_560 + 680_571_043_840
    # Their description: 11.5 billion of its own; 2.4 billion active with the two matrices.
    assert count_mtp_parameters(m) / 1e9 == pytest.approx(11.5, rel=0.01)
    assert (count_mtp_parameters(m, active=True) + copies) / 1e9 == pytest.approx(2.4, rel=0.07)


def test_layers_with_experts_follow_offset_frequency_and_overrides():
    def moe_layers(**changes: int) -> list[int]:
        model = replace(SMALL, layers=8, moe=replace(SMALL_MOE, **changes))
        return [layer for layer in range(8) if model.is_moe_layer(layer)]

    assert moe_layers() == list(range(8))
    assert moe_layers(first_dense_layers=3) == [3, 4, 5, 6, 7]
    assert moe_layers(layer_frequency=2) == [0, 2, 4, 6]
    assert moe_layers(layer_frequency=2, layer_offset=1) == [1, 3, 5, 7]
    assert moe_layers(layer_frequency=3, layer_offset=2, first_dense_layers=3) == [5]
    forced = replace(
        SMALL, layers=8, layer_overrides=(LayerOverride(1, 4, moe=False), LayerOverride(3, 3, moe=True))
    )
    assert [layer for layer in range(8) if forced.is_moe_layer(layer)] == [0, 3, 5, 6, 7]


def test_a_prediction_head_is_a_layer_like_the_last():
    m = load_model("deepseek-v3")
    assert m.layer_kind(61) == m.layer_kind(60)
    assert m.layer_kind(0) != m.layer_kind(60)
    assert m.layer_ffn_size(0) == 18432
    assert m.layer_ffn_size(3) == 0


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gpt-oss-20b", [128, 0, 128, 0]),
        ("llama4-scout", [8192, 8192, 8192, 0]),
        ("llama3-8b", [0, 0, 0, 0]),
    ],
)
def test_windows_repeat_over_the_layers(name: str, windows: list[int]):
    m = load_model(name)
    assert [m.attention_window(layer) for layer in range(m.layers)] == windows * (m.layers // 4)


def test_llama_4_has_neither_positions_nor_norms_where_attention_is_full():
    m = load_model("llama4-scout")
    assert [m.is_rotary_layer(layer) for layer in range(4)] == [True, True, True, False]
    assert [m.has_qk_norm(layer) for layer in range(4)] == [True, True, True, False]
    assert not any("q_layernorm" in t.name for t in layer_parameters(m))


# --- one rank's share -----------------------------------------------------------------------------------------------


def found(
    model: ModelDescription, **degrees: int
) -> list[tuple[str, tuple[int, ...], int | None, bool, bool]]:
    return [
        (t.name.removeprefix("decoder.layers.0."), t.shape, t.tp_axis, t.reduced_over_tp, t.is_expert)
        for t in layer_parameters(model, sequence_parallel=True, **degrees)
    ]


def test_experts_are_dealt_over_ep_and_cut_over_etp_and_the_rest_over_tp():
    moe = replace(SMALL_MOE, shared_ffn_size=32, shared_gate=True, router_linear_bias=True, expert_bias=True)
    tensors = found(replace(SMALL, moe=moe), tp=2, ep=4, etp=3)
    assert tensors[tensors.index(("pre_mlp_layernorm.weight", (64,), None, True, False)) + 1 :] == [
        ("mlp.router.weight", (8, 64), None, True, False),
        ("mlp.router.bias", (8,), None, True, False),
        ("mlp.experts.linear_fc1.weight0", (64, 64), 0, False, True),
        ("mlp.experts.linear_fc1.weight1", (64, 64), 0, False, True),
        ("mlp.experts.linear_fc1.bias0", (64,), 0, False, True),
        ("mlp.experts.linear_fc1.bias1", (64,), 0, False, True),
        ("mlp.experts.linear_fc2.weight0", (64, 32), 1, False, True),
        ("mlp.experts.linear_fc2.weight1", (64, 32), 1, False, True),
        ("mlp.experts.linear_fc2.bias0", (64,), None, False, True),
        ("mlp.experts.linear_fc2.bias1", (64,), None, False, True),
        ("mlp.shared_experts.linear_fc1.weight", (32, 64), 0, False, False),
        ("mlp.shared_experts.linear_fc2.weight", (64, 16), 1, False, False),
        ("mlp.shared_experts.gate_weight", (1, 64), None, True, False),
    ]


def test_latent_attention_cuts_the_up_projections_and_replicates_the_down_projections():
    assert found(SMALL_LATENT, tp=2)[:9] == [
        ("input_layernorm.weight", (64,), None, True, False),
        ("self_attention.linear_q_down_proj.weight", (48, 64), None, True, False),
        ("self_attention.q_layernorm.weight", (48,), None, True, False),
        ("self_attention.linear_q_up_proj.weight", (2 * 24, 48), 0, False, False),
        ("self_attention.linear_kv_down_proj.weight", (32 + 8, 64), None, True, False),
        ("self_attention.kv_layernorm.weight", (32,), None, True, False),
        ("self_attention.linear_kv_up_proj.weight", (2 * (16 + 20), 32), 0, False, False),
        ("self_attention.linear_proj.weight", (64, 2 * 20), 1, False, False),
        ("pre_mlp_layernorm.weight", (64,), None, True, False),
    ]
    direct = found(replace(SMALL_LATENT, latent_attention=replace(LATENT, q_lora_rank=0)), tp=2)
    assert direct[1] == ("self_attention.linear_q_proj.weight", (2 * 24, 64), 0, False, False)


def test_sinks_are_one_number_a_head():
    sinks = [t for t in layer_parameters(load_model("gpt-oss-20b"), tp=8) if "softmax_offset" in t.name]
    assert [(t.shape, t.tp_axis) for t in sinks] == [((8,), 0)]


def test_prediction_heads_lie_behind_the_final_norm_with_a_copy_of_the_embedding():
    model = replace(SMALL_LATENT, mtp_layers=2)
    first = parameters_on_stage(model, (0, 1), 2, True, has_embedding=True, has_head=False)
    last = parameters_on_stage(model, (2, 3), 2, True, has_embedding=False, has_head=True, ep=8)
    behind = [t for t in last if not t.name.startswith("decoder.layers")]
    assert [t.name for t in behind if "transformer_layer" not in t.name] == [
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        *(
            f"mtp.layers.{k}.{part}.weight"
            for k in (0, 1)
            for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")
        ),
        "output_layer.weight",
    ]
    assert {t.layer for t in behind if t.name.startswith("mtp.layers.1")} == {5}
    assert next(t.shape for t in behind if "eh_proj" in t.name) == (32, 128)
    assert [t.name for t in first + last if t.tied] == ["embedding.word_embeddings.weight"] * 2
    whole = parameters_on_stage(model, range(4), 1, False, has_embedding=True, has_head=True)
    padding = 2 * (model.padded_vocab() - model.vocab_size) * model.hidden_size
    assert elements_of(whole) == count_parameters(model) + count_mtp_parameters(model) + padding
    assert not any(t.tied for t in whole)


@given(
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4]),
    shared=st.sampled_from([0, 64]),
    bias=st.booleans(),
    latent=st.booleans(),
    dense=st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_shards_of_all_ranks_together_are_the_model(ep, etp, tp, shared, bias, latent, dense):
    moe = replace(SMALL_MOE, shared_ffn_size=shared, expert_bias=bias, first_dense_layers=dense)
    model = replace(SMALL_LATENT if latent else SMALL, moe=moe)
    local = parameters_on_stage(model, range(4), tp, True, has_embedding=True, has_head=True, ep=ep, etp=etp)
    gathered = sum(
        t.elements
        * ((etp if t.is_expert else tp) if t.tp_axis is not None else 1)
        * (ep if t.is_expert else 1)
        for t in local
    )
    assert gathered == count_parameters(model, padded_for_tp=tp)


def test_a_stage_without_layers_with_experts_fits_any_degree_that_the_model_fits():
    m = load_model("deepseek-v3")
    dense = parameters_on_stage(m, range(3), 1, False, has_embedding=True, has_head=False, ep=64)
    assert not any(t.is_expert for t in dense)
    assert sum(t.is_expert for t in layer_parameters(m, layer=3, ep=64)) == 2 * 4


@pytest.mark.parametrize(
    ("name", "ep", "etp", "message"),
    [
        (
            "mixtral-8x7b",
            16,
            1,
            "ep 16 does not fit mixtral-8x7b: 8 experts do not divide by it. The nearest ep that fits is 8",
        ),
        (
            "mixtral-8x7b",
            8,
            3,
            r"etp 3 .*: 14336 \(expert_ffn_size\) does not divide by it. The nearest etp that fits is 2",
        ),
        ("mixtral-8x7b", 0, 1, "nearest ep that fits is 1"),
        ("llama3-8b", 2, 1, "ep 2 and etp 1 do not fit llama3-8b: it has no experts. Both must be 1"),
    ],
)
def test_degrees_that_experts_cannot_have_are_refused(name: str, ep: int, etp: int, message: str):
    m = load_model(name)
    with pytest.raises(ModelError, match=message):
        parameters_on_stage(m, (0,), 1, False, has_embedding=False, has_head=False, ep=ep, etp=etp)
    assert expert_parallel_problem(m, 1, 1) == ""


def test_tp_must_divide_what_is_there_to_cut():
    # No layer of this model is dense, so that the width of a dense layer does not matter.
    assert tensor_parallel_problem(replace(SMALL, ffn_size=127), 4) == ""
    shared = replace(SMALL, moe=replace(SMALL_MOE, shared_ffn_size=30))
    assert "shared_ffn_size 30 does not divide by it. The nearest tp" in tensor_parallel_problem(shared, 4)
    mixed = replace(SMALL, layer_overrides=(LayerOverride(0, 0, moe=False, ffn_size=50),))
    assert "ffn_size 50 does not divide by it" in tensor_parallel_problem(mixed, 4)
    assert "16 heads do not divide by it" in tensor_parallel_problem(load_model("moonlight-16b-a3b"), 32)


# --- model FLOPs ----------------------------------------------------------------------------------------------------


@given(
    seq_len=st.integers(1, 400),
    window=st.integers(1, 400),
    kind=st.sampled_from(["sliding", "chunked"]),
)
@settings(max_examples=100, deadline=None)
def test_attended_tokens_are_the_area_that_the_mask_leaves(seq_len: int, window: int, kind: str):
    # The continuous area, from the count of (query, key) pairs of the mask: the diagonal counts half, and so does the
    # last diagonal of a sliding window, which cuts through as many squares as lie on it.
    rows = range(seq_len)
    if kind == "chunked":
        pairs = sum(q % window + 1 for q in rows) - seq_len / 2
    else:
        pairs = sum(min(q + 1, window) for q in rows) - seq_len / 2
        pairs += max(seq_len - window, 0) / 2
    assert attended_tokens(seq_len, window, kind, causal=True) == pytest.approx(pairs / seq_len)


def test_a_window_as_long_as_the_sequence_is_full_attention():
    for causal in (True, False):
        assert attended_tokens(512, 512, "sliding", causal) == attended_tokens(512, 0, "sliding", causal)
        assert attended_tokens(512, 9999, "chunked", causal) == attended_tokens(512, 0, "chunked", causal)


def test_mixtral_costs_six_flops_for_each_active_matrix_element():
    # Per layer: q and o of 4096 x 4096, k and v of 4096 x 1024, two experts of three 4096 x 14336, a router of 8.
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    m = load_model("mixtral-8x7b")
    assert layer_matrix_elements(m) == layer
    full = model_flops_per_token(m, 4096, causal=False)
    assert full == 6 * (32 * layer + 32000 * 4096) + 12 * 32 * 4096 * 4096
    assert full - model_flops_per_token(m, 4096, False, "megatron") == 6 * 32 * 8 * 4096


def test_deepseek_v3_equals_the_sum_over_its_linears():
    m = load_model("deepseek-v3")
    attention = (
        7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    )
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    matrices = 61 * attention + 3 * dense + 58 * (9 * expert + 256 * 7168) + 129280 * 7168
    scores = 61 * 128 * (192 + 128) * 4096
    assert model_flops_per_token(m, 4096) == 6 * matrices + 3 * scores
    assert attention_flops_per_token(m, 4096, causal=False) == 2 * scores
    norms = 61 * (1536 + 512)
    routers = 58 * 256 * 7168
    assert (
        model_flops_per_token(m, 4096, convention="megatron") == 6 * (matrices + norms - routers) + 3 * scores
    )
    head = attention + 9 * expert + 256 * 7168 + 2 * 7168**2 + 129280 * 7168
    assert mtp_flops_per_token(m, 4096) == 6 * head + 3 * scores / 61
    megatron = 6 * (head + 3 * 7168 + 1536 + 512 - 256 * 7168) + 3 * scores / 61
    assert mtp_flops_per_token(m, 4096, convention="megatron") == megatron


def test_windows_count_as_each_convention_says():
    m = load_model("gpt-oss-20b")
    full, heads = 12 * 8192, 4 * 64 * 64
    exact = 12 * (128 - 128**2 / (2 * 8192))
    assert attention_flops_per_token(m, 8192, causal=True) == heads * (full / 2 + exact)
    assert attention_flops_per_token(m, 8192, causal=False) == heads * (full + 12 * 128)
    wide = replace(m, window=0, window_pattern="w")
    palm = model_flops_per_token(m, 8192, convention="palm")
    assert palm == model_flops_per_token(wide, 8192, convention="palm")
    difference = model_flops_per_token(wide, 8192, convention="megatron") - model_flops_per_token(
        m, 8192, convention="megatron"
    )
    assert difference == 3 * heads * (full - 12 * 128) / 2


def test_a_model_without_prediction_heads_spends_nothing_on_them():
    assert mtp_flops_per_token(load_model("kimi-k2"), 4096) == 0
    assert count_mtp_parameters(load_model("kimi-k2")) == 0


# --- model files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_models())
def test_a_model_written_out_reads_back_equal(name: str):
    written = json.loads(json.dumps(asdict(load_model(name))))
    assert model_from_mapping(written) == load_model(name)
    assert hash(model_from_mapping(written)) == hash(load_model(name))


def test_a_part_over_a_base_changes_key_by_key_and_null_takes_it_away():
    cut = model_from_mapping({"base": "deepseek-v3", "moe": {"experts": 64}, "mtp_layers": 0})
    v3 = load_model("deepseek-v3")
    assert v3.moe is not None
    assert cut == replace(v3, moe=replace(v3.moe, experts=64), mtp_layers=0, name="deepseek-v3-changed")
    dense = model_from_mapping({"base": "mixtral-8x7b", "moe": None})
    assert count_parameters(dense) == 7_241_732_096


@pytest.mark.parametrize(
    "overrides",
    [
        {"0-1": {"ffn_size": 32}, 3: {"window": 16, "moe": False}},
        {"0 - 1": {"ffn_size": 32}, "3": {"window": 16, "moe": False}},
        [{"first": 0, "last": 1, "ffn_size": 32}, {"first": 3, "last": 3, "window": 16, "moe": False}],
    ],
    ids=["ranges", "as JSON has them", "a list"],
)
def test_layers_are_overridden_by_number_or_range(overrides: object):
    model = model_from_mapping({**asdict(SMALL), "layer_overrides": overrides})
    assert model.layer_overrides == (
        LayerOverride(0, 1, ffn_size=32),
        LayerOverride(3, 3, window=16, moe=False),
    )
    assert [model.attention_window(layer) for layer in range(4)] == [0, 0, 0, 16]
    assert [model.layer_ffn_size(layer) for layer in range(4)] == [0, 0, 0, 128]


MOE = {"experts": 8, "top_k": 2, "expert_ffn_size": 96}
MLA = {"kv_lora_rank": 32, "qk_nope_head_size": 16, "qk_rope_head_size": 8, "v_head_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": 8}, "moe: must be a mapping of its keys, or null, not 8"),
        ({"moe": {"experts": 8, "top_k": 2}}, "moe.expert_ffn_size: is missing"),
        ({"moe": MOE | {"top_k": 9}}, "moe.top_k: 9 is more than the 8 experts"),
        ({"moe": MOE | {"topk": 2}}, "moe.topk: is not a key of this part of a model; did you mean top_k?"),
        (
            {"moe": MOE | {"experts": "many"}},
            "moe.experts: must be a whole number from 1 to 65536, not 'many'",
        ),
        (
            {"moe": MOE | {"router_score": "softmx"}},
            "moe.router_score: must be one of softmax, sigmoid, not 'softmx'",
        ),
        (
            {"moe": MOE | {"capacity_factor": 0}},
            "moe.capacity_factor: must be a number above 0, or null, not 0",
        ),
        (
            {"moe": MOE | {"layer_frequency": 2, "layer_offset": 2}},
            "moe.layer_offset: 2 must be below layer_frequency 2",
        ),
        ({"moe": MOE | {"first_dense_layers": 5}}, "moe.first_dense_layers: 5 is more than the 4 layers"),
        ({"moe": MOE | {"shared_gate": True}}, "moe.shared_gate: there are no shared experts to scale"),
        (
            {"moe": MOE | {"routing_groups": 3}},
            "moe.routing_groups: 3 does not divide the 8 experts; nearest: 2",
        ),
        (
            {"moe": MOE | {"routing_groups": 8}},
            "moe.top_groups: 1 of 8 groups hold fewer experts than top_k 2; nearest: 2",
        ),
        (
            {"latent_attention": MLA, "head_size": 16},
            "head_size: 16, but latent attention's is qk_nope_head_size",
        ),
        (
            {"latent_attention": MLA, "head_size": 24, "kv_heads": 2},
            "kv_heads: 2, but latent attention has as many as heads, 4",
        ),
        (
            {"latent_attention": MLA | {"qk_rope_head_size": 7}, "head_size": 23},
            "qk_rope_head_size: rotary positions turn pairs",
        ),
        (
            {"window_pattern": "wx"},
            "window_pattern: must be letters w (window) and f (full attention), one a layer, not 'wx'",
        ),
        ({"window_pattern": "wf"}, "window_pattern: wf, but window is 0, so every layer is full"),
        ({"rotary_on_full_attention": False}, "rotary_on_full_attention: false, but no layer has a window"),
        (
            {"layer_overrides": {"2-9": {"window": 8}}},
            "layer_overrides: 2-9 is beyond the last of 4 layers, 3",
        ),
        (
            {"layer_overrides": {"1": {"moe": True}}},
            "layer_overrides: 1-1 asks for experts, and the model has none",
        ),
        (
            {"layer_overrides": {"first": {"window": 8}}},
            "layer_overrides: must give a layer or a range of layers, as 0-2",
        ),
        (
            {"layer_overrides": {"1": {"heads": 8}}},
            "layer_overrides.1.heads: is not a key of this part of a model",
        ),
        (
            {"layer_overrides": {"1": {}}},
            "layer_overrides: 1-1 changes nothing; give ffn_size, window or moe",
        ),
        ({"layer_overrides": 3}, "layer_overrides: must map layers to changes, not 3"),
        (
            {"mtp_layers": 1, "causal": False},
            "mtp_layers: 1, but only a causal language model predicts further tokens",
        ),
        (
            {"vocab_size": 0},
            "vocab_size: must be at least 1; only an encoder of image patches has no vocabulary",
        ),
    ],
)
def test_a_wrong_part_names_key_value_and_limit(changes: dict, message: str):
    small = {key: value for key, value in asdict(replace(SMALL, moe=None)).items() if key != "name"}
    with pytest.raises(ModelError) as error:
        model_from_mapping({**small, **changes}, where="m.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("m.yaml: ")


def test_the_head_size_of_latent_attention_follows_from_its_parts():
    sizes = {"layers": 2, "hidden_size": 64, "ffn_size": 96, "heads": 4, "vocab_size": 10}
    model = model_from_mapping({**sizes, "latent_attention": MLA})
    assert (model.head_size, model.kv_heads, model.query_size) == (24, 4, 96)
    assert (model.value_head_size, model.attention_output_size) == (16, 64)
