"""Model FLOPs of a training step: the work MFU is measured against, in the conventions published figures use.

All conventions count forward and backward (three times the forward's matrix products) and no recomputation; they
differ in attention under the causal mask and in which parameters count. ``docs/models.md`` has the table.
"""

from __future__ import annotations

from typing import Literal, get_args

from .model import ModelDescription, ModelError
from .parameters import count_parameters

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
) -> float:
    """FLOPs of forward and backward for one token of a sequence of ``seq_len`` tokens.

    ``causal`` counts half of the attention products, ``None`` does as the convention's source does
    (:data:`CAUSAL_BY_CONVENTION`). ``tp`` matters to ``megatron`` only, through the padding of the vocabulary.

    - ``operators``: every matrix product of the model, with the tokenizer's vocabulary in the output head:
      6 * (layer matrices + head) + 12 * layers * heads * head size * seq_len, attention halved if causal.
    - ``palm``: 6 N + 12 * layers * heads * head size * seq_len (Chowdhery et al. 2022, arXiv:2204.02311, appendix B;
      torchtitan): N is every parameter, biases and norms included, but for the embedding tables; the output head is
      in it whether tied or not.
    - ``megatron``: ``num_floating_point_operations`` of Megatron-LM: as ``operators`` with the padded vocabulary.
      Present versions halve attention; earlier ones, and Narayanan et al. 2021 (arXiv:2104.04473) and Korthikanti et
      al. 2022 (arXiv:2205.05198), do not: ``causal=False``.

    Raises:
        ModelError: for a convention of another name, or a ``seq_len`` or ``tp`` below 1.
    """
    if convention not in get_args(FlopsConvention):
        raise ModelError(
            f"FLOPs convention {convention!r} is not one of {', '.join(get_args(FlopsConvention))}"
        )
    if seq_len < 1 or tp < 1:
        raise ModelError(f"seq_len {seq_len} and tp {tp} must both be at least 1")
    halved = CAUSAL_BY_CONVENTION[convention] if causal is None else causal
    attention = 3 * attention_flops_per_token(model, seq_len, halved)
    if convention == "palm":
        return 6.0 * _parameters_beside_embedding(model, seq_len) + attention
    vocab = model.padded_vocab(tp) if convention == "megatron" else model.vocab_size
    matrices = model.layers * layer_matrix_elements(model) + vocab * model.hidden_size
    return 6.0 * matrices + attention


def attention_flops_per_token(model: ModelDescription, seq_len: int, causal: bool) -> float:
    """Forward FLOPs of the two attention products (scores, and scores times values) of all layers, for one token."""
    full = 4.0 * model.layers * model.query_size * seq_len
    return full / 2 if causal else full


def layer_matrix_elements(model: ModelDescription) -> int:
    """Elements of the matrices of one layer: multiply-adds of its linears for one token."""
    attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
    return attention + model.hidden_size * model.ffn_size * (3 if model.gated else 2)


def _parameters_beside_embedding(model: ModelDescription, seq_len: int) -> int:
    vocabulary = model.vocab_size * model.hidden_size
    positions = (model.max_positions or seq_len) * model.hidden_size if model.positions == "learned" else 0
    head = vocabulary if model.tied_embeddings else 0
    return count_parameters(model, seq_len=seq_len) - vocabulary - positions + head
