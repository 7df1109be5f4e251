"""Which parts of a layer are captured into CUDA graphs, so that the host launches each as one.

The names and what they cover are Megatron-Core's (``transformer/cuda_graphs.py``, ``--cuda-graph-modules``, earlier
``--cuda-graph-scope``): a layer is one graph from its first captured part to its last, in forward and again in
backward, with what is recomputed inside. ``full_iteration`` captures the forward and backward passes of all
microbatches as one graph.
"""

from __future__ import annotations

from .lowering_context import LoweringContext
from .model import MixerName

FULL_ITERATION = "full_iteration"
LAYER_PARTS: dict[str, str] = {
    "attn": "the norm in front of attention or a delta rule, this, and the residual behind it",
    "mamba": "the norm in front of a state-space mixer, the mixer, and the residual behind it",
    "mlp": "the second norm and the MLP of a layer without experts, and the residual behind it",
    "moe": "all of a layer's experts, whose tokens must be padded to a capacity",
    "moe_router": "the norm in front of the experts, the router, and shared experts",
    "moe_preprocess": "what prepares the exchange of tokens",
}
"""What can be captured, and what it covers."""
_MIXER_PARTS: dict[MixerName, str] = {"state_space": "mamba"}
"""Parts of mixers that are no attention module to Megatron-Core."""


def captures_mixer(context: LoweringContext, mixer: MixerName) -> bool:
    """Whether the mixers of layers of a kind are captured."""
    return mixer_part(mixer) in context.training.cuda_graphs


def mixer_part(mixer: MixerName) -> str:
    """The part that covers a kind of mixer."""
    return _MIXER_PARTS.get(mixer, "attn")


def captures_mlp(context: LoweringContext, layer: int) -> bool:
    """Whether the whole second half of a layer is captured."""
    part = "moe" if context.model.is_moe_layer(layer) else "mlp"
    return part in context.training.cuda_graphs


def captures_router(context: LoweringContext) -> bool:
    """Whether the second half of a layer with experts is captured up to the exchange of tokens."""
    return bool({"moe", "moe_router"} & set(context.training.cuda_graphs))


def captures_experts(context: LoweringContext) -> bool:
    """Whether the exchange of tokens and the experts themselves are captured."""
    return "moe" in context.training.cuda_graphs


def runs_experts_captured(context: LoweringContext) -> bool:
    """Whether experts run inside a graph, so that no kernel of theirs is launched by numbers of tokens on the host."""
    return captures_experts(context) or context.training.cuda_graphs == (FULL_ITERATION,)


def host_reads_token_counts(context: LoweringContext) -> bool:
    """Whether the host waits for the numbers of tokens that each expert got."""
    moe = context.model.moe
    return (
        moe is not None
        and (moe.capacity_factor is None or not moe.pad_to_capacity)
        and context.parallel.ep_host_sync
        and context.training.cuda_graphs != (FULL_ITERATION,)
    )
