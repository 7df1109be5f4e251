"""What a model is: the dimensions that decide its operators, parameters and activations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["swiglu", "geglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rotary", "learned", "none"]


class ModelError(ValueError):
    """A model description is wrong or cannot be read; the message lists every problem found, one a line."""


@dataclass(frozen=True)
class ModelDescription:
    """A dense decoder-only transformer.

    Sizes are in elements. ``ffn_size`` is the width after the activation: a SwiGLU layer has a first linear of
    ``2 * ffn_size`` outputs.
    """

    name: str
    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    """Size of the tokenizer's vocabulary, before padding."""
    max_positions: int = 0
    """Rows of the learned position table; 0 means the sequence length of the scenario."""
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    positions: Positions = "rotary"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over the head size on queries and keys (Qwen 3)."""
    tied_embeddings: bool = False
    vocab_padding_multiple: int = 128
    """Megatron's ``--make-vocab-size-divisible-by``; the vocabulary is padded to a multiple of this times tp."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    source: str = field(default="", compare=False)
    """Where the figures come from: a paper, a published configuration or a file."""

    @property
    def gated(self) -> bool:
        """Whether the first linear of the MLP has a gate beside it."""
        return self.activation in ("swiglu", "geglu")

    @property
    def query_size(self) -> int:
        """Outputs of the query projection."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    def padded_vocab(self, tp: int = 1) -> int:
        """Vocabulary rows as allocated: padded to ``vocab_padding_multiple * tp``.

        Source: Megatron-LM ``training/vocab_utils.py``, ``calculate_padded_vocab_size``.
        """
        multiple = self.vocab_padding_multiple * tp
        return -(-self.vocab_size // multiple) * multiple
