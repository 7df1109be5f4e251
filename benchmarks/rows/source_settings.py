"""What a source says about all of its rows at once: framework defaults, vocabulary, FLOPs convention.

Each entry states its evidence. A setting here holds for every row of the source, unless the row itself says
otherwise; None means the source does not say, and a row that does not say either is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from op_graphs.model_flops import FlopsConvention


@dataclass(frozen=True)
class TflopsConvention:
    """How a source turned time into TFLOP/s, so that it can be turned back."""

    formula: FlopsConvention
    causal: bool
    """Whether attention was halved for the causal mask."""
    counts_recompute: bool
    """Whether the second forward of full recompute is counted."""


@dataclass(frozen=True)
class SourceSettings:
    """Settings common to all rows of a source."""

    frameworks: tuple[str, ...] = ()
    """Row frameworks, by prefix, that are plain Megatron-like runs; empty accepts any."""
    vocab_size: int | None = None
    vocab_unpadded: bool = False
    """Whether the vocabulary is not padded: each tensor-parallel rank has the whole part of its share."""
    seq_len: int | None = None
    dtype: str | None = None
    grad_reduce_dtype: str = "fp32"
    fp8_scaling: str = "current"
    """How tensorwise fp8 scales are found, where a row says fp8 and no more."""
    recompute: str | None = None
    recompute_names: Mapping[str, str] = field(default_factory=dict)
    """What its words for recompute stand for, where other sources mean something else."""
    zero: int | None = None
    attention: str | None = None
    schedule: str | None = None
    sp: bool = False
    overlap: Mapping[str, bool | str] = field(default_factory=dict)
    cp_comm: str = "p2p"
    """How attention runs over context-parallel ranks; PyTorch's own ring overlaps nothing where it is compiled."""
    overlap_by_schedule: Mapping[str, Mapping[str, bool | str]] = field(default_factory=dict)
    """What differs from that, by the beginning of a schedule's name in the rows."""
    overlap_in_pipelines: Mapping[str, bool | str] = field(default_factory=dict)
    """What differs from that in rows with a pipeline."""
    post_validation: tuple[str, ...] = ()
    """Schedules whose optimizer waits for no other stage, by the beginning of their names in the rows."""
    batch_fetch_waits: bool = False
    """Whether the host waits for the device in every forward to fetch its batch."""
    cross_entropy_fusion: bool | str = False
    loss_compiled_in: tuple[str, ...] = ()
    """Tables, by their beginning, whose compiled runs compile the loss as well."""
    microbatch_a_stage_in: tuple[str, ...] = ()
    """Tables, by their beginning, whose local batch is cut into as many microbatches as a pipeline has ranks."""
    gpu_in: Mapping[str, str] = field(default_factory=dict)
    """GPUs of tables, by their beginning, where the rows' own name leaves the card open."""
    composed_in: tuple[str, ...] = ()
    """Tables, by their beginning, whose times are sums of parts (``benchmarks/composed.py``), where no host waits
    between stages."""
    packed_as_whole: bool = False
    """Whether packed samples of unstated lengths count as whole sequences."""
    transformer_engine: bool = True
    eager: bool | tuple[str, ...] = False
    """Whether pointwise operations are neither fused nor, where a row does not say so, compiled; or which of them."""
    eager_when_compiled: tuple[str, ...] = ()
    """Which of them run one by one even there."""
    fp32_norm_inputs: bool = False
    """Whether norms read fp32 copies of their inputs."""
    norms_run_again: bool = False
    """Whether norms run again in the backward of runs that recompute nothing else."""
    separate_projections: bool = False
    """Whether queries, keys and values, and the halves of a gated MLP, are linears of their own."""
    gelu_fusion: bool = True
    """Whether GELU and the bias in front of it are one kernel forward."""
    separate_biases: bool = False
    """Whether linears are Megatron-LM's own, whose biases are added, and their gradients summed, by kernels apart."""
    flat_parameters: bool = False
    """Whether ZeRO-3 is PyTorch's first FSDP, with a flat parameter a unit."""
    root_unit: bool = False
    """Whether the ends of a model with ZeRO-3 are one unit."""
    torch_pipelining: bool = False
    """Whether pipelines are those of PyTorch."""
    expandable_segments: bool = False
    """Whether the source's launcher sets ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    whole_tensors: bool = False
    """Whether the states of a tensor lie whole on one rank with ZeRO-1."""
    shards_over_context: bool = False
    """Whether the degree of FSDP in rows leaves out the ranks of context parallelism, over which it shards as well."""
    shape_from_size: bool = False
    """Whether layers and heads that a row leaves out follow from its size and width."""
    uneven_stages: bool = False
    """Whether layers that do not divide over the stages are spread as evenly as they can be."""
    fabric_by_gpu: Mapping[str, float] = field(default_factory=dict)
    """GB/s of the network for each GPU and direction, where a source says another than the machine's profile, by the
    beginning of the GPU's name."""
    gradient_accumulation_fusion: bool = True
    recipes: str = ""
    """Whose recipes (``recipes.py``) say what the rows do not; empty for none."""
    embedding_counts_as_layer: bool = False
    """First and last stage hold one layer less than the others."""
    tflops: TflopsConvention | None = None
    notes: tuple[str, ...] = ()
    refused: str = ""
    """Why no row of the source is expressed."""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that differ for the rows of a table, by its beginning and the names of the fields."""

    def of_table(self, table: str) -> SourceSettings:
        """The settings of the rows of a table."""
        changes = next((changes for name, changes in self.tables.items() if table.startswith(name)), None)
        return replace(self, **changes) if changes else self

    def gpu_of(self, table: str, named: str) -> str:
        """The GPU of a row of a table that names one."""
        return next((gpu for beginning, gpu in self.gpu_in.items() if table.startswith(beginning)), named)

    def fabric_on(self, gpu: str) -> float | None:
        """GB/s of the network for each GPU; None if the profile's holds."""
        return next((rate for name, rate in self.fabric_by_gpu.items() if gpu.lower().startswith(name)), None)


_NO_OVERLAP = {"grad_reduce": False, "param_gather": False, "p2p": False}
_MEGATRON_2021 = TflopsConvention("megatron", causal=False, counts_recompute=True)

_NEMO = ("nemo-24.07", "nemo-24.12", "nemo-25.02-25.04")

SETTINGS: dict[str, SourceSettings] = {
    # arXiv:2205.05198: Megatron-LM of 2022, mixed fp16, attention not fused; section 6.3 says gradients are reduced
    # after the backward pass. Overlapped point-to-point transfers came to Megatron-LM in 2023.
    "korthikanti2022": SourceSettings(
        dtype="fp16",
        separate_biases=True,
        grad_reduce_dtype="fp16",
        zero=0,
        attention="unfused",
        overlap=_NO_OVERLAP,
    ),
    # The same paper's memory, as digitised by calculon's authors; its state is 18 bytes a parameter, so gradients are
    # fp32.
    "calculon-validation": SourceSettings(
        dtype="fp16",
        grad_reduce_dtype="fp32",
        zero=0,
        attention="unfused",
        schedule="1f1b",
        overlap=_NO_OVERLAP,
        transformer_engine=False,
    ),
    # arXiv:2104.04473: as above; the TFLOP/s of Table 1 count the recomputed forward (equation 3).
    "megatron-sc21": SourceSettings(
        dtype="fp16",
        separate_biases=True,
        grad_reduce_dtype="fp16",
        recompute="full",
        zero=0,
        attention="unfused",
        overlap=_NO_OVERLAP,
        tflops=_MEGATRON_2021,
    ),
    # vTrain: Megatron-DeepSpeed with fp16, 1F1B and recompute by the configurations in its repository; 50257 words. Its
    # times of one node are sums of parts: they lie on lines over microbatches, layers and replicas to the microsecond.
    # What not to count in them is in ``benchmarks/composed.py``. The rows themselves say more:
    # - What is not of microbatches grows by 20.5 ps a parameter at dp 1: 28 bytes, which Adam alone moves, at the rate
    #   of an A100 of 40 GB. All of these models fit 40 GB, those of several nodes do not; the source does not say the
    #   card. With pipelines it is that and the sum of the stages, to a quarter of a millisecond: nothing waits between
    #   stages.
    # - Nothing is recomputed. With pipelines a microbatch takes as long as the layers of the last stage and the head,
    #   with recompute on the others they would take longer; and where kernels bound a layer (tp 1, microbatches of 8)
    #   it takes 0.76 of what it would with recompute, and 1.02 of what it does without.
    # - The parts are those of the source's own model (``src/model``, ``src/trainer.py``): each rank has the whole part
    #   of its share of the vocabulary, not padded, and the loss is PyTorch's. A head of 50257 columns, an odd number,
    #   takes three times as long as one of 25128 on each of two ranks.
    "vtrain-ground-truth": SourceSettings(
        vocab_size=50257,
        dtype="fp16",
        separate_biases=True,
        grad_reduce_dtype="fp16",
        recompute="full",
        zero=0,
        attention="unfused",
        schedule="1f1b",
        overlap=_NO_OVERLAP,
        composed_in=("single-node",),
        gpu_in={"single-node": "A100 40GB"},
        tables={
            "single-node": {"recompute": "none", "vocab_unpadded": True, "cross_entropy_fusion": "torch"}
        },
        notes=("fp16, recompute by table, no ZeRO and unfused attention are the source's, not the row's",),
    ),
    # BigScience: Megatron-DeepSpeed of early 2022, fp16, ZeRO-1, full activation checkpointing, 250k words. The
    # stated sizes agree with that vocabulary and a tied embedding.
    "bigscience-tr11": SourceSettings(
        vocab_size=250_000,
        dtype="fp16",
        grad_reduce_dtype="fp16",
        recompute="full",
        zero=1,
        attention="unfused",
        schedule="1f1b",
        overlap=_NO_OVERLAP,
        tflops=_MEGATRON_2021,
        shape_from_size=True,
        uneven_stages=True,
        notes=(
            "fp16, full recompute, ZeRO-1 and 250k words are the source's, not the row's",
            "layers that a row does not say follow from its size, heads are then of about 128 elements",
        ),
    ),
    # Megatron-LM README of Core 0.8: model FLOPs without recompute, attention in full, overlaps on.
    "megatron-readme-h100": SourceSettings(
        zero=1,
        attention="flash",
        sp=True,
        tflops=TflopsConvention("megatron", causal=False, counts_recompute=False),
    ),
    # NSDI 2024: flash attention in the Megatron-LM baseline; the rows of MegaScale itself change the model.
    "megascale": SourceSettings(frameworks=("Megatron-LM",), dtype="bf16", zero=1, attention="flash"),
    # Megatron-Core 0.6 with Transformer Engine, which had delayed scaling only; its launch script
    # (training/benchmarks/llama3_8B/megatron/pretrain_llama3.sh) sets the distributed optimizer, sequence parallelism
    # and flash attention, and no overlap.
    "flagperf": SourceSettings(
        frameworks=("Megatron-core", "FlagScale"),
        fp8_scaling="delayed",
        zero=1,
        attention="flash",
        schedule="1f1b",
        overlap=_NO_OVERLAP,
    ),
    # InternEvo: configs/7B_sft.py has flash attention, overlap_sync_grad on, overlap_sync_param off, bf16, and tensor
    # parallelism without sequence parallelism (mode mtp). The page came to InternLM's repository in July 2023, whose
    # doc/en/install.md has FlashAttention 1.0.5; it names apex too. A node of its cluster has four NICs of 100 Gb/s.
    # Gradients are autograd's, added to a parameter's in bf16. Its layer (internlm/model/modeling_internlm.py) gives
    # apex's RMSNorm residual.float(), and runs both norms again in backward unless the whole layer does
    # (dropout_selective_checkpoint); gate and up are linears of their own, behind them F.silu and a product
    # (internlm/model/linear.py); the optimizer is torch.optim.AdamW on fp32 copies of the tensors that a rank owns
    # whole, gradients are reduced to all ranks, and owners broadcast what they updated
    # (internlm/solver/optimizer/hybrid_zero_optim.py). Over four NICs a node the gradients' reduction lasts as long as
    # the backward pass it runs beside, from which it takes SMs. Packed samples of unstated lengths count as whole
    # sequences: of the two tables' rows with the same settings, the packed one was 0.6 % faster.
    "internevo": SourceSettings(
        dtype="bf16",
        grad_reduce_dtype="bf16",
        zero=1,
        attention="flash-1",
        transformer_engine=False,
        gradient_accumulation_fusion=False,
        eager=("mlp", "optimizer"),
        fp32_norm_inputs=True,
        packed_as_whole=True,
        norms_run_again=True,
        whole_tensors=True,
        fabric_by_gpu={"a100": 6.25},
        schedule="1f1b",
        overlap={"grad_reduce": True, "param_gather": False, "p2p": False, "contention": True},
    ),
    # arXiv:2401.10241: Megatron-LM fork, no recompute, one layer less on the first and on the last stage; its
    # examples/pretrain_zero_bubble.sh has fp16 and no overlapped point-to-point transfers. It asks for flash attention
    # at 4,096 tokens, but the peak memory of all four models at 1,024 (table 4) is that of stored scores and dropout
    # masks: without them it would be 26 GB instead of 39 at 6.2B. The vocabulary is not stated; the sizes of all four
    # models agree with 32,000 words and a tied embedding. 1F1B and its interleaved form are Megatron-LM's, which posts
    # transfers in batches (batch_p2p_comm) and waits for the device behind each (batch_p2p_sync); the runtime of the
    # automatic schedules (core/pipeline_parallel/zb_schedules.py) posts batches too, but waits only for what a pass
    # reads, so that transfers run beside compute and take SMs from it, and validates the optimizer's step behind it, as
    # the script has it for all but fp32 (--enable-optimizer-post-validation). The script has layers of Megatron-LM's
    # own (--transformer-impl local), and get_batch (pretrain_gpt.py) fetches nothing between first and last stage. That
    # GELU is not fused forward is inferred, no source says it: in the paper's profile (table 6) forwards of all four
    # models take longer than their kernels by 71 to 117 us (85 and 87 for several sequences a microbatch) for each
    # million hidden activations and layer, and backwards take no longer. The ten tensor operations of bias_gelu one
    # by one, in place of one kernel, are 94. A time of the host for each forward, which stood here before, leaves
    # 1.5B and 6.2B 10 % short, and one for each score explains the four less evenly.
    "zero-bubble": SourceSettings(
        vocab_size=32_000,
        dtype="fp16",
        grad_reduce_dtype="fp16",
        recompute="none",
        zero=0,
        attention="unfused",
        overlap={**_NO_OVERLAP, "p2p": "batched"},
        overlap_by_schedule={"zb": {"p2p": "ahead", "contention": True}},
        post_validation=("zb",),
        separate_biases=True,
        gelu_fusion=False,
        embedding_counts_as_layer=True,
        uneven_stages=True,
        notes=("fp16, unfused attention and 32,000 words are the source's, not the row's",),
    ),
    # NeMo: distributed optimizer, sequence parallelism with tp, Transformer Engine attention. Scaling by the magnitude
    # of the tensor itself came to Transformer Engine with version 2.2 in spring 2025; NeMo's fp8 recipe
    # (bf16_with_fp8_mixed) scales by earlier steps, Megatron-Bridge's tables say FP8-CS.
    **{
        name: SourceSettings(
            zero=1,
            attention="flash",
            sp=True,
            fp8_scaling="delayed",
            recompute="none",
            # ub_tp_comm_overlap, and tp_comm_overlap of NeMo 2.0's performance scripts.
            overlap={"tp": "userbuffers"},
            vocab_size=51200,
            notes=("nothing is recomputed, as in the launcher's configurations; the pages do not say",),
        )
        for name in _NEMO
    },
    # The long-sequence page has TFLOP/s only. NeMo counts attention in full (nemo/utils/flops_formulas.py): its
    # 25.04 page prints 1,943 TFLOP/s and 4,035 tokens/s for Llama 3 70B.
    "nemo-longseq": SourceSettings(
        zero=1,
        attention="flash",
        sp=True,
        fp8_scaling="delayed",
        recompute="none",
        vocab_size=51200,
        tflops=TflopsConvention("megatron", causal=False, counts_recompute=False),
        notes=("nothing is recomputed, as in the launcher's configurations; the pages do not say",),
    ),
    # Megatron-Bridge's recipes (src/megatron/bridge/recipes, scripts/performance/utils): distributed optimizer with
    # gradients reduced in bf16, overlapped with compute; Transformer Engine's loss; embedding and loss in place of a
    # layer each where layers do not divide.
    "megatron-bridge": SourceSettings(
        zero=1,
        attention="flash",
        sp=True,
        fp8_scaling="current",
        grad_reduce_dtype="bf16",
        cross_entropy_fusion=True,
        recipes="megatron-bridge",
        uneven_stages=True,
        # CommOverlapConfig(tp_comm_overlap=True).
        overlap={"tp": "userbuffers"},
        notes=("recompute, dispatcher and overlaps are those of the recipe for model, GPU and precision",),
    ),
    # The same recipes; every row says what it recomputes. Skills of the same repository: AdamW in fp32, fp32 gradients.
    # TFLOP/s halve attention: those of rows that give the time too are theirs to 1 %.
    "megatron-bridge-ablations": SourceSettings(
        zero=1,
        attention="flash",
        sp=True,
        recompute="none",
        cross_entropy_fusion=True,
        dtype="bf16",
        tflops=TflopsConvention("megatron", causal=True, counts_recompute=False),
    ),
    # torchtitan: FSDP2 with fp32 sharded parameters, over dp_shard * cp ranks (parallelisms/parallel_dims.py),
    # PyTorch's flash attention (FlashAttention 2), no dropout, F.cross_entropy of logits in fp32 outside of what is
    # compiled. Its configurations of 2024 for 64 A100 (train_configs/llama3_8b.toml, llama2_13b.toml) have compile =
    # false and norm_type = "rmsnorm", written out in tensor operations (models/norms.py). Tensor parallelism always
    # comes with sequence parallelism (parallelisms/parallelize_llama.py). What lies outside of layers is left to the
    # unit of the model itself (apply_fsdp), and run_llama_train.sh sets how segments grow.
    # Compiled or not, rotary positions are a product of complex numbers (models/llama/model.py, apply_rotary_emb), for
    # which PyTorch's compiler makes no code (github.com/pytorch/torchtitan/issues/15), and casts before and behind it.
    "torchtitan-perf-2024": SourceSettings(
        root_unit=True,
        expandable_segments=True,
        attention="flash-2",
        transformer_engine=False,
        eager=True,
        eager_when_compiled=("positions",),
        separate_projections=True,
        cross_entropy_fusion="torch",
    ),
    # Since 2025 it compiles the loss with the layers (components/loss.py): one pass over the logits and one over their
    # gradient.
    # What a row's technique does not say is compiled runs eagerly.
    "torchtitan-bench": SourceSettings(
        root_unit=True,
        torch_pipelining=True,
        expandable_segments=True,
        attention="flash-2",
        transformer_engine=False,
        eager=True,
        eager_when_compiled=("positions",),
        # mode = "selective", selective_ac_option = "op" in llama3_8b.toml.
        recompute_names={"selective ac": "per-op sac", "selective": "per-op sac"},
        sp=True,
        separate_projections=True,
        shards_over_context=True,
        # utils.py, create_context_parallel_ctx: PyTorch's context_parallel, whose keys and values are gathered unless
        # experimental.context_parallel_rotate_method says otherwise.
        cp_comm="dtensor-allgather",
        cross_entropy_fusion="torch",
        loss_compiled_in=("2025",),
        # pipelining_utils.py of 2024: without experimental.pipeline_parallel_microbatches as many as the pipeline has
        # ranks; since 2025 of one sequence each (config_manager.py, pipeline_parallel_microbatch_size).
        microbatch_a_stage_in=("2024",),
        seq_len=8192,
        dtype="bf16",
        zero=3,
        uneven_stages=True,
        # DTensor keeps what a linear reads as it was redistributed; rows with asynchronous tensor parallelism say so.
        overlap={"tp": "gathered-once"},
        # torch/distributed/pipelining/stage.py (backward_maybe_with_nosync): no backward reduces, and behind the last
        # one every unit does (run_post_backward).
        overlap_in_pipelines={"grad_reduce": "after-backward"},
        notes=(
            "sequences of 8,192 tokens where a row does not say: torchtitan's configurations for these models",
        ),
    ),
    # fms-fsdp: PyTorch's flash attention, FSDP with gradients reduced in bf16 (policies/mixed_precision.py), compiled.
    # Its README has nodes with 400 Gb/s on A100 and 800 Gb/s on H100.
    "fms-fsdp": SourceSettings(
        fabric_by_gpu={"a100": 6.25, "h100": 12.5},
        attention="flash-2",
        transformer_engine=False,
        flat_parameters=True,
        grad_reduce_dtype="bf16",
        cross_entropy_fusion="torch",
    ),
    "nemo-automodel": SourceSettings(attention="flash", uneven_stages=True),
    # Megatron-LM of 2023 with --use-flash-attn and --use-distributed-optimizer (the tool's README).
    "megatron-pr482": SourceSettings(zero=1, attention="flash-2", transformer_engine=False, recompute="none"),
    # CCL-Bench: torchtitan on Perlmutter; the rest is in the TOML files beside the traces (``configurations``).
    "ccl-bench": SourceSettings(
        attention="flash-2",
        transformer_engine=False,
        sp=True,
        uneven_stages=True,
        separate_projections=True,
        shards_over_context=True,
        cross_entropy_fusion="torch",
        overlap={"tp": "gathered-once"},
        eager=True,
        notes=("sequence parallelism comes with torchtitan's tensor parallelism",),
    ),
    # Megatron-MoE-ModelZoo: Megatron-Core with Transformer Engine, distributed optimizer; tables say the rest. TFLOP/s
    # halve attention: those of the rows of Qwen3 235B that give the time too are theirs to 1 %.
    "moe-modelzoo": SourceSettings(
        zero=1,
        attention="flash",
        sp=True,
        cross_entropy_fusion=True,
        uneven_stages=True,
        recompute="none",
        tflops=TflopsConvention("megatron", causal=True, counts_recompute=False),
    ),
    # Their rows have argument lists, which ``megatron_rows`` reads.
    "megatron-golden": SourceSettings(refused="a functional test without its argument list"),
    # PyTorch FSDP; ZeRO-3 or ZeRO-2 comes from the row. Transformer Engine of 2023 has delayed scaling only. One
    # script (scripts/train/benchmarking/sweep.sh, with the batches of these rows) made the A100 and the H100 tables,
    # with PyTorch 2.0.1 and attn_impl triton, the default of submit_benchmarks.py and of the configurations: Triton's
    # kernel of the first FlashAttention. scripts/train/yamls/pretrain/mpt-*.yaml: mixed_precision PURE, in which
    # gradients are reduced in bf16, and Composer's decoupled AdamW, a kernel for each operation. MPT's loss is fused,
    # but two metrics of training compute a cross entropy of the logits each (llmfoundry/models/mpt/modeling_mpt.py,
    # train_metrics), which together is the traffic of PyTorch's loss.
    "llm-foundry-mpt": SourceSettings(
        vocab_size=50368,
        eager=True,
        flat_parameters=True,
        grad_reduce_dtype="bf16",
        cross_entropy_fusion="torch",
        attention="flash-1",
        transformer_engine=False,
        schedule="1f1b",
        fp8_scaling="delayed",
    ),
}

UNKNOWN_SOURCE = SourceSettings()
