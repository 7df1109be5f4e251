"""Builds the parameter tensors of one rank, part by part: the names, shapes and sharding of Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .model import LatentAttention, MixtureOfExperts, ModelDescription, ModelError, PatchInput
from .parameters_checks import local_kv_heads

Role = Literal["weight", "bias", "norm", "embedding", "positions", "head"]


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter tensor of one rank."""

    name: str
    """Module path and ``weight`` or ``bias``, with Megatron-Core's module names."""
    shape: tuple[int, ...]
    """Elements on this rank; a linear's weight is ``(outputs, inputs)``."""
    role: Role
    layer: int = -1
    """Global layer number; -1 outside the layers. Prediction heads continue the count of the layers; a vision
    encoder's layers have their own."""
    tp_axis: int | None = None
    """Axis cut over the tensor-parallel ranks (of an expert: the expert-tensor-parallel ranks); ``None`` if every
    rank of that group holds the whole tensor."""
    reduced_over_tp: bool = False
    """Whether each rank has only a part of the gradient, to be summed over the tensor-parallel group: replicated
    tensors that see a shard of the sequence (sequence parallelism) or of the heads (norms of queries and keys)."""
    tied: bool = False
    """Whether the tensor is the vocabulary matrix that embedding and head share, or a copy of the embedding for
    prediction heads; the gradients of its copies on several pipeline stages are summed."""
    is_expert: bool = False
    """Whether the tensor belongs to a routed expert: its gradient is summed over the expert-data-parallel group."""
    in_vision: bool = False
    """Whether the tensor belongs to the vision encoder of a vision-language model, or to its projector."""
    frozen: bool = False
    """Whether it is not trained: it has no gradient and no optimizer state."""

    @property
    def elements(self) -> int:
        """Number of elements on this rank."""
        return math.prod(self.shape)


def elements_of(tensors: Iterable[ParameterTensor]) -> int:
    """Elements of several tensors together."""
    return sum(tensor.elements for tensor in tensors)


@dataclass(frozen=True)
class Shards:
    """Builds the tensors of one rank. Degrees must fit the model; see :mod:`op_graphs.parameters_checks`."""

    model: ModelDescription
    tp: int
    sequence_parallel: bool
    vocab_rows: int
    ep: int = 1
    etp: int = 1

    def embedding(self, seq_len: int) -> list[ParameterTensor]:
        """What turns tokens, or image patches, into the input of the first layer.

        Raises:
            ModelError: if the model has learned positions and neither it nor ``seq_len`` says how many.
        """
        model = self.model
        if model.patches is not None:
            return self._patch_embedding(model.patches)
        tensors = [self.vocabulary("embedding.word_embeddings.weight", "embedding")]
        if model.positions == "learned":
            rows = model.max_positions or seq_len
            if rows < 1:
                raise ModelError(
                    f"model {model.name} has learned positions: give max_positions, or the sequence length"
                )
            shape = (rows, model.hidden_size)
            tensors.append(ParameterTensor("embedding.position_embeddings.weight", shape, "positions"))
        return tensors

    def layer(self, layer: int, prefix: str = "") -> list[ParameterTensor]:
        """One transformer layer; ``prefix`` is its module path, ``decoder.layers.N`` by default."""
        prefix = prefix or f"decoder.layers.{layer}"
        tensors = self.norm(f"{prefix}.input_layernorm", layer)
        if self.model.latent_attention is None:
            tensors += self._attention(f"{prefix}.self_attention", layer)
        else:
            tensors += self._latent_attention(f"{prefix}.self_attention", layer, self.model.latent_attention)
        tensors += self.norm(f"{prefix}.pre_mlp_layernorm", layer)
        if self.model.moe is not None and self.model.is_moe_layer(layer):
            return tensors + self._experts(f"{prefix}.mlp", layer, self.model.moe)
        ffn = self.model.layer_ffn_size(layer) // self.tp
        return tensors + self._mlp(f"{prefix}.mlp", layer, ffn, self.model.mlp_bias)

    def head(self, tied_to_embedding: bool) -> list[ParameterTensor]:
        """The output head; no matrix of its own where ``tied_to_embedding`` (an embedding on the same rank)."""
        tensors: list[ParameterTensor] = []
        if not self.model.has_head:
            return tensors
        if not tied_to_embedding:
            tensors.append(self.vocabulary("output_layer.weight", "head"))
        if self.model.head_bias:
            tensors.append(ParameterTensor("output_layer.bias", (self.vocab_rows,), "bias", tp_axis=0))
        return tensors

    def prediction_head(self, index: int) -> list[ParameterTensor]:
        """One multi-token prediction head (DeepSeek-V3), without the embedding and output head it shares."""
        prefix, layer, hidden = f"mtp.layers.{index}", self.model.layers + index, self.model.hidden_size
        tensors = self.norm(f"{prefix}.enorm", layer) + self.norm(f"{prefix}.hnorm", layer)
        tensors += self._column(f"{prefix}.eh_proj", layer, hidden // self.tp, 2 * hidden, bias=False)
        tensors += self.layer(layer, f"{prefix}.transformer_layer")
        return tensors + self.norm(f"{prefix}.final_layernorm", layer)

    def vocabulary(self, name: str, role: Role, tied: bool = False) -> ParameterTensor:
        """A vocabulary matrix: the embedding, the output head, or a copy of one of them."""
        shape = (self.vocab_rows, self.model.hidden_size)
        return ParameterTensor(name, shape, role, tp_axis=0, tied=tied or self.model.tied_embeddings)

    def norm(self, path: str, layer: int) -> list[ParameterTensor]:
        """A norm over the width."""
        parts = ("weight", "bias") if self.model.norm == "layernorm" else ("weight",)
        shape = (self.model.hidden_size,)
        return [
            ParameterTensor(f"{path}.{part}", shape, "norm", layer, reduced_over_tp=self.sequence_parallel)
            for part in parts
        ]

    def _patch_embedding(self, patches: PatchInput) -> list[ParameterTensor]:
        hidden = self.model.hidden_size
        shape = (hidden, patches.patch_elements)
        tensors = [ParameterTensor("embedding.patch_embedding.weight", shape, "weight")]
        if patches.bias:
            tensors.append(ParameterTensor("embedding.patch_embedding.bias", (hidden,), "bias"))
        if patches.class_token:
            tensors.append(ParameterTensor("embedding.class_token", (1, hidden), "positions"))
        if patches.position_rows:
            shape = (patches.position_rows, hidden)
            tensors.append(ParameterTensor("embedding.position_embeddings.weight", shape, "positions"))
        return tensors + (self.norm("embedding.pre_layernorm", -1) if patches.pre_norm else [])

    def _attention(self, path: str, layer: int) -> list[ParameterTensor]:
        model, hidden, head = self.model, self.model.hidden_size, self.model.head_size
        query = model.query_size // self.tp
        qkv = query + 2 * local_kv_heads(model, self.tp) * head
        tensors = self._column(f"{path}.linear_qkv", layer, qkv, hidden, model.qkv_bias)
        if model.has_qk_norm(layer) and model.qk_norm_weight:
            for name in ("q_layernorm", "k_layernorm"):
                norm = f"{path}.{name}.weight"
                tensors.append(ParameterTensor(norm, (head,), "norm", layer, reduced_over_tp=self.tp > 1))
        if model.attention_sinks:
            sinks, heads = f"{path}.core_attention.softmax_offset", model.heads // self.tp
            tensors.append(ParameterTensor(sinks, (heads,), "bias", layer, tp_axis=0))
        return tensors + self._row(f"{path}.linear_proj", layer, hidden, query, model.attention_output_bias)

    def _latent_attention(self, path: str, layer: int, latent: LatentAttention) -> list[ParameterTensor]:
        model, hidden, heads = self.model, self.model.hidden_size, self.model.heads // self.tp
        query = heads * latent.qk_head_size
        tensors: list[ParameterTensor] = []
        if latent.q_lora_rank:
            rank = latent.q_lora_rank
            tensors.append(self._replicated(f"{path}.linear_q_down_proj.weight", (rank, hidden), layer))
            tensors.append(self._replicated(f"{path}.q_layernorm.weight", (rank,), layer, "norm"))
            tensors += self._column(f"{path}.linear_q_up_proj", layer, query, rank, bias=False)
        else:
            tensors += self._column(f"{path}.linear_q_proj", layer, query, hidden, model.qkv_bias)
        rank = latent.kv_lora_rank
        down = (rank + latent.qk_rope_head_size, hidden)
        tensors.append(self._replicated(f"{path}.linear_kv_down_proj.weight", down, layer))
        tensors.append(self._replicated(f"{path}.kv_layernorm.weight", (rank,), layer, "norm"))
        up = heads * (latent.qk_nope_head_size + latent.v_head_size)
        tensors += self._column(f"{path}.linear_kv_up_proj", layer, up, rank, bias=False)
        values, bias = heads * latent.v_head_size, model.attention_output_bias
        return tensors + self._row(f"{path}.linear_proj", layer, hidden, values, bias)

    def _experts(self, path: str, layer: int, moe: MixtureOfExperts) -> list[ParameterTensor]:
        hidden, ffn = self.model.hidden_size, moe.expert_ffn_size // self.etp
        tensors = [self._replicated(f"{path}.router.weight", (moe.experts, hidden), layer)]
        if moe.router_linear_bias:
            tensors.append(self._replicated(f"{path}.router.bias", (moe.experts,), layer, "bias"))
        linears = (
            ("linear_fc1", (2 * ffn if self.model.gated else ffn, hidden), 0),
            ("linear_fc2", (hidden, ffn), 1),
        )
        for name, shape, axis in linears:
            for part in ("weight", "bias") if moe.expert_bias else ("weight",):
                is_weight = part == "weight"
                tensors += [
                    ParameterTensor(
                        f"{path}.experts.{name}.{part}{expert}",
                        shape if is_weight else shape[:1],
                        "weight" if is_weight else "bias",
                        layer,
                        tp_axis=axis if is_weight or axis == 0 else None,
                        is_expert=True,
                    )
                    for expert in range(moe.experts // self.ep)
                ]
        if moe.shared_ffn_size:
            shared = f"{path}.shared_experts"
            tensors += self._mlp(shared, layer, moe.shared_ffn_size // self.tp, bias=False)
            if moe.shared_gate:
                tensors.append(self._replicated(f"{shared}.gate_weight", (1, hidden), layer))
        return tensors

    def _mlp(self, path: str, layer: int, ffn: int, bias: bool) -> list[ParameterTensor]:
        hidden, outputs = self.model.hidden_size, 2 * ffn if self.model.gated else ffn
        tensors = self._column(f"{path}.linear_fc1", layer, outputs, hidden, bias)
        return tensors + self._row(f"{path}.linear_fc2", layer, hidden, ffn, bias)

    def _replicated(
        self, name: str, shape: tuple[int, ...], layer: int, role: Role = "weight"
    ) -> ParameterTensor:
        """A tensor each rank holds whole and applies to its shard of the sequence."""
        return ParameterTensor(name, shape, role, layer, reduced_over_tp=self.sequence_parallel)

    def _column(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=0)]
        if bias:
            tensors.append(ParameterTensor(f"{path}.bias", (outputs,), "bias", layer, tp_axis=0))
        return tensors

    def _row(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=1)]
        if bias:
            tensors.append(
                ParameterTensor(
                    f"{path}.bias", (outputs,), "bias", layer, reduced_over_tp=self.sequence_parallel
                )
            )
        return tensors
