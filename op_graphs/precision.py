"""Low-precision recipes: which operands of a linear are 8 or 4 bits wide, and what that costs in kernels and bytes.

All keep activations, weights and the residual stream in bf16 and run the three GEMMs of a linear (forward, input
gradient, weight gradient) on quantised operands; embedding, router, norms and core attention stay in bf16, and so does
the head, unless ``training.fp8_head`` says otherwise.
``fp8-rowwise`` is torchao's (``float8/float8_linear.py``); the others follow Transformer Engine
(``transformer_engine/pytorch/module/linear.py``, ``layernorm_linear.py``,
``grouped_linear.py`` and ``tensor/*``):

- an input is quantised once in forward; the copy that the weight gradient needs is kept instead of the bf16 tensor;
- an output gradient is quantised once in backward, for both GEMMs;
- a weight is quantised in the first microbatch of a step and its copies are kept (``is_first_microbatch``);
- with sequence parallelism the quantised tensor is gathered, not the bf16 one (``distributed.py``).

A GEMM reads one operand along rows and the other along columns, so a tensor used by two GEMMs exists in two copies.
Hopper multiplies 8-bit operands in one layout only and needs the transposed copy of a tensorwise tensor; Blackwell does
not. Block-scaled formats have scales along the reduced axis, so their two copies hold different numbers.

Left out: casts fused into norms and activations, swizzling of block scales, the amax history of delayed scaling (one
short kernel a step), and 8-bit attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .parameters_tensors import ParameterTensor
from .plan import TrainingPlan
from .vocabulary import DType

BLACKWELL = 100
"""Compute capability from which tensorwise operands need no transposed copy."""


@dataclass(frozen=True)
class PrecisionRecipe:
    """How the linears of a layer are quantised. Sizes are bytes for each element of one copy."""

    name: str
    element: DType
    activation_bytes: float
    """An element of an input or a gradient, with its share of the scales."""
    weight_bytes: float
    """An element of a weight, with its share of the scales."""
    copies: int
    """Copies of a tensor that two GEMMs read: along rows, and along columns if that one differs."""
    transposes: bool
    """Whether the copy along columns is made by transposing the bytes of the one along rows (tensorwise scales)."""
    amax_kernel: bool
    """Whether a kernel looks for the largest magnitude before the one that casts."""
    amax_over_ranks: bool
    """Whether that magnitude is the one of all shards of a sequence, by an all-reduce over tensor parallelism."""
    gathered_weight_bytes: float
    """Bytes of an element in a gather of quantised weights (``fp8_param_gather``)."""
    fused_grouped_cast: bool
    """Whether the inputs of all experts are cast by one kernel; else each expert's by its own."""
    token_multiple: int = 16
    """Rows of each expert in a grouped product are padded to a multiple of this (Transformer Engine
    ``get_align_size_for_quantization``)."""
    quantizes_each_use: bool = False
    """Whether no quantised copy outlives its product: inputs stay in bf16, and they, gradients and weights are cast in
    front of each product that reads them, with a scale for each row (torchao ``Float8Linear``;
    ``op_graphs.lower_row_scales``); else inputs and weights of Transformer Engine."""
    columns_apart: bool = False
    """Whether the copy along columns of an input or gradient is made by a kernel of its own, which reads it again."""
    gathers_quantized: bool = True
    """Whether sharded inputs and gradients are quantised before they are gathered; else behind it, whole."""
    stored_once: bool = False
    """Whether what stays between passes is there along rows only, and the copy along columns is made when a GEMM needs
    it; inputs of activations stay in 8 bits then, and outputs of attention in 12 (DeepSeek-V3, section 3.3.3)."""

    def activation_size(self, elements: float, copies: int = 1) -> float:
        """Bytes of ``copies`` quantised copies of an input or gradient."""
        return self.activation_bytes * copies * elements

    def weight_size(self, elements: float, copies: int | None = None) -> float:
        """Bytes of quantised copies of a weight; of all it has, by default."""
        whole = 1 if self.stored_once else self.copies
        return self.weight_bytes * (whole if copies is None else copies) * elements

    @property
    def gathers_copies(self) -> int:
        """Copies of a gradient that are gathered: transposable bytes once, block-scaled ones along each axis."""
        return 1 if self.transposes else self.copies


_FP32_SCALE = 4.0


def _tensorwise(name: str, capability: int, *, current: bool) -> PrecisionRecipe:
    copies = 2 if capability < BLACKWELL else 1
    return PrecisionRecipe(
        name=name,
        element=DType.FP8,
        activation_bytes=1.0,
        weight_bytes=1.0,
        copies=copies,
        transposes=True,
        amax_kernel=current,
        amax_over_ranks=current,
        gathered_weight_bytes=1.0,
        fused_grouped_cast=not current,
    )


def _delayed(capability: int) -> PrecisionRecipe:
    """One scale a tensor, from the magnitudes of earlier steps (Micikevicius et al. 2022, arXiv:2209.05433)."""
    return _tensorwise("fp8-delayed", capability, current=False)


def _current(capability: int) -> PrecisionRecipe:
    """One scale a tensor, from its own magnitude (Transformer Engine ``Float8CurrentScaling``)."""
    return _tensorwise("fp8-tensorwise", capability, current=True)


def _blockwise(capability: int) -> PrecisionRecipe:
    """fp32 scales over 1 x 128 activations and 128 x 128 weights (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    return PrecisionRecipe(
        name="fp8-blockwise",
        element=DType.FP8,
        activation_bytes=1 + _FP32_SCALE / 128,
        weight_bytes=1 + _FP32_SCALE / 128**2,
        copies=2,
        transposes=False,
        amax_kernel=False,
        amax_over_ranks=False,
        gathered_weight_bytes=1.0,
        fused_grouped_cast=False,
    )


def _mxfp8(capability: int) -> PrecisionRecipe:
    """One-byte scales over 32 elements (OCP Microscaling; Rouhani et al. 2023, arXiv:2310.10537).

    Both copies of a weight are made from bf16, so Megatron-Core gathers weights in bf16
    (``distributed/param_and_grad_buffer.py``, ``reuse_grad_buf_for_mxfp8_param_ag``).
    """
    return PrecisionRecipe(
        name="mxfp8",
        element=DType.FP8,
        activation_bytes=1 + 1 / 32,
        weight_bytes=1 + 1 / 32,
        copies=2,
        transposes=False,
        amax_kernel=False,
        amax_over_ranks=False,
        gathered_weight_bytes=2.0,
        fused_grouped_cast=False,
        token_multiple=32,
    )


def _nvfp4(capability: int) -> PrecisionRecipe:
    """One-byte scales over 16 elements and one fp32 scale a tensor (NVIDIA 2025, arXiv:2509.25149).

    The second-level scale needs the magnitude of the whole tensor first. What weight gradients read is rotated by
    Hadamard matrices of 16 x 16 (Transformer Engine ``NVFP4Quantizer.quantize_impl``): one kernel finds the magnitudes
    with and without, one casts along rows, and one rotates and casts along columns. Weights are not rotated.
    """
    return PrecisionRecipe(
        name="nvfp4",
        element=DType.FP4,
        activation_bytes=0.5 + 1 / 16,
        weight_bytes=0.5 + 1 / 16,
        copies=2,
        transposes=False,
        amax_kernel=True,
        amax_over_ranks=True,
        gathered_weight_bytes=2.0,
        fused_grouped_cast=False,
        token_multiple=128,
        columns_apart=True,
    )


def _rowwise(capability: int) -> PrecisionRecipe:
    """An fp32 scale for each row of an operand along the reduced axis (torchao ``Float8LinearRecipeName.ROWWISE``).

    Compiled, magnitudes and cast of rows are one kernel, which holds a row; of columns they are two. Under tensor
    parallelism DTensor redistributes bf16 (torchtitan ``models/llama3/infra/parallelize.py``), unless products and
    gathers are fused: the scale of a row is that of its shard.
    """
    return PrecisionRecipe(
        name="fp8-rowwise",
        element=DType.FP8,
        activation_bytes=1.0,
        weight_bytes=1.0,
        copies=2,
        transposes=False,
        amax_kernel=False,
        amax_over_ranks=False,
        gathered_weight_bytes=2.0,
        fused_grouped_cast=False,
        quantizes_each_use=True,
        gathers_quantized=False,
    )


RECIPES = {
    "fp8-tensorwise": _current,
    "fp8-delayed": _delayed,
    "fp8-blockwise": _blockwise,
    "fp8-rowwise": _rowwise,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
"""Recipes by name: functions of the compute capability of the machine (0 if it has none)."""


def precision_recipe(
    name: str | None, compute_capability: int = 0, *, stored_once: bool = False
) -> PrecisionRecipe | None:
    """The recipe of a name in :data:`RECIPES`; None for None, which quantises nothing.

    Args:
        name: the recipe.
        compute_capability: 10 * major + minor of an NVIDIA machine; decides whether transposed copies exist.
        stored_once: see :attr:`PrecisionRecipe.stored_once`.

    Raises:
        ValueError: for an unknown name.
    """
    if name is None:
        return None
    if name not in RECIPES:
        raise ValueError(f"precision recipe {name!r} is not known; known are {', '.join(RECIPES)}")
    return replace(RECIPES[name](compute_capability), stored_once=stored_once)


_BF16_WEIGHTS = (
    "router.weight",
    "gate_weight",
    "patch_embedding.weight",
    ".linear_in.weight",
    ".linear_out.weight",
)
"""Ends of names: also both matrices of a low-rank adapter."""


def is_quantized(tensor: ParameterTensor) -> bool:
    """Whether a parameter is the weight of a linear that the recipes quantise."""
    is_matrix = tensor.role == "weight" and len(tensor.shape) == 2
    return tensor.is_quantized_head or (
        is_matrix and not tensor.in_bf16 and not tensor.name.endswith(_BF16_WEIGHTS)
    )


def mark_unquantized(
    tensors: list[ParameterTensor], training: TrainingPlan, layers: int
) -> list[ParameterTensor]:
    """Tensors of a stage of a model with ``layers``, marked where they stay out of the recipe or are a head in it."""
    return [_marked(tensor, training, layers) for tensor in tensors]


def _marked(tensor: ParameterTensor, training: TrainingPlan, layers: int) -> ParameterTensor:
    if training.fp8_head and tensor.role == "head":
        return replace(tensor, is_quantized_head=True)
    leaves_out = not tensor.in_vision and training.in_bf16(tensor.layer, layers)
    return replace(tensor, in_bf16=True) if leaves_out else tensor


def quantized_elements(tensors: list[ParameterTensor]) -> int:
    """Elements of the weights that the recipes quantise."""
    return sum(tensor.elements for tensor in tensors if is_quantized(tensor))
