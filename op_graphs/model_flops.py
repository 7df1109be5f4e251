"""Model FLOPs of a training step: the work MFU is measured against, in the conventions published figures use.

All conventions count forward and backward (three times the forward's matrix products) and no recomputation, and of a
mixture of experts those a token is sent to; they differ in attention under a mask and in which parameters count.
``docs/models.md`` has the table.
"""

from __future__ import annotations

from typing import Literal, get_args

from .adapters import count_adapter_parameters
from .model import MixtureOfExperts, ModelDescription, ModelError, WindowKind
from .parameters import count_active_parameters, count_vision_parameters
from .plan import LowRankAdapters

FlopsConvention = Literal["operators", "palm", "megatron"]

CAUSAL_BY_CONVENTION: dict[FlopsConvention, bool] = {"operators": True, "palm": False, "megatron": True}
"""Whether the convention, as its source states it, counts only the half of attention that the causal mask leaves."""


def model_flops_per_token(
    model: ModelDescription,
    seq_len: int,
    causal: bool | None = None,
    convention: FlopsConvention = "operators",
    *,
    tp: int = 1,
    lora: LowRankAdapters | None = None,
) -> float:
    """FLOPs of forward and backward for one token of a sequence of ``seq_len`` tokens.

    ``causal`` counts half of the attention products, ``None`` does as the convention's source does
    (:data:`CAUSAL_BY_CONVENTION`); a model whose attention is not causal is never halved. ``tp`` matters to
    ``megatron`` only, through the padding of the vocabulary. Heads for multi-token prediction are counted apart
    (:func:`mtp_flops_per_token`), and so is a vision encoder (:func:`vision_flops_per_image`); of a model of image
    patches a token is a patch, and ``seq_len`` the tokens of an image.

    - ``operators``: every matrix product of the model, with the tokenizer's vocabulary in the output head:
      6 * (layer matrices + head) + 12 * layers * heads * head size * seq_len, attention halved if causal; an
      attention window counts exactly (:func:`attended_tokens`).
    - ``palm``: 6 N + 12 * layers * heads * head size * seq_len (Chowdhery et al. 2022, arXiv:2204.02311, appendix B;
      torchtitan): N is every active parameter, biases and norms included, but for the embedding tables; the output
      head is in it whether tied or not. It knows no windows.
    - ``megatron``: ``num_floating_point_operations`` of Megatron-LM: as ``operators`` with the padded vocabulary,
      without router, with the norms of latent attention's ranks; a window halves like a sequence of its length
      (Megatron Bridge). Present versions halve attention; earlier ones, and Narayanan et al. 2021 (arXiv:2104.04473)
      and Korthikanti et al. 2022 (arXiv:2205.05198), do not: ``causal=False``.

    With ``lora`` frozen matrices have no weight gradient: they count 4 in the place of 6, and attention as before; the
    adapters' count 6, but not under ``megatron``, for which Megatron Bridge leaves them out.

    Raises:
        ModelError: for a convention of another name, or a ``seq_len`` or ``tp`` below 1.
    """
    _check(seq_len, tp, convention)
    attention = sum(
        _attention_of_layer(model, layer, seq_len, causal, convention) for layer in range(model.layers)
    )
    if convention == "palm":
        matrices = float(_parameters_beside_embedding(model, seq_len))
    else:
        layers = sum(layer_matrix_elements(model, layer, convention) for layer in range(model.layers))
        matrices = layers + _end_matrix_elements(model, seq_len, tp, convention)
    if lora is None:
        return 6.0 * matrices + 3 * attention
    adapters = 0 if convention == "megatron" else count_adapter_parameters(model, lora)
    return 4.0 * matrices + 6.0 * adapters + 3 * attention


def mtp_flops_per_token(
    model: ModelDescription,
    seq_len: int,
    causal: bool | None = None,
    convention: FlopsConvention = "operators",
    *,
    tp: int = 1,
) -> float:
    """FLOPs of forward and backward of the heads for multi-token prediction, for one token; 0 without them.

    A head is a linear of ``2 * hidden_size`` inputs, a layer like the last, and the output head once more. Megatron's
    own total contains them (with the norms: 3 * hidden size).

    Raises:
        ModelError: as :func:`model_flops_per_token`.
    """
    _check(seq_len, tp, convention)
    hidden, layer = model.hidden_size, model.layers
    vocab = model.padded_vocab(tp) if convention == "megatron" else model.vocab_size
    matrices = 2 * hidden * hidden + vocab * hidden + layer_matrix_elements(model, layer, convention)
    matrices += 3 * hidden if convention == "megatron" else 0
    attention = _attention_of_layer(model, layer, seq_len, causal, convention)
    return model.mtp_layers * (6.0 * matrices + 3 * attention)


def vision_flops_per_image(model: ModelDescription) -> float:
    """FLOPs of forward and backward of the vision encoder and projector for one image; 0 for a model without.

    Every matrix product, attention within its windows.

    Raises:
        ModelError: if the encoder has no patches.
    """
    if model.vision is None:
        return 0.0
    encoder = model.vision.encoder
    if encoder.patches is None:
        raise ModelError(f"the vision encoder of {model.name} has no patches")
    tokens = encoder.patches.tokens
    projector = sum(outputs * inputs for outputs, inputs in model.vision.projector_shapes(model.hidden_size))
    return tokens * model_flops_per_token(encoder, tokens) + 6.0 * projector * model.vision.tokens_per_image


def attention_flops_per_token(model: ModelDescription, seq_len: int, causal: bool) -> float:
    """Forward FLOPs of the two attention products (scores, and scores times values) of all layers, for one token."""
    return sum(
        _attention_of_layer(model, layer, seq_len, causal, "operators") for layer in range(model.layers)
    )


def attended_tokens(seq_len: int, window: int, kind: WindowKind, causal: bool) -> float:
    """Tokens that a token attends to, on average over a sequence; ``window`` 0 is full attention.

    Under a causal mask that is half of the sequence (the diagonal counts half, as published figures have it). A
    sliding window takes what lies before it away: the last ``window`` tokens of the triangle remain,
    window - window^2 / (2 seq_len). A chunked one leaves a triangle in each chunk.
    """
    if window == 0 or window >= seq_len:
        return seq_len / 2 if causal else float(seq_len)
    if kind == "chunked":
        rest = seq_len % window
        pairs = seq_len // window * window**2 + rest**2
        return pairs / seq_len / (2 if causal else 1)
    return window - window**2 / (2 * seq_len) if causal else float(window)


def layer_matrix_elements(
    model: ModelDescription, layer: int = 0, convention: FlopsConvention = "operators"
) -> int:
    """Elements of the matrices of a layer that a token passes through: multiply-adds of its linears."""
    count = _attention_matrix_elements(model, convention)
    matrices = 3 if model.gated else 2
    if model.moe is None or not model.is_moe_layer(layer):
        return count + matrices * model.hidden_size * model.layer_ffn_size(layer)
    width = model.moe.top_k * model.moe.expert_ffn_size + model.moe.shared_ffn_size
    router = 0 if convention == "megatron" else _router_matrix_elements(model, model.moe)
    return count + matrices * model.hidden_size * width + router


def _router_matrix_elements(model: ModelDescription, moe: MixtureOfExperts) -> int:
    return model.hidden_size * (moe.experts + moe.shared_gate)


def _attention_matrix_elements(model: ModelDescription, convention: FlopsConvention) -> int:
    hidden, latent = model.hidden_size, model.latent_attention
    if latent is None:
        return hidden * (2 * model.query_size + 2 * model.kv_size)
    norm = 1 if convention == "megatron" else 0
    rank = latent.q_lora_rank
    query = rank * (hidden + model.query_size + norm) if rank else hidden * model.query_size
    up = model.heads * (latent.qk_nope_head_size + latent.v_head_size)
    key_value = latent.kv_lora_rank * (hidden + up + norm) + hidden * latent.qk_rope_head_size
    return query + key_value + model.attention_output_size * hidden


def _end_matrix_elements(
    model: ModelDescription, seq_len: int, tp: int, convention: FlopsConvention
) -> float:
    """Multiply-adds a token of the output head, and of an encoder's patch embedding.

    A classifier's head sees one token of the image, its embedding every one but the class token.
    """
    vocab = model.padded_vocab(tp) if convention == "megatron" else model.vocab_size
    head = vocab * model.hidden_size
    if model.patches is None:
        return head
    patches = seq_len - model.patches.class_token
    return (head + patches * model.patches.patch_elements * model.hidden_size) / seq_len


def _attention_of_layer(
    model: ModelDescription, layer: int, seq_len: int, causal: bool | None, convention: FlopsConvention
) -> float:
    """Forward FLOPs of the two attention products of a layer, for one token."""
    halved = (CAUSAL_BY_CONVENTION[convention] if causal is None else causal) and model.causal
    window = model.attention_window(layer)
    if convention == "palm":
        attended = attended_tokens(seq_len, 0, model.window_kind, halved)
    elif convention == "megatron":
        attended = attended_tokens(min(seq_len, window or seq_len), 0, model.window_kind, halved)
    else:
        attended = attended_tokens(seq_len, window, model.window_kind, halved)
    return 2.0 * (model.query_size + model.attention_output_size) * attended


def _parameters_beside_embedding(model: ModelDescription, seq_len: int) -> int:
    active = count_active_parameters(model, seq_len=seq_len, with_embedding=False)
    positions = (model.max_positions or seq_len) * model.hidden_size if model.positions == "learned" else 0
    if model.patches is not None:
        positions = (model.patches.position_rows + model.patches.class_token) * model.hidden_size
    return active - positions - count_vision_parameters(model)


def _check(seq_len: int, tp: int, convention: str) -> None:
    if convention not in get_args(FlopsConvention):
        raise ModelError(
            f"FLOPs convention {convention!r} is not one of {', '.join(get_args(FlopsConvention))}"
        )
    if seq_len < 1 or tp < 1:
        raise ModelError(f"seq_len {seq_len} and tp {tp} must both be at least 1")
