"""Lowering of what frames a training step on a rank: zeroing gradients before, synchronising and the optimizer after.

Order and kernels are Megatron-Core's (``training.py``, ``optimizer/optimizer.py``, ``finalize_model_grads.py``):
zero the gradient buffer; ...; reduce what was not reduced under the backward pass; sum norm gradients over the
tensor-parallel ranks (sequence parallelism) and tied embedding gradients over first and last stage; gradient norm and
its all-reduce; clip; Adam over the shard; copy to the model's weights; gather the weights unless the next forward
pass does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .adapters import trained
from .buckets import form_buckets
from .chunk import Chunk, ChunkPrograms
from .data_parallel import DataParallelism
from .lower_vision import image_token_bytes
from .lowering_context import LoweringContext
from .offload_optimizer import emit_gradient_copies, emit_host_updates, host_state_bytes, split_shard
from .optimizers import OPTIMIZERS
from .optimizers.shard import Part
from .overlap.registry import GRADIENTS, PARAMETERS
from .parameters import ParameterTensor, elements_of
from .precision import is_quantized
from .program import Program, ProgramBuilder, Tensor
from .stage_layout import embedding_stage
from .startup import FirstUse, PersistentBuffer, StartupEntry, startups
from .vocabulary import Communication, Dimension, DType, MemoryCategory, OpKind, Phase

RENDEZVOUS_GRADIENT_NORM = "gradient_norm_all_reduce"
RENDEZVOUS_TIED_EMBEDDING = "tied_embedding_all_reduce"

_PERSISTENT_NAMES = {
    MemoryCategory.WEIGHTS: "weights",
    MemoryCategory.GRADIENTS: "main_gradients",
    MemoryCategory.OPTIMIZER_STATES: "optimizer_states",
}


@dataclass(frozen=True)
class RankPrograms:
    """Everything one rank runs in a step."""

    rank: int
    chunks: tuple[ChunkPrograms, ...]
    before: Program
    after: Program
    persistent: tuple[PersistentBuffer, ...]
    receive_bytes: int
    """Bytes of the tensor passed between neighbouring stages, where a chunk does not say otherwise."""
    host_bytes: int = 0
    """Memory of the host that is held as long as the job."""
    startups: tuple[tuple[int, tuple[StartupEntry, ...]], ...] = ()
    """How the job begins on ranks of the stage, by global rank; empty where that does not matter."""


def lower_rank(
    context: LoweringContext, chunks: Sequence[ChunkPrograms], workspaces: Sequence[int]
) -> RankPrograms:
    """Put the programs of a rank together. ``workspaces`` are bytes that libraries allocate for themselves."""
    beside = [buffer for buffer in _beside_the_weights(context, chunks, workspaces) if buffer.size]
    return RankPrograms(
        rank=context.rank,
        chunks=tuple(chunks),
        before=_before(context, chunks),
        after=_after(context, chunks),
        persistent=(*_of_the_weights(context, chunks), *beside),
        receive_bytes=round(context.hidden_bytes),
        host_bytes=round(
            host_state_bytes(split_shard(DataParallelism(context).optimizer_shard(_parameters(chunks))).host)
        ),
        startups=startups(context, _parameters(chunks), beside),
    )


def parameter_elements(chunks: Sequence[ChunkPrograms]) -> int:
    """Parameters a rank holds."""
    return sum(elements_of(chunk.parameters) for chunk in chunks)


def _parameters(chunks: Sequence[ChunkPrograms]) -> list[ParameterTensor]:
    return [tensor for chunk in chunks for tensor in chunk.parameters]


def _before(context: LoweringContext, chunks: Sequence[ChunkPrograms]) -> Program:
    rules = DataParallelism(context)
    builder = ProgramBuilder(context.names, chunk=-1, phase=Phase.OPTIMIZER)
    builder.module = "optimizer"
    builder.memory_bound(
        "zero_gradients",
        OpKind.MEMSET,
        read=0,
        written=rules.persistent_bytes(_parameters(chunks))[MemoryCategory.GRADIENTS],
        dtype=context.gradient_dtype,
    )
    return builder.build()


def _after(context: LoweringContext, chunks: Sequence[ChunkPrograms]) -> Program:
    builder = ProgramBuilder(context.names, chunk=-1, phase=Phase.GRADIENT_SYNC)
    rules = DataParallelism(context)
    if context.held_outputs and any(chunk.chunk.has_head for chunk in chunks):
        _merge_outputs(builder, context)
    if not GRADIENTS.chosen(context.overlap.grad_reduce).in_backward and not rules.reduces_every_microbatch:
        for chunk in chunks:
            for bucket in filter(rules.reduces, chunk.buckets):
                builder.wait_for(rules.emit_reduction(builder, bucket))
    builder.module = "optimizer"
    _reduce_replicated_gradients(builder, context, chunks)
    _optimizer_step(builder, context, chunks)
    gathers_later = not PARAMETERS.chosen(context.overlap.param_gather).in_forward
    if rules.whole_tensors:
        rules.emit_broadcasts(builder, _parameters(chunks))
    elif rules.zero >= 1 and not rules.gathers_by_unit and gathers_later:
        for chunk in chunks:
            # One collective for each kind of parameter; nothing is there to be hidden by finer buckets.
            for bucket in filter(
                rules.gathers, form_buckets(trained(chunk.parameters), context.parallel, split=False)
            ):
                rules.emit_gather(builder, bucket, after=None)
    return builder.build()


def _reduce_replicated_gradients(
    builder: ProgramBuilder, context: LoweringContext, chunks: Sequence[ChunkPrograms]
) -> None:
    """Sum the gradients of tensors whose copies each saw a part of the tokens: replicated ones, and whole models."""
    item = context.gradient_dtype.itemsize
    learned = trained(_parameters(chunks))
    partial = sum(tensor.elements for tensor in learned if tensor.reduced_over_tp)
    if partial:
        size = item * partial
        builder.memory_bound(
            "replicated_gradient_copy",
            OpKind.MEMCPY,
            read=size,
            written=size,
            dtype=context.gradient_dtype,
        )
        row = builder.collective(
            "replicated_gradient_all_reduce",
            Communication.ALL_REDUCE,
            size,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=context.gradient_dtype,
        )
        builder.wait_for(row)
    if context.copy_rank is not None:
        elements = DataParallelism(context).sharded_elements(_parameters(chunks))
        pair = (min(context.rank, context.copy_rank), max(context.rank, context.copy_rank))
        row = builder.collective(
            "model_copy_all_reduce",
            Communication.ALL_REDUCE,
            item * elements,
            Dimension.PP,
            context.names.group("model_copies", pair),
            dtype=context.gradient_dtype,
        )
        builder.wait_for(row)
    tied = [tensor for tensor in learned if tensor.tied]
    if tied and context.parallel.pp > 1:
        at = context.parallel.coordinates(context.rank)
        ends = tuple(
            context.parallel.rank_of(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=stage)
            for stage in (embedding_stage(context.parallel) % context.parallel.pp, context.parallel.pp - 1)
        )
        row = builder.collective(
            RENDEZVOUS_TIED_EMBEDDING,
            Communication.ALL_REDUCE,
            item * elements_of(tied),
            Dimension.PP,
            context.names.group("embedding", ends),
            dtype=context.gradient_dtype,
        )
        builder.wait_for(row)


def _optimizer_step(
    builder: ProgramBuilder, context: LoweringContext, chunks: Sequence[ChunkPrograms]
) -> None:
    """Gradient norm, clipping and the update of this rank's shard."""
    builder.phase = Phase.OPTIMIZER
    rules = DataParallelism(context)
    shard = rules.optimizer_shard(_parameters(chunks))
    elements, dtype = shard.elements, shard.gradient_dtype
    gradient = dtype.itemsize * elements
    copy: Tensor | None = None
    if rules.copies_gradients:
        row = builder.memory_bound(
            "gradient_copy_to_fp32",
            OpKind.OPTIMIZER,
            read=context.gradient_dtype.itemsize * elements,
            written=gradient,
            dtype=dtype,
        )
        copy = builder.allocate("fp32_gradients", gradient, row, MemoryCategory.GRADIENTS)
    if context.dtype is DType.FP16:
        builder.memory_bound(
            "gradient_unscale_check_finite",
            OpKind.OPTIMIZER,
            read=gradient,
            written=gradient,
            dtype=dtype,
        )
    builder.memory_bound(
        "gradient_norm",
        OpKind.REDUCTION,
        read=gradient,
        written=4.0,
        access="stream",
        dtype=dtype,
    )
    _reduce_gradient_norm(builder, context)
    builder.memory_bound("gradient_clip", OpKind.OPTIMIZER, read=gradient, written=gradient, dtype=dtype)
    split = split_shard(shard)
    copied = emit_gradient_copies(builder, split.host) if split.host.parts else []
    if split.device.parts:
        OPTIMIZERS[context.training.optimizer].emit_step(builder, split.device)
        # A master of two bytes is the rest of the model's weight, which the update writes itself.
        if context.dtype is not DType.FP32 and context.training.optimizer_dtypes.master is DType.FP32:
            _copy_to_model(builder, context, split.device.parts)
    if copied:
        emit_host_updates(builder, copied, 4.0 if rules.zero == 3 else context.item)
    if copy is not None:
        # It lives until gradients are zeroed for the next step.
        builder.release(copy, builder.last_row)


def _reduce_gradient_norm(builder: ProgramBuilder, context: LoweringContext) -> None:
    """Sum the squares of all ranks, or with post-validation of the ranks of this stage.

    What the stages before have summed then arrives while the next step fills the pipeline, a number for each stage,
    and nothing waits for it: that is left out.
    """
    parallel = context.parallel
    if own_stage := context.training.post_validation and parallel.pp > 1:
        stage = parallel.coordinates(context.rank)["pp"]
        ranks = tuple(
            rank for rank in range(parallel.world_size) if parallel.coordinates(rank)["pp"] == stage
        )
    else:
        ranks = tuple(range(parallel.world_size))
    if len(ranks) == 1:
        return
    row = builder.collective(
        RENDEZVOUS_GRADIENT_NORM,
        Communication.ALL_REDUCE,
        4.0,
        Dimension.DP if own_stage else Dimension.WORLD,
        context.names.group("stage", ranks) if own_stage else context.group(Dimension.WORLD),
        dtype=DType.FP32,
    )
    builder.wait_for(row)


def _copy_to_model(
    builder: ProgramBuilder,
    context: LoweringContext,
    parts: Sequence[Part],
) -> None:
    """Master weights to the weights of the model, in the type in which they are gathered."""
    elements, recipe = sum(part.elements for part in parts), context.recipe
    written = context.item * elements
    if recipe is not None and context.training.fp8_param_gather:
        quantized = sum(part.elements for part in parts if is_quantized(part.tensor))
        written -= (context.item - recipe.gathered_weight_bytes) * quantized
        if recipe.amax_kernel and recipe.gathered_weight_bytes < context.item:
            builder.memory_bound(
                "master_weight_amax", OpKind.REDUCTION, read=4.0 * quantized, written=4.0, dtype=DType.FP32
            )
    builder.memory_bound(
        "master_to_model_weights",
        OpKind.OPTIMIZER,
        read=4.0 * elements,
        written=written,
        dtype=context.dtype,
    )


def _of_the_weights(context: LoweringContext, chunks: Sequence[ChunkPrograms]) -> list[PersistentBuffer]:
    """Weights, gradients and optimizer states."""
    rules, parameters = DataParallelism(context), _parameters(chunks)
    buffers = [
        PersistentBuffer(_PERSISTENT_NAMES[category], size, category)
        for category, total in rules.persistent_bytes(parameters).items()
        for size in rules.persistent_allocations(parameters, category, total)
    ]
    return [buffer for buffer in buffers if buffer.size]


def _beside_the_weights(
    context: LoweringContext, chunks: Sequence[ChunkPrograms], workspaces: Sequence[int]
) -> list[PersistentBuffer]:
    rules = DataParallelism(context)
    quantized = rules.quantized_weight_bytes(_parameters(chunks))
    buffers = [PersistentBuffer("quantized_weights", quantized, MemoryCategory.WEIGHTS, FirstUse.PRODUCT)]
    buffers += [
        PersistentBuffer("library_workspaces", size, MemoryCategory.TEMPORARY, FirstUse.PRODUCT)
        for size in workspaces
    ]
    buffers += _pipeline_buffers(context, chunks)
    if not (
        rules.accumulates_main_gradients
        and context.training.gradient_accumulation_fusion
        and context.libraries.transformer_engine
    ):
        return buffers
    # Transformer Engine returns a dummy gradient to autograd where the GEMM already added the real one to the main
    # gradient, and keeps one for each distinct weight shape (module/_common.py, get_dummy_wgrad).
    # Frozen weights have none, and adapters run on PyTorch's linears.
    # Nor does a weight that is no linear's have one: that of absorbed projections.
    absorbed = "linear_kv_up_proj.weight" if context.absorbs_latents else "no such weight"
    weights = [t for c in chunks for t in c.parameters if not t.name.endswith(absorbed)]
    shapes = {t.shape for t in weights if t.role in ("weight", "head")}
    shapes = set() if context.freezes_weights else shapes
    buffers += [
        PersistentBuffer(
            f"dummy_weight_gradient_{rows}x{columns}",
            round(context.item * rows * columns),
            MemoryCategory.GRADIENTS,
            FirstUse.WEIGHT_GRADIENT,
            (rows, columns),
        )
        for rows, columns in sorted(shapes)
    ]
    return buffers


def _received(context: LoweringContext, parts: Sequence[Chunk]) -> list[PersistentBuffer]:
    """A buffer for each microbatch's input and one for the gradient of its output (``stage.py``, ``_RecvInfo``)."""
    ends = 0, context.parallel.stages - 1
    count = sum(part.stage != ends[0] for part in parts) + sum(part.stage != ends[1] for part in parts)
    one = PersistentBuffer("received", round(context.hidden_bytes), MemoryCategory.COMMUNICATION)
    return [one] * (count * context.training.num_microbatches)


def _merge_outputs(builder: ProgramBuilder, context: LoweringContext) -> None:
    """The logits of all microbatches become one tensor, which the last stage returns (``merge_chunks``)."""
    builder.module = "head"
    size = context.training.num_microbatches * context.item * context.tokens * context.local_vocab
    row = builder.memory_bound(
        "merged_outputs",
        OpKind.MEMCPY,
        read=size,
        written=size,
        dtype=context.dtype,
        phase=Phase.FORWARD,
    )
    builder.temporary("merged_outputs", size, row, until=row)


def _pipeline_buffers(context: LoweringContext, chunks: Sequence[ChunkPrograms]) -> list[PersistentBuffer]:
    """What the pipeline loop of Megatron-Core holds on to (``pipeline_parallel/schedules.py``).

    The gradient a stage sends back stays referenced until the next one replaces it. With
    ``--defer-embedding-wgrad-compute`` input and output gradient of the head are kept for as many microbatches as the
    limit says, and the head's weight gradient is made at the end, in a tensor of its own.
    """
    training, buffers = context.training, []
    parts = [chunk.chunk for chunk in chunks]
    if context.held_outputs:
        buffers += _received(context, parts)
    elif context.parallel.pp > 1 and not any(part.has_embedding or part.encodes(context) for part in parts):
        buffers.append(
            PersistentBuffer("sent_gradient", round(context.hidden_bytes), MemoryCategory.COMMUNICATION)
        )
    elif any(part.has_embedding for part in parts) and embedding_stage(context.parallel):
        size = image_token_bytes(context)
        buffers.append(PersistentBuffer("sent_gradient", round(size), MemoryCategory.COMMUNICATION))
    if training.deferred_head_gradients is not None and any(chunk.chunk.has_head for chunk in chunks):
        kept = min(training.deferred_head_gradients, training.num_microbatches)
        size = kept * context.token_bytes(context.local_vocab)
        size += context.item * context.local_vocab * context.model.hidden_size
        buffers.append(PersistentBuffer("deferred_head_gradients", round(size), MemoryCategory.TEMPORARY))
    return buffers
