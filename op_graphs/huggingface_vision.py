"""Vision-language models from Hugging Face configurations: Qwen2.5-VL, Llama 4; and ViT image classifiers."""

from __future__ import annotations

from typing import Any

from .huggingface_dense import llama_family, qwen_window
from .huggingface_experts import llama4_text
from .huggingface_keys import Keys, Reader, shortest_period
from .model import ModelDescription, PatchInput, VisionEncoder
from .model_checks import MOST_LAYERS

QWEN_IMAGE_SIZE = 448
"""Pixels of a side; Qwen2.5-VL takes images of any size, so its configuration names none."""


def _qwen2_5_vl(keys: Keys) -> dict[str, Any]:
    text = keys.section("text_config") if "text_config" in keys else keys
    default = None if "num_key_value_heads" in text else 32
    fields = llama_family(text, kv_heads=default) | {"qkv_bias": True}
    fields["tied_embeddings"] = keys.switch("tie_word_embeddings", fields["tied_embeddings"])
    fields |= qwen_window(text, fields["layers"])
    return fields | {"vision": _qwen_encoder(keys.section("vision_config"), fields["hidden_size"])}


def _qwen_encoder(keys: Keys, hidden_size: int) -> VisionEncoder:
    hidden, heads = keys.size("hidden_size"), keys.size("num_heads", 16)
    layers = keys.size("depth", 32, limit=MOST_LAYERS)
    patch = keys.size("patch_size", keys.size("spatial_patch_size", 14))
    merge = keys.size("spatial_merge_size", 2)
    if keys.size("out_hidden_size", hidden_size) != hidden_size and not keys.problems:
        keys.refuse("out_hidden_size", keys.raw("out_hidden_size"), f"must be hidden_size {hidden_size}")
    full = keys.layer_numbers("fullatt_block_indexes", layers)
    full = [layer for layer in (7, 15, 23, 31) if layer < layers] if full is None else full
    letters = "".join("f" if layer in full else "w" for layer in range(layers))
    side = keys.size("window_size", 112) // patch // merge * merge
    encoder = ModelDescription(
        name="encoder",
        layers=layers,
        hidden_size=hidden,
        ffn_size=keys.size("intermediate_size", 3420),
        heads=heads,
        kv_heads=heads,
        head_size=keys.head_size(hidden, heads),
        vocab_size=0,
        activation=keys.activation("hidden_act", "silu", gated=True),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        causal=False,
        window=side**2 if "w" in letters else 0,
        window_kind="chunked",
        window_pattern=shortest_period(letters),
        patches=PatchInput(
            image_size=QWEN_IMAGE_SIZE,
            patch_size=patch,
            channels=keys.size("in_channels", keys.size("in_chans", 3)),
            temporal_patch=keys.size("temporal_patch_size", 2),
            bias=False,
        ),
    )
    return VisionEncoder(encoder, merge, (hidden * merge**2,), projector_bias=True)


def _llama4(keys: Keys) -> dict[str, Any]:
    fields = llama4_text(keys.section("text_config"))
    if keys.raw("vision_config") is None:
        return fields
    return fields | {"vision": _llama4_encoder(keys.section("vision_config"))}


def _llama4_encoder(keys: Keys) -> VisionEncoder:
    hidden, heads = keys.size("hidden_size", 768), keys.size("num_attention_heads", 16)
    image, patch = keys.size("image_size", 448), keys.size("patch_size", 14)
    ratio = keys.raw("pixel_shuffle_ratio")
    ratio = 0.5 if ratio is None else ratio
    if ratio not in (1, 0.5, 0.25):
        keys.refuse("pixel_shuffle_ratio", ratio, "must be 1, 0.5 or 0.25")
        ratio = 1
    encoder = ModelDescription(
        name="encoder",
        layers=keys.size("num_hidden_layers", 34, limit=MOST_LAYERS),
        hidden_size=hidden,
        ffn_size=keys.size("intermediate_size", 5632),
        heads=heads,
        kv_heads=heads,
        head_size=keys.head_size(hidden, heads),
        vocab_size=0,
        activation=keys.activation("hidden_act", "gelu", gated=False),
        norm="layernorm",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        causal=False,
        patches=PatchInput(
            image_size=image,
            patch_size=patch,
            channels=keys.size("num_channels", 3),
            bias=False,
            class_token=True,
            position_rows=(image // patch) ** 2 + 1,
            pre_norm=True,
        ),
    )
    between = (keys.size("projector_input_dim", 4096), keys.size("projector_output_dim", 4096))
    return VisionEncoder(encoder, round(1 / ratio), between)


def _vit(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.size("hidden_size", 768), keys.size("num_attention_heads", 12)
    image, patch = keys.size("image_size", 224), keys.size("patch_size", 16)
    labels = keys.raw("id2label")
    classes = len(labels) if isinstance(labels, dict) else keys.size("num_labels", 2)
    return {
        "layers": keys.size("num_hidden_layers", 12, limit=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_size": keys.size("intermediate_size", 3072),
        "heads": heads,
        "kv_heads": heads,
        "head_size": keys.head_size(hidden, heads),
        "vocab_size": classes,
        "vocab_padding_multiple": 1,
        "activation": keys.activation("hidden_act", "gelu", gated=False),
        "norm": "layernorm",
        "positions": "none",
        "qkv_bias": keys.switch("qkv_bias", True),
        "attention_output_bias": True,
        "mlp_bias": True,
        "hidden_dropout": keys.dropout("hidden_dropout_prob", 0.0),
        "attention_dropout": keys.dropout("attention_probs_dropout_prob", 0.0),
        "causal": False,
        "head_bias": True,
        "patches": PatchInput(
            image_size=image,
            patch_size=patch,
            channels=keys.size("num_channels", 3),
            class_token=True,
            position_rows=(image // patch) ** 2 + 1,
        ),
    }


VISION_READERS: dict[str, Reader] = {"qwen2_5_vl": _qwen2_5_vl, "llama4": _llama4, "vit": _vit}
