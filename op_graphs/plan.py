"""The parallel plan and the training settings: plain, validated-elsewhere values that lowering reads.

Where a scenario file is read and its combinations are checked is ``tracesim.scenario``; here live the values and
the arithmetic of process groups (which rank belongs to which group).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from .vocabulary import Dimension, DType


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in the backward pass.

    ``mode`` is ``none``, ``full`` (whole layers: the input of each block of layers is kept) or ``selective``
    (``modules`` inside every layer). For ``full``, ``method`` ``uniform`` keeps the input of every group of
    ``layers`` layers, ``block`` recomputes the first ``layers`` layers of a chunk one by one and keeps the rest
    (Megatron-LM ``--recompute-method``), ``every`` recomputes every ``layers``-th layer (torchtitan),
    and stops early.

    ``selective`` with ``keep`` is torchtitan's policy by operators: with ``products`` outputs of matrix products and of
    attention are kept, everything between them (norms, positions, residuals, activations) runs again. With
    ``every-second-product`` every second product of a layer, counted from its first, runs again too: keys, the output
    projection, and the half of a gated MLP's first linear that is not activated (``selective_ac_option = "op"``).
    """

    mode: str = "none"
    modules: tuple[str, ...] = ()
    layers: int = 1
    method: str = "uniform"
    keep: str = ""
    stops_early: bool = False
    """Whether running layers again ends where everything that backward reads is there: the last product of a layer, the
    reduction or exchange behind it and the last residual are left out, as in PyTorch's non-reentrant checkpoints
    (``early_stop``) and compiled graphs. Megatron-LM runs whole layers."""

    @property
    def keeps_products(self) -> bool:
        """Whether a policy by operators says what is kept."""
        return bool(self.keep)


@dataclass(frozen=True)
class Routing:
    """How unevenly tokens choose experts: Zipf's law with exponent ``zipf``, or a weight for each expert."""

    zipf: float | None = None
    histogram: str | None = None
    """File the weights come from."""
    counts: tuple[float, ...] = ()


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths of the documents packed into a sequence, in tokens: lognormal, or a histogram."""

    mean: float | None = None
    """Mean of the lognormal distribution; None for a histogram."""
    sigma: float = 0.0
    """Standard deviation of the logarithm."""
    histogram: str | None = None
    """File the histogram comes from."""
    lengths: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    """How frequent each length is."""


@dataclass(frozen=True)
class OptimizerDTypes:
    """Element types of what an optimizer keeps (Megatron-Core ``--use-precision-aware-optimizer``).

    ``master`` of two bytes is what remains of fp32 beside a bf16 weight, or fp16.
    """

    master: DType = DType.FP32
    moments: DType = DType.FP32


CrossEntropy = Literal["unfused", "native", "te", "torch", "compiled"]
"""Kernels of the loss: Megatron-Core's one by one, the same compiled together (``--cross-entropy-fusion-impl native``),
Transformer Engine's, which works in place on the logits, PyTorch's own on logits in fp32, which does not, or those that
a compiler makes of it, which take the passes of Transformer Engine's and leave the logits as they are."""


EAGER_PARTS = ("norms", "positions", "attention", "mlp", "optimizer")
"""What may be tensor operations that run one by one while the rest is fused (``libraries.eager``)."""


@dataclass(frozen=True)
class LibraryPlan:
    """Which libraries run a step, where it decides which kernels run or what they allocate for themselves."""

    transformer_engine: bool = True
    """Whether linears are Transformer Engine's; else Megatron-Core's own on cuBLAS (``--transformer-impl local``)."""
    grouped_gemm: bool = True
    """Whether the linears of experts run as one grouped GEMM on streams with workspaces of their own
    (``--moe-grouped-gemm``); without, only the workspaces are left out."""
    permute_fusion: bool = True
    """Whether tokens are brought into the order of their experts by one kernel of Transformer Engine
    (``--moe-permute-fusion``); else by PyTorch's, see ``op_graphs.dispatchers.permutation``."""
    router_fusion: bool = False
    """Whether scores and choice of experts are one kernel of Transformer Engine each way (``--moe-router-fusion``);
    else PyTorch's, one by one."""
    grouped_mlp_fusion: bool = False
    """Whether activation and quantisation between the two grouped products of experts are theirs
    (``op_graphs.lower_fused_experts``)."""
    experts_in_turn: bool = False
    """Whether a gate without scores hands experts to tokens in turn, so that those of a token lie beside each other
    (NeMo AutoModel's ``fake_balanced_gate`` in benchmarks)."""
    weighted_squared_relu_fusion: bool = False
    """Whether the squared ReLU of experts and the product with their scores are one kernel each way
    (``--use-fused-weighted-squared-relu``); else two."""
    eager: bool | tuple[str, ...] = False
    """Whether norms, positions, activations and the optimizer are tensor operations that run one by one, neither fused
    by hand nor compiled (``op_graphs.pointwise``); or which of them are (:data:`EAGER_PARTS`)."""
    fp32_norm_inputs: bool = False
    """Whether a fused norm reads a copy of its input in fp32, which a kernel makes before it, as models that write
    ``norm(x.float())`` have it."""
    separate_projections: bool = False
    """Whether queries, keys and values, and the two halves of a gated MLP, are linears of their own (torchtitan
    ``models/llama``, Hugging Face); else one product each."""
    separate_biases: bool = False
    """Whether the bias of the QKV projection is added by a kernel of its own, and the gradients of the biases of
    column-parallel linears are summed by one each, as Megatron-LM's own linears do
    (``core/tensor_parallel/layers.py``); else both are part of a product."""
    gelu_fusion: bool = True
    """Whether GELU and the bias in front of it are one kernel forward; else the ten tensor operations that Megatron-LM
    writes them in (``core/fusions/fused_bias_gelu.py``), one by one."""
    deterministic: bool = False
    """Whether only kernels with reproducible results may run (``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``), which on
    Blackwell leaves FlashAttention 2 in place of cuDNN's attention; its time is not told apart."""
    batch_fetch_waits: bool = False
    """Whether the host waits for the device in every forward to fetch its batch, as Megatron-LM did until late 2023 on
    all pipeline stages (``tensor_parallel.broadcast_data`` copies sizes back)."""
    nan_checks: bool = False
    """Whether the host looks for NaN in the loss of every microbatch, and gradients are read once more for it before
    they are reduced, as Megatron-LM does since late 2024 (``--check-for-nan-in-loss-and-grad``, on by default)."""
    checkpoints: bool = True
    """Whether what is recomputed runs in checkpoints of the framework, which cost the host work and copies of what is
    made again (``op_graphs.lower_checkpoint``); else in backward passes that are written by hand."""
    cublas_workspace_kib: int | None = None
    """What ``CUBLAS_WORKSPACE_CONFIG`` gives cuBLAS for each thread and stream; None is PyTorch's default."""
    torch_pipelining: bool = False
    """Whether pipeline stages are those of ``torch.distributed.pipelining``, which hold more than Megatron-Core's: a
    buffer of their own for each microbatch that they receive and for the gradient of each that they send, what they
    sent until its backward, and on the last stage the logits of all microbatches until the end, where they are put
    together."""
    expandable_segments: bool = False
    """Whether the segments of the caching allocator grow (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``)."""

    def runs_eagerly(self, part: str) -> bool:
        """Whether a part of :data:`EAGER_PARTS` is tensor operations that run one by one."""
        return self.eager if isinstance(self.eager, bool) else part in self.eager


@dataclass(frozen=True)
class Offload:
    """What is kept in the memory of the host between its uses.

    Kept activations of ``modules`` in every layer (Megatron-Core ``--offload-modules``), or all those of the first
    ``layers`` layers of each model chunk (Transformer Engine ``get_cpu_offload_context``); and the states of the part
    ``optimizer`` of the parameters, which the host updates (Megatron-Core ``--optimizer-offload-fraction``).
    """

    modules: tuple[str, ...] = ()
    layers: int = 0
    minimum_bytes: int = 1 << 21
    """Smaller tensors stay."""
    in_flight: int | None = None
    """Copies to the host of one kind that compute runs ahead of; None for any number."""
    optimizer: float = 0.0
    """Part of the parameters, 0 to 1."""
    optimizer_overlap: bool = True
    """Whether copies and updates of different parameters run at the same time."""


@dataclass(frozen=True)
class LowRankAdapters:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): every weight of the model is frozen.

    Beside each target linear ``y = W x`` runs ``y += (alpha / rank) B A x``, and only ``A`` and ``B`` are trained
    (Megatron Bridge ``peft/lora.py``, Hugging Face PEFT ``tuners/lora``).
    """

    rank: int
    """Outputs of ``A`` and inputs of ``B``."""
    alpha: float = 32.0
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Linears with adapters (``op_graphs.adapters.TARGETS``)."""
    dropout: float = 0.0
    """Probability of dropout in front of ``A``, or behind ``B``; 0 runs no kernel."""
    dropout_position: str = "pre"
    """``pre`` or ``post``."""


@dataclass(frozen=True)
class TrainingPlan:
    """Batch, precision and optimizer of a step."""

    seq_len: int = 4096
    micro_batch_size: int = 1
    num_microbatches: int = 1
    """Microbatches of one data-parallel rank in a step."""
    dtype: DType = DType.BF16
    """Element type of weights and activations; of GEMM operands too, unless a recipe quantises them."""
    recipe: str | None = None
    """Low-precision recipe of the linears (``op_graphs.precision``); None for GEMMs in ``dtype``."""
    fp8_param_gather: bool = False
    """Whether weights exist in quantised form only, and are gathered so."""
    fp8_storage: bool = False
    """Whether what stays between forward and backward is kept as DeepSeek-V3 does: in 8 bits, along one axis."""
    bf16_first_layers: int = 0
    """Layers at the start of the model whose linears the recipe leaves in ``dtype``."""
    bf16_last_layers: int = 0
    """Layers at its end, prediction heads not counted, of which the same holds."""
    fp8_head: bool = False
    """Whether the recipe quantises the output head too (``--fp8-output-proj``)."""
    fp8_dispatch: bool = False
    """Whether tokens and gradients travel to experts in 8 bits, quantised before they leave."""
    router_padding: bool = False
    """Whether the router pads what each expert gets for its quantised products
    (``--moe-router-padding-for-quantization``); else the experts pad it themselves."""
    grad_reduce_dtype: DType = DType.FP32
    optimizer: str = "adam"
    optimizer_dtypes: OptimizerDTypes = field(default_factory=OptimizerDTypes)
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    cross_entropy: CrossEntropy = "unfused"
    gradient_accumulation_fusion: bool = True
    """Whether the GEMM of a weight gradient adds to the main gradient itself; else it makes a gradient of its own."""
    deferred_head_gradients: int | None = None
    """Microbatches whose weight gradient of the output head waits for the end of the pipeline; None: no such thing."""
    post_validation: bool = False
    """Whether the optimizer updates without waiting for other pipeline stages, which pass their part of the gradient
    norm on and take the update back if it should not have been (arXiv:2401.10241, section 4); ranks then need not meet
    between steps."""
    attention_mask: bool = False
    """Whether the data loader makes a mask for every sequence, of a byte a pair of tokens."""
    attention: str = "flash"
    """``flash`` (the machine's best fused kernel, scores never stored), ``flash-2`` or ``flash-1`` (a FlashAttention of
    that generation), or ``unfused`` (score matrix kept)."""
    mla: str = "expanded"
    """How latent attention runs: ``expanded`` to keys and values of every head, or ``absorbed``, on the latents."""
    cuda_graphs: tuple[str, ...] = ()
    """What is launched as CUDA graphs: parts of every layer (``op_graphs.cuda_graphs``), or ``full_iteration``."""
    images_per_sample: int = 1
    """Images in a sequence of a vision-language model."""
    routing: Routing | None = None
    """None routes every expert the same number of tokens."""
    sequence_lengths: SequenceLengths | None = None
    """None makes every sequence one document of ``seq_len`` tokens."""
    lora: LowRankAdapters | None = None
    """Low-rank adapters beside frozen weights; None trains every weight."""

    def in_bf16(self, layer: int, layers: int) -> bool:
        """Whether a layer, by its global number, of a model with ``layers`` stays out of the recipe."""
        return 0 <= layer < self.bf16_first_layers or layers - self.bf16_last_layers <= layer < layers


@dataclass(frozen=True)
class OverlapPlan:
    """Which communication may run beside compute: at each point a policy of ``op_graphs.overlap.registry``, by name.

    ``True`` and ``False`` stand for the policy that a point has for them.
    """

    grad_reduce: bool | str = True
    param_gather: bool | str = True
    p2p: bool | str = True
    tp: bool | str = False
    cp: bool | str = True
    offload: bool | str = True
    ep: bool | str = True
    wgrad: bool | str = True
    contention: bool = False
    """Whether what runs at the same time on a device slows each other: SMs, memory and links are shared."""
    reserved_sms: int = 0
    """SMs that matrix products leave to communication kernels, also where none runs: their persistent kernels are
    launched over the others (an SM margin, ``set_num_sms`` of DeepGEMM)."""


@dataclass(frozen=True)
class ParallelPlan:
    """Degrees of parallelism, and from them the process groups.

    ``order`` names the dimensions from the fastest varying to the slowest, as Megatron's
    ``--use-tp-pp-dp-mapping``/``RankGenerator`` does; ``ep`` lies inside ``dp`` and takes no ranks of its own.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_comm: str = "p2p"
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    ep_dispatcher: str = "alltoall"
    ep_host_sync: bool = True
    """Whether the host waits for the numbers of tokens that its experts get before it launches what depends on them, as
    dropless routing makes it do."""
    zero: int = 1
    hsdp_shard: int | None = None
    reshard: str | int = "default"
    """With ``zero: 3``, when gathered weights are dropped: ``always`` behind every unit, ``never`` between a forward
    and its backward; ``default`` is ``always`` without a pipeline, else ``never`` (PyTorch FSDP2
    ``reshard_after_forward``, torchtitan ``fsdp_reshard_after_forward``). A number drops all but a shard over so many
    ranks behind a forward, from which the backward gathers."""
    prefetch: int = 1
    """Units whose weights are gathered ahead of the one that runs."""
    flat_parameters: bool = False
    """With ``zero: 3``, whether a unit is one flat parameter (PyTorch FSDP of the first generation, DeepSpeed), into
    which a gather writes directly; else each parameter is sharded by itself (FSDP2), so that what is gathered is copied
    apart, and gradients are copied together."""
    root_unit: bool = False
    """With ``zero: 3``, whether embedding, final norm and head are one unit, which stays gathered from its first use in
    forward to its last in backward: what ``fully_shard(model)`` and FSDP of the first generation are left with around
    layers that are units of their own; else each end of the model is a unit as a layer is."""
    whole_tensors: bool = False
    """With ``zero: 1``, whether the states of a tensor lie whole on one rank (Colossal-AI, InternEvo), which broadcasts
    it behind its update; else ranks have equal slices of one buffer (Megatron-Core, DeepSpeed)."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    layout: str | None = None
    vision_stage: str = "colocated"
    """Where the encoder of a vision-language model runs: ``colocated`` with the embedding, or on a stage of its ``own``
    before it. A layout says it itself."""
    order: str = "tp-cp-ep-dp-pp"

    @property
    def world_size(self) -> int:
        """Number of ranks: tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stages(self) -> int:
        """Pipeline stages counted over all model chunks: pp * vpp."""
        return self.pp * self.vpp

    @property
    def data_parallel_size(self) -> int:
        """Ranks over which gradients of dense parameters are reduced: dp * cp."""
        return self.dp * self.cp

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts: what is left of a stage after ep * etp."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def reshards(self) -> bool:
        """Whether weights are dropped behind every unit and gathered again."""
        drops = isinstance(self.reshard, int) or self.reshard == "always"
        return self.zero == 3 and (drops or (self.reshard == "default" and self.pp == 1))

    @property
    def gathers_by_unit(self) -> bool:
        """Whether every microbatch gathers weights unit by unit; else they stay gathered over the step."""
        return self.reshards or (self.zero == 3 and self.pp == 1)

    @property
    def keeps_gradients_whole(self) -> bool:
        """Whether gradients of sharded units add up on a rank over its microbatches, to be reduced with the last."""
        return self.zero == 3 and self.pp > 1

    def replicas(self, dimension: Dimension) -> int:
        """Ranks over which parameters are replicated: along ``DP`` dense ones, along ``EDP`` experts."""
        return self.expert_data_parallel_size if dimension is Dimension.EDP else self.data_parallel_size

    def _strides(self) -> dict[str, int]:
        strides: dict[str, int] = {}
        stride = 1
        for name in self.order.split("-"):
            if name == "ep":
                continue
            strides[name] = stride
            stride *= getattr(self, name)
        return strides

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank at the given coordinates."""
        strides = self._strides()
        return tp * strides["tp"] + cp * strides["cp"] + dp * strides["dp"] + pp * strides["pp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates ``tp, cp, dp, pp, ep`` of a global rank."""
        strides = self._strides()
        found = {name: rank // stride % int(getattr(self, name)) for name, stride in strides.items()}
        at = self._stage_ranks(rank).index(rank) if self.ep > 1 else 0
        found["ep"] = at // self.expert_strides()["ep"] % self.ep
        return found

    def expert_strides(self) -> dict[str, int]:
        """Distance between neighbours along ``etp``, ``ep`` and ``edp``, in places among the ranks of a stage.

        The rank order holds for experts too, with etp where tp stands and edp where dp stands (Megatron-Core
        ``parallel_state.py``, ``expert_decoder_rank_generator``).
        """
        sizes = {
            "tp": ("etp", self.etp),
            "ep": ("ep", self.ep),
            "dp": ("edp", self.expert_data_parallel_size),
        }
        strides: dict[str, int] = {}
        stride = 1
        for name in self.order.split("-"):
            if name in sizes:
                strides[sizes[name][0]] = stride
                stride *= sizes[name][1]
        return strides

    def _stage_ranks(self, rank: int) -> tuple[int, ...]:
        """Global ranks of the pipeline stage of ``rank``, ascending."""
        return _stage_ranks(self, rank // self._strides()["pp"] % self.pp)

    def group_ranks(self, dimension: Dimension, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of ``rank`` along a dimension, ascending.

        ``DP`` is the group over which gradients of dense parameters are reduced: dp * cp ranks, as in Megatron.
        ``WORLD`` is every rank.

        Raises:
            ValueError: for a dimension along which no group is defined.
        """
        return _group_ranks(self, dimension, rank)


_VARYING: dict[Dimension, tuple[str, ...]] = {
    Dimension.TP: ("tp",),
    Dimension.CP: ("cp",),
    Dimension.PP: ("pp",),
    Dimension.DP: ("cp", "dp"),
    Dimension.WORLD: ("tp", "cp", "dp", "pp"),
}


@lru_cache(maxsize=4096)
def _group_ranks(plan: ParallelPlan, dimension: Dimension, rank: int) -> tuple[int, ...]:
    if dimension in _EXPERT_GROUPS:
        return _expert_group(plan, dimension, rank)
    if dimension not in _VARYING:
        raise ValueError(f"no group of ranks is defined along {dimension.name}")
    at = plan.coordinates(rank)
    fixed = {name: at[name] for name in ("tp", "cp", "dp", "pp")}
    points = _points({name: int(getattr(plan, name)) for name in _VARYING[dimension]})
    return tuple(sorted(plan.rank_of(**{**fixed, **point}) for point in points))


_EXPERT_GROUPS: dict[Dimension, tuple[str, ...]] = {
    Dimension.EP: ("ep",),
    Dimension.ETP: ("etp",),
    Dimension.EDP: ("edp",),
    Dimension.ETP_EP: ("etp", "ep"),
}


def _expert_group(plan: ParallelPlan, dimension: Dimension, rank: int) -> tuple[int, ...]:
    """Groups of the expert layers: inside a stage, etp, ep and expert data parallelism vary in the rank order.

    Source: Megatron-Core ``parallel_state.py``, the expert rank generator.
    """
    ranks = _stage_ranks(plan, plan.coordinates(rank)["pp"])
    strides = plan.expert_strides()
    sizes = {"etp": plan.etp, "ep": plan.ep, "edp": plan.expert_data_parallel_size}
    position = ranks.index(rank)
    varying = _EXPERT_GROUPS[dimension]
    first = position - sum(position // strides[name] % sizes[name] * strides[name] for name in varying)
    points = _points({name: sizes[name] for name in varying})
    places = (first + sum(strides[name] * at for name, at in point.items()) for point in points)
    return tuple(ranks[place] for place in sorted(places))


@lru_cache(maxsize=1024)
def _stage_ranks(plan: ParallelPlan, pp: int) -> tuple[int, ...]:
    points = _points({"tp": plan.tp, "cp": plan.cp, "dp": plan.dp})
    return tuple(sorted(plan.rank_of(pp=pp, **point) for point in points))


def _points(sizes: dict[str, int]) -> list[dict[str, int]]:
    points: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        points = [{**point, name: value} for point in points for value in range(size)]
    return points
