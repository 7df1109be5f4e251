"""Parameters of a model, tensor by tensor: whole, and as one rank of a tensor-parallel group holds them.

The sharding is Megatron-LM's: the QKV projection and the first linear of the MLP are column-parallel (weight and bias
cut along their outputs), the attention projection and the second linear are row-parallel (weight cut along its
inputs, bias replicated), norms and learned positions are replicated, the embedding and the output head are cut along
the padded vocabulary. Gate and value of a gated MLP, and query, key and value, are one tensor each, as in
Megatron-Core. Tensors are listed in the order in which a forward pass uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .model import ModelDescription, ModelError

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
    """Global layer number; -1 outside the layers."""
    tp_axis: int | None = None
    """Axis cut over the tensor-parallel ranks; ``None`` if every rank holds the whole tensor."""
    reduced_over_tp: bool = False
    """Whether each rank has only a part of the gradient, to be summed over the tensor-parallel group: replicated
    tensors that see a shard of the sequence (sequence parallelism) or of the heads (norms of queries and keys)."""
    tied: bool = False
    """Whether the tensor is the vocabulary matrix that embedding and head share; the gradients of its copies on the
    first and last pipeline stage are summed."""

    @property
    def elements(self) -> int:
        """Number of elements on this rank."""
        return math.prod(self.shape)


def count_parameters(model: ModelDescription, padded_for_tp: int | None = None, seq_len: int = 0) -> int:
    """Parameters of the whole model; a tied vocabulary matrix counts once.

    The vocabulary is that of the tokenizer, or, with ``padded_for_tp``, as it is padded for that tensor-parallel
    degree. ``seq_len`` gives the rows of learned positions where the model does not.

    Raises:
        ModelError: if the model has learned positions and neither it nor the caller says how many.
    """
    vocab = model.vocab_size if padded_for_tp is None else model.padded_vocab(padded_for_tp)
    shards = _Shards(model, tp=1, sequence_parallel=False, vocab_rows=vocab)
    return elements_of(shards.stage(range(model.layers), has_embedding=True, has_head=True, seq_len=seq_len))


def parameters_on_stage(
    model: ModelDescription,
    layers: Sequence[int],
    tp: int,
    sequence_parallel: bool,
    has_embedding: bool,
    has_head: bool,
    *,
    seq_len: int = 0,
) -> list[ParameterTensor]:
    """Parameter tensors one rank holds for a pipeline stage (or model chunk), in forward order.

    ``layers`` are global layer numbers. A head whose matrix is tied to an embedding on the same stage has no tensor of
    its own; without ``has_embedding`` (pipeline parallelism) the stage holds its own copy. Learned positions lie with
    the embedding and have ``model.max_positions`` rows, or ``seq_len`` where the model leaves it open.

    Raises:
        ModelError: if ``tp`` does not fit the model (see :func:`tensor_parallel_problem`), or the number of learned
            positions is not known.
    """
    problem = tensor_parallel_problem(model, tp)
    if problem:
        raise ModelError(problem)
    shards = _Shards(model, tp, sequence_parallel and tp > 1, vocab_rows=model.padded_vocab(tp) // tp)
    return shards.stage(layers, has_embedding, has_head, seq_len)


def layer_parameters(
    model: ModelDescription, tp: int = 1, sequence_parallel: bool = False, layer: int = 0
) -> list[ParameterTensor]:
    """Parameter tensors one rank holds for one transformer layer, in forward order.

    Raises:
        ModelError: if ``tp`` does not fit the model (see :func:`tensor_parallel_problem`).
    """
    return parameters_on_stage(model, (layer,), tp, sequence_parallel, has_embedding=False, has_head=False)


def elements_of(tensors: Iterable[ParameterTensor]) -> int:
    """Elements of several tensors together."""
    return sum(tensor.elements for tensor in tensors)


def local_kv_heads(model: ModelDescription, tp: int) -> int:
    """Key-value heads on each rank: their share, or one where ranks outnumber them (the head is replicated).

    Megatron-Core does not replicate in that case: it cuts the QKV weight evenly all the same and gathers the
    projected heads. Replication is what most other frameworks do, and what is modelled here.
    """
    return max(model.kv_heads // tp, 1)


def tensor_parallel_problem(model: ModelDescription, tp: int) -> str:
    """Why the model cannot be cut over ``tp`` ranks, with the nearest degree that fits; '' if it can.

    Heads and FFN width must divide by ``tp``; key-value heads must divide by it, or it by them. The vocabulary is
    padded, so any ``tp`` fits it.
    """
    reasons = _misfits(model, tp)
    if not reasons:
        return ""
    legal = [degree for degree in range(1, model.heads + 1) if not _misfits(model, degree)]
    nearest = min(legal, key=lambda degree: (abs(degree - tp), degree))
    return f"tp {tp} does not fit {model.name}: {'; '.join(reasons)}. The nearest tp that fits is {nearest}"


def _misfits(model: ModelDescription, tp: int) -> list[str]:
    if tp < 1:
        return ["it must be at least 1"]
    reasons = []
    if model.heads % tp:
        reasons.append(f"{model.heads} heads do not divide by it")
    if model.ffn_size % tp:
        reasons.append(f"ffn_size {model.ffn_size} does not divide by it")
    if model.kv_heads % tp and tp % model.kv_heads:
        reasons.append(f"{model.kv_heads} key-value heads do not divide by it, nor it by them")
    return reasons


@dataclass(frozen=True)
class _Shards:
    """Builds the tensors of one tensor-parallel rank."""

    model: ModelDescription
    tp: int
    sequence_parallel: bool
    vocab_rows: int

    def stage(
        self, layers: Sequence[int], has_embedding: bool, has_head: bool, seq_len: int
    ) -> list[ParameterTensor]:
        tensors: list[ParameterTensor] = []
        if has_embedding:
            tensors += self._embedding(seq_len)
        for layer in layers:
            tensors += self._layer(layer)
        if has_head:
            tensors += self._norm("decoder.final_layernorm", -1)
            if not (self.model.tied_embeddings and has_embedding):
                tensors.append(self._vocabulary("output_layer.weight", "head"))
        return tensors

    def _embedding(self, seq_len: int) -> list[ParameterTensor]:
        tensors = [self._vocabulary("embedding.word_embeddings.weight", "embedding")]
        if self.model.positions == "learned":
            rows = self.model.max_positions or seq_len
            if rows < 1:
                raise ModelError(
                    f"model {self.model.name} has learned positions: give max_positions, or the sequence length"
                )
            shape = (rows, self.model.hidden_size)
            tensors.append(ParameterTensor("embedding.position_embeddings.weight", shape, "positions"))
        return tensors

    def _layer(self, layer: int) -> list[ParameterTensor]:
        model, prefix = self.model, f"decoder.layers.{layer}"
        hidden, head = model.hidden_size, model.head_size
        query = model.query_size // self.tp
        qkv = query + 2 * local_kv_heads(model, self.tp) * head
        ffn = model.ffn_size // self.tp
        tensors = self._norm(f"{prefix}.input_layernorm", layer)
        tensors += self._column(f"{prefix}.self_attention.linear_qkv", layer, qkv, hidden, model.qkv_bias)
        if model.qk_norm:
            for name in ("q_layernorm", "k_layernorm"):
                path = f"{prefix}.self_attention.{name}.weight"
                tensors.append(ParameterTensor(path, (head,), "norm", layer, reduced_over_tp=self.tp > 1))
        tensors += self._row(
            f"{prefix}.self_attention.linear_proj", layer, hidden, query, model.attention_output_bias
        )
        tensors += self._norm(f"{prefix}.pre_mlp_layernorm", layer)
        fc1 = 2 * ffn if model.gated else ffn
        tensors += self._column(f"{prefix}.mlp.linear_fc1", layer, fc1, hidden, model.mlp_bias)
        tensors += self._row(f"{prefix}.mlp.linear_fc2", layer, hidden, ffn, model.mlp_bias)
        return tensors

    def _vocabulary(self, name: str, role: Role) -> ParameterTensor:
        shape = (self.vocab_rows, self.model.hidden_size)
        return ParameterTensor(name, shape, role, tp_axis=0, tied=self.model.tied_embeddings)

    def _norm(self, path: str, layer: int) -> list[ParameterTensor]:
        parts = ("weight", "bias") if self.model.norm == "layernorm" else ("weight",)
        shape = (self.model.hidden_size,)
        return [
            ParameterTensor(f"{path}.{part}", shape, "norm", layer, reduced_over_tp=self.sequence_parallel)
            for part in parts
        ]

    def _column(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=0)]
        if bias:
            tensors.append(ParameterTensor(f"{path}.bias", (outputs,), "bias", layer, tp_axis=0))
        return tensors

    def _row(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=1)]
        if bias:
            reduced = self.sequence_parallel
            tensors.append(
                ParameterTensor(f"{path}.bias", (outputs,), "bias", layer, reduced_over_tp=reduced)
            )
        return tensors
