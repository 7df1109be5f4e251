"""Parameters of a model, tensor by tensor: whole, and as one rank of its parallel groups holds them.

The sharding is Megatron-LM's: the QKV projection and the first linear of the MLP are column-parallel (weight and bias
cut along their outputs), the attention projection and the second linear are row-parallel (weight cut along its
inputs, bias replicated), norms and learned positions are replicated, the embedding and the output head are cut along
the padded vocabulary. Gate and value of a gated MLP, and query, key and value, are one tensor each, as in
Megatron-Core. Routed experts are dealt out over the expert-parallel ranks and each is cut over the
expert-tensor-parallel ranks; the router, the gate of shared experts and the down projections of latent attention are
replicated. Tensors are listed in the order in which a forward pass uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .adapters import count_adapter_parameters
from .model import ModelDescription, ModelError
from .parameters_checks import expert_parallel_problem, tensor_parallel_problem
from .parameters_shards import Shards
from .parameters_tensors import ParameterTensor, Role, elements_of, local_kv_heads
from .plan import LowRankAdapters

__all__ = [
    "ParameterTensor",
    "Role",
    "count_active_parameters",
    "count_mtp_parameters",
    "count_parameters",
    "count_trained_parameters",
    "count_vision_parameters",
    "elements_of",
    "expert_parallel_problem",
    "layer_parameters",
    "local_kv_heads",
    "parameters_on_stage",
    "tensor_parallel_problem",
    "vision_parameters",
]


def count_parameters(model: ModelDescription, padded_for_tp: int | None = None, seq_len: int = 0) -> int:
    """Parameters of the whole model, as published figures count them.

    A tied vocabulary matrix counts once, a vision encoder and its projector count, heads for multi-token prediction
    do not (:func:`count_mtp_parameters`). The vocabulary is that of the tokenizer, or, with ``padded_for_tp``, as it
    is padded for that tensor-parallel degree. ``seq_len`` gives the rows of learned positions where the model does
    not.

    Raises:
        ModelError: if the model has learned positions and neither it nor the caller says how many.
    """
    vocab = model.vocab_size if padded_for_tp is None else model.padded_vocab(padded_for_tp)
    shards = Shards(model, tp=1, sequence_parallel=False, vocab_rows=vocab)
    ends = [*shards.embedding(seq_len), *shards.norm("decoder.final_layernorm", -1)]
    ends += shards.head(tied_to_embedding=model.tied_embeddings)
    layers = sum(times * elements_of(shards.layer(layer)) for layer, times in _distinct_layers(model))
    return elements_of(ends) + layers + count_vision_parameters(model)


def count_active_parameters(model: ModelDescription, seq_len: int = 0, with_embedding: bool = True) -> int:
    """Parameters one token passes through: :func:`count_parameters` without the experts not chosen for it.

    ``with_embedding=False`` leaves out the embedding table (of which a token reads one row) but not the output head,
    as gpt-oss counts; DeepSeek and Mixtral count both.

    Raises:
        ModelError: as :func:`count_parameters`.
    """
    total = count_parameters(model, seq_len=seq_len)
    if not with_embedding and not model.tied_embeddings and model.patches is None:
        total -= model.vocab_size * model.hidden_size
    if model.moe is None:
        return total
    idle = model.moe.experts - model.moe.top_k
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.layers))
    return total - moe_layers * idle * _elements_of_an_expert(model)


def count_trained_parameters(model: ModelDescription, lora: LowRankAdapters | None, seq_len: int = 0) -> int:
    """Parameters that a step updates: those of the model, or of the adapters beside it.

    Raises:
        ModelError: as :func:`count_parameters`.
    """
    if lora is None:
        return count_parameters(model, seq_len=seq_len)
    return count_adapter_parameters(model, lora)


def count_mtp_parameters(model: ModelDescription, active: bool = False) -> int:
    """Parameters of the heads for multi-token prediction, without the embedding and output head that they share.

    ``active`` leaves out the experts not chosen for a token.
    """
    shards = Shards(model, tp=1, sequence_parallel=False, vocab_rows=model.vocab_size)
    heads = range(model.distinct_prediction_heads)
    count = sum(elements_of(shards.prediction_head(index)) for index in heads)
    if active and model.moe is not None:
        inner = range(model.layers, model.layers + model.prediction_layers)
        idle = (model.moe.experts - model.moe.top_k) * sum(map(model.is_moe_layer, inner))
        count -= len(heads) * idle * _elements_of_an_expert(model)
    return count


def count_vision_parameters(model: ModelDescription) -> int:
    """Parameters of the vision encoder and the projector; 0 for a model without."""
    return elements_of(vision_parameters(model))


def parameters_on_stage(
    model: ModelDescription,
    layers: Sequence[int],
    tp: int,
    sequence_parallel: bool,
    has_embedding: bool,
    has_head: bool,
    *,
    seq_len: int = 0,
    ep: int = 1,
    etp: int = 1,
    has_mtp: bool | None = None,
    has_vision: bool | None = None,
) -> list[ParameterTensor]:
    """Parameter tensors one rank holds for a pipeline stage (or model chunk), in forward order.

    ``layers`` are global layer numbers. A head whose matrix is tied to an embedding on the same stage has no tensor of
    its own; without ``has_embedding`` (pipeline parallelism) the stage holds its own copy. Learned positions lie with
    the embedding and have ``model.max_positions`` rows, or ``seq_len`` where the model leaves it open.

    Heads for multi-token prediction lie with the output head unless ``has_mtp`` says otherwise, with a copy of the
    embedding where the stage has none; a vision encoder lies with the embedding unless ``has_vision`` does.

    Raises:
        ModelError: if a degree does not fit the model (see :func:`tensor_parallel_problem` and
            :func:`expert_parallel_problem`), or the number of learned positions is not known.
    """
    problem = tensor_parallel_problem(model, tp) or expert_parallel_problem(model, ep, etp)
    if problem:
        raise ModelError(problem)
    rows = model.padded_vocab(tp) // tp
    shards = Shards(model, tp, sequence_parallel and tp > 1, rows, ep, etp)
    with_mtp = model.mtp_layers > 0 and (has_head if has_mtp is None else has_mtp)
    tensors: list[ParameterTensor] = []
    if has_embedding if has_vision is None else has_vision:
        tensors += vision_parameters(model, tp, sequence_parallel)
    if has_embedding:
        tensors += shards.embedding(seq_len)
        if model.mtp_layers and not with_mtp:
            tensors = [replace(t, tied=True) if t.role == "embedding" else t for t in tensors]
    for layer in layers:
        tensors += shards.layer(layer)
    if has_head:
        tensors += shards.norm("decoder.final_layernorm", -1)
    if with_mtp:
        if not has_embedding and not (has_head and model.tied_embeddings):
            tensors.append(shards.vocabulary("embedding.word_embeddings.weight", "embedding", tied=True))
        for index in range(model.distinct_prediction_heads):
            tensors += shards.prediction_head(index)
    if has_head:
        tensors += shards.head(tied_to_embedding=model.tied_embeddings and has_embedding)
    return tensors


def layer_parameters(
    model: ModelDescription,
    tp: int = 1,
    sequence_parallel: bool = False,
    layer: int = 0,
    *,
    ep: int = 1,
    etp: int = 1,
) -> list[ParameterTensor]:
    """Parameter tensors one rank holds for one transformer layer, in forward order.

    Raises:
        ModelError: if a degree does not fit the model.
    """
    return parameters_on_stage(
        model, (layer,), tp, sequence_parallel, has_embedding=False, has_head=False, ep=ep, etp=etp
    )


def vision_parameters(
    model: ModelDescription, tp: int = 1, sequence_parallel: bool = False
) -> list[ParameterTensor]:
    """Tensors of the vision encoder and its projector on one rank, in forward order; empty for a model without.

    The projector's linears alternate between column- and row-parallel from the first on; a last one without partner
    is replicated.

    Raises:
        ModelError: if ``tp`` does not fit the encoder.
    """
    if model.vision is None:
        return []
    encoder = model.vision.encoder
    tensors = parameters_on_stage(
        encoder, range(encoder.layers), tp, sequence_parallel, has_embedding=True, has_head=True
    )
    tensors = [replace(tensor, name=f"vision_model.{tensor.name}", in_vision=True) for tensor in tensors]
    shapes = model.vision.projector_shapes(model.hidden_size)
    for index, (outputs, inputs) in enumerate(shapes):
        cut = None if index % 2 == 0 and index + 1 == len(shapes) else index % 2
        if cut is not None and (outputs, inputs)[cut] % tp:
            raise ModelError(
                f"tp {tp} does not fit {model.name}: linear {index} of the vision projector, {outputs} x {inputs}, "
                "does not divide by it"
            )
        outputs //= tp if cut == 0 else 1
        inputs //= tp if cut == 1 else 1
        path = f"vision_projection.linear_fc{index + 1}"
        tensors.append(
            ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", tp_axis=cut, in_vision=True)
        )
        if model.vision.projector_bias:
            axis = 0 if cut == 0 else None
            tensors.append(ParameterTensor(f"{path}.bias", (outputs,), "bias", tp_axis=axis, in_vision=True))
    return tensors


def _distinct_layers(model: ModelDescription) -> list[tuple[int, int]]:
    """One layer number of each kind of layer, and how many layers are of it."""
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    return [(kinds.index(kind), times) for kind, times in Counter(kinds).items()]


def _elements_of_an_expert(model: ModelDescription) -> int:
    assert model.moe is not None
    ffn, hidden = model.moe.expert_ffn_size, model.moe.latent_size or model.hidden_size
    first = 2 * ffn if model.gated else ffn
    return first * hidden + hidden * ffn + (first + hidden if model.moe.expert_bias else 0)
