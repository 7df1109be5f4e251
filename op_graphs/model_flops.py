"""Model FLOPs of a training step: the work MFU is measured against, in the conventions published figures use.

All conventions count forward and backward (three times the forward's matrix products) and no recomputation, and of a
mixture of experts those a token is sent to; they differ in attention under a mask and in which parameters count.
``docs/models.md`` has the table.
"""

from __future__ import annotations

from typing import get_args

from .adapters import count_adapter_parameters
from .flops_conventions import CAUSAL_BY_CONVENTION, FlopsConvention, attended_tokens
from .mixers import MIXERS
from .model import MixtureOfExperts, ModelDescription, ModelError
from .parameters import count_active_parameters, count_vision_parameters
from .plan import LowRankAdapters

__all__ = [
    "CAUSAL_BY_CONVENTION",
    "FlopsConvention",
    "attended_tokens",
    "attention_flops_per_token",
    "layer_matrix_elements",
    "model_flops_per_token",
    "mtp_flops_per_token",
    "vision_flops_per_image",
]


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
        _mixing_of_layer(model, layer, seq_len, causal, convention) for layer in range(model.layers)
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

    A head is a linear of ``2 * hidden_size`` inputs, a layer like the last or those of its pattern, and the output head
    once more. Megatron's own total contains them (with the norms, 3 * hidden size; of hybrid models without the
    linear).

    Raises:
        ModelError: as :func:`model_flops_per_token`.
    """
    _check(seq_len, tp, convention)
    hidden, inner = model.hidden_size, range(model.layers, model.layers + model.prediction_layers)
    vocab = model.padded_vocab(tp) if convention == "megatron" else model.vocab_size
    matrices = vocab * hidden + sum(layer_matrix_elements(model, layer, convention) for layer in inner)
    if convention != "megatron" or not model.mtp_pattern:
        matrices += 2 * hidden * hidden + (3 * hidden if convention == "megatron" else 0)
    mixing = sum(_mixing_of_layer(model, layer, seq_len, causal, convention) for layer in inner)
    return model.mtp_layers * (6.0 * matrices + 3 * mixing)


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
    return sum(_mixing_of_layer(model, layer, seq_len, causal, "operators") for layer in range(model.layers))


def layer_matrix_elements(
    model: ModelDescription, layer: int = 0, convention: FlopsConvention = "operators"
) -> int:
    """Elements of the matrices of a layer that a token passes through: multiply-adds of its linears."""
    name = model.mixer(layer)
    count = MIXERS[name].matrix_elements(model, convention) if name else 0
    matrices = 3 if model.gated else 2
    if model.moe is None or not model.is_moe_layer(layer):
        return count + matrices * model.hidden_size * model.layer_ffn_size(layer)
    moe, hidden = model.moe, model.hidden_size
    chosen = moe.top_k * moe.expert_ffn_size * (moe.latent_size or hidden)
    latent = 2 * hidden * moe.latent_size
    router = 0 if convention == "megatron" else _router_matrix_elements(model, moe)
    return count + matrices * (chosen + moe.shared_ffn_size * hidden) + latent + router


def _router_matrix_elements(model: ModelDescription, moe: MixtureOfExperts) -> int:
    return model.hidden_size * (moe.experts + moe.shared_gate)


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


def _mixing_of_layer(
    model: ModelDescription, layer: int, seq_len: int, causal: bool | None, convention: FlopsConvention
) -> float:
    """Forward FLOPs of a layer's products of tokens with tokens, or with a state, for one token."""
    halved = (CAUSAL_BY_CONVENTION[convention] if causal is None else causal) and model.causal
    name = model.mixer(layer)
    return MIXERS[name].mixing_flops(model, layer, seq_len, convention, causal=halved) if name else 0.0


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
