"""What every lowering rule needs to know: the sizes one rank works on, its groups and its element types."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .graph_names import GraphNames
from .imbalance import BALANCED, RankLoad
from .model import MixtureOfExperts, ModelDescription
from .plan import LibraryPlan, OverlapPlan, ParallelPlan, TrainingPlan
from .precision import PrecisionRecipe
from .recompute import Part, recomputed_parts
from .vocabulary import Dimension, DType


@dataclass(frozen=True)
class LoweringContext:
    """Model, plan and the sizes of one rank. Sizes are in elements unless they say bytes."""

    model: ModelDescription
    parallel: ParallelPlan
    training: TrainingPlan
    overlap: OverlapPlan
    names: GraphNames
    rank: int
    """Global rank whose groups are used: the representative of its pipeline stage."""
    recipe: PrecisionRecipe | None = None
    """How linears are quantised; None for GEMMs in the training dtype."""
    copy_rank: int | None = None
    """Rank that holds the other copy of this rank's parameters, in a schedule with two copies of the model."""
    load: RankLoad = BALANCED
    """What this rank does relative to a balanced one."""
    libraries: LibraryPlan = field(default_factory=LibraryPlan)
    copies_attention_output: bool = False
    """Whether the output of fused attention is copied into the layout of the linears (``tracesim.lowering``)."""
    module_prefix: str = ""
    """Path before every module: that of a model inside the model."""
    chunk_layers: range = range(0)
    """Layers of the model chunk that is lowered."""
    ends_early: bool = False
    """Whether the layer that is lowered runs again, up to the last thing that its backward pass reads."""
    backward_at_once: bool = False
    """Whether each backward pass of this chunk comes right behind its forward pass."""

    def of_layer(self, layer: int) -> LoweringContext:
        """The context of a layer: without the recipe where the layer stays out of it."""
        if self.recipe is None or self.module_prefix or not self.training.in_bf16(layer, self.model.layers):
            return self
        return replace(self, recipe=None)

    def recomputes(self, part: Part) -> bool:
        """Whether a part of every layer runs again in backward."""
        return part in recomputed_parts(self.training.recompute)

    @property
    def experts(self) -> MixtureOfExperts:
        """The mixture of a model that has one."""
        assert self.model.moe is not None, "only called for layers with experts"
        return self.model.moe

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.parallel.tp

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between the tensor-parallel blocks are sharded along the sequence."""
        return self.parallel.sp and self.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank, as the tensor-parallel blocks see them: batch * sequence / cp."""
        return self.training.micro_batch_size * self.training.seq_len // self.parallel.cp

    @property
    def sharded_tokens(self) -> int:
        """Tokens between the tensor-parallel blocks: ``tokens / tp`` with sequence parallelism."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def dtype(self) -> DType:
        """Element type of weights and activations."""
        return self.training.dtype

    @property
    def item(self) -> float:
        """Bytes of a weight or activation element."""
        return self.dtype.itemsize

    @property
    def gemm_dtype(self) -> DType:
        """Element type of the operands of a linear's GEMMs."""
        return self.dtype if self.recipe is None else self.recipe.element

    @property
    def absorbs_latents(self) -> bool:
        """Whether latent attention runs on the latents, its up-projections absorbed into queries and output."""
        return self.model.latent_attention is not None and self.training.mla == "absorbed"

    @property
    def quantizes_weights_anew(self) -> bool:
        """Whether weights are quantised in every pass.

        So they are where units are gathered anew, and by torchao, which unlike Transformer Engine keeps no quantised
        weight between microbatches.
        """
        each_use = self.recipe is not None and self.recipe.quantizes_each_use
        return self.parallel.gathers_by_unit or not self.libraries.transformer_engine or each_use

    @property
    def stores_quantized(self) -> bool:
        """Whether inputs of activations and outputs of attention stay in fewer bits than they are computed in."""
        return self.recipe is not None and self.recipe.stored_once

    @property
    def keeps_copies(self) -> bool:
        """Whether quantised copies stay between passes in the place of the inputs of linears."""
        return self.recipe is not None and not self.recipe.quantizes_each_use and not self.freezes_weights

    @property
    def dispatches_quantized(self) -> bool:
        """Whether what reaches experts, forward and backward, is quantised already."""
        return self.training.fp8_dispatch and self.recipe is not None and self.parallel.ep > 1

    @property
    def freezes_weights(self) -> bool:
        """Whether the model's own weights are frozen, and only low-rank adapters beside them are trained."""
        return self.training.lora is not None

    @property
    def gradient_dtype(self) -> DType:
        """Element type of the main gradients, in which they are accumulated and reduced."""
        return self.training.grad_reduce_dtype

    @property
    def routed_size(self) -> int:
        """Elements of a token as it travels to experts: the hidden state's, or fewer (``latent_size``)."""
        return self.experts.latent_size or self.model.hidden_size

    @property
    def local_query_size(self) -> int:
        """Query outputs on this rank."""
        return self.model.query_size // self.tp

    @property
    def local_kv_heads(self) -> int:
        """Key and value heads on this rank: at least one, replicated when tp exceeds their number."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def local_kv_size(self) -> int:
        """Key outputs (and value outputs) on this rank."""
        return self.local_kv_heads * self.model.head_size

    @property
    def local_qkv_size(self) -> int:
        """Outputs of the fused query, key and value projection on this rank, and of the output's gate."""
        gate = self.local_query_size if self.model.attention_output_gate else 0
        return self.local_query_size + gate + 2 * self.local_kv_size

    @property
    def local_ffn_size(self) -> int:
        """Width after the activation on this rank."""
        return self.model.ffn_size // self.tp

    @property
    def local_fc1_size(self) -> int:
        """Outputs of the first linear on this rank: gate and value together where the MLP is gated."""
        return self.local_ffn_size * (2 if self.model.gated else 1)

    @property
    def local_vocab(self) -> int:
        """Vocabulary rows on this rank, padded as Megatron pads them."""
        return self.model.padded_vocab(self.tp) // self.tp

    def token_bytes(self, width: int | None = None) -> float:
        """Bytes of ``[tokens, width]``, a hidden state by default, over all tokens of the rank."""
        return self.item * self.tokens * (self.model.hidden_size if width is None else width)

    def sharded_token_bytes(self, width: int | None = None) -> float:
        """Bytes of ``[tokens, width]`` as it lies between the tensor-parallel blocks."""
        return self.item * self.sharded_tokens * (self.model.hidden_size if width is None else width)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a hidden-state tensor over all tokens of the rank."""
        return self.token_bytes()

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a hidden-state tensor as it lies between the tensor-parallel blocks."""
        return self.sharded_token_bytes()

    def module(self, layer: int, path: str) -> str:
        """Module path of a part of a layer, as ``op_graphs.parameters`` names it; prediction heads come last."""
        if layer >= self.model.layers:
            inner = self.model.prediction_layers
            head, at = divmod(layer - self.model.layers, inner)
            part = f"layers.{at}.{path}" if self.model.mtp_pattern else path
            return f"mtp.layers.{0 if self.model.mtp_repeated else head}.transformer_layer.{part}"
        return f"{self.module_prefix}decoder.layers.{layer}.{path}"

    @property
    def held_outputs(self) -> bool:
        """Whether a stage holds what it receives and sends as ``torch.distributed.pipelining`` has it."""
        return self.libraries.torch_pipelining and self.parallel.pp > 1

    def unit(self, layer: int) -> str:
        """The unit of weights of a layer (``op_graphs.buckets.unit_of``)."""
        return f"vision.{layer}" if self.module_prefix else str(layer)

    def group(self, dimension: Dimension) -> int:
        """Index of this rank's process group along a dimension."""
        ranks = self.parallel.group_ranks(dimension, self.rank)
        return self.names.group(dimension.name.lower(), ranks)
