"""What a kernel computes, read from its name and from the operator that launched it.

Real traces carry no kind, so ordered tables of regular expressions decide: the launching operator first (it says what
a generic ``reduce_kernel`` is for), the kernel's own name otherwise. Only the unique names are matched; the answers
are broadcast over the slices. The first rule that matches wins, so special rules stand above general ones. Names of
CUDA, ROCm, Triton, CUTLASS, cuBLAS, cuDNN, NCCL, RCCL, DeepEP and NVSHMEM kernels are covered; kernels nothing is
known about stay ``OpKind.OTHER`` and are reported as such (:func:`coverage`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from op_graphs.columns import Bool, Int8, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, OpKind

_LONGEST_NAME = 2000
"""Characters of a name that are looked at; templates unroll to more, and say nothing new."""


def _compiled(rows: Iterable[tuple[Any, str]]) -> tuple[tuple[Any, re.Pattern[str]], ...]:
    # Names are matched in lower case: that is several times as fast as ignoring case.
    return tuple((value, re.compile(pattern.lower())) for value, pattern in rows)


_COMMUNICATION_KERNELS = _compiled(
    [
        (
            Communication.ALL_REDUCE,
            r"[nrm]ccl\w*_all_?reduce|cross_device_reduce|(one|two)_?shot_all_?reduce",
        ),
        (Communication.ALL_REDUCE, r"multimem_all_?reduce|custom_all_?reduce|quickreduce"),
        (Communication.REDUCE_SCATTER, r"[nrm]ccl\w*_reduce_?scatter|userbuffers\w*(reduce_?scatter|_rs)"),
        (
            Communication.ALL_GATHER,
            r"[nrm]ccl\w*_all_?gather|userbuffers\w*(all_?gather|_ag)|multimem_all_?gather",
        ),
        (Communication.ALL_TO_ALL, r"[nrm]ccl\w*_all_?to_?all"),
        (Communication.BROADCAST, r"[nrm]ccl\w*_broadcast"),
        (Communication.REDUCE, r"[nrm]ccl\w*_reduce(_|\b)"),
        (Communication.SEND_RECEIVE, r"[nrm]ccl\w*_send_?recv"),
        (Communication.SEND, r"userbuffers\w*send"),
        (Communication.RECEIVE, r"userbuffers\w*recv"),
        # Expert-parallel libraries: the notify kernels exchange sizes and wait for peers.
        (
            Communication.ALL_TO_ALL,
            r"(internode|intranode|internode_ll|hybrid_ep)\w*::(\w*notify|dispatch|combine)",
        ),
        (Communication.ALL_TO_ALL, r"\b(cached_)?notify_(dispatch|combine)|EpDispatch|EpCombine|a2a_kernel"),
        (Communication.BARRIER, r"nvshmem\w*(barrier|sync)|(internode|intranode)\w*::barrier"),
        (Communication.UNKNOWN, r"^(void )?[nrm]ccl(dev)?kernel|nvshmem|rocshmem|mscclpp|userbuffers"),
    ]
)

_KERNELS = _compiled(
    [
        (OpKind.MEMSET, r"__amd_rocclr_fillBuffer|^memset"),
        (OpKind.MEMCPY, r"__amd_rocclr_copyBuffer|^memcpy"),
        (OpKind.PERMUTE, r"reshape_and_cache|store_?kv_?cache|concat_and_cache"),
        (OpKind.ELEMENTWISE, r"rotary|\brope|_rope|rope_"),
        (OpKind.SCAN, r"chunk_(scan|state|cumsum)|state_passing|bmm_chunk|selective_scan"),
        (
            OpKind.SCAN,
            r"delta_rule|chunk_(fwd|bwd)_kernel_\w|scaled_dot_kkt|solve_tril|wy_repr|chunk_local_cumsum",
        ),
        (OpKind.ATTENTION, r"flash|fmha|attention|attn|\bmha_|_mha_|sdpa|mla_(fwd|bwd|decode)|mem_?eff"),
        (
            OpKind.PERMUTE,
            r"(nchw|nhwc|nchwc)_?to_?(nchw|nhwc)|folded(nchw|nhwc)|batched_transpose|::transpose<",
        ),
        (
            OpKind.CONVOLUTION,
            r"conv(?!ert)|winograd|scudnn|implicit_(gemm|con)|igemm_|[dw]grad_(alg|engine|opt|ind|imp)",
        ),
        (
            OpKind.CONVOLUTION,
            r"xmma_(fprop|dgrad|wgrad)|cudnn\w*::(detail|cnn)|s\d+(fprop|dgrad|wgrad)|bwd_weight",
        ),
        (OpKind.NORM, r"(layer|batch|group|instance|rms|_l2)_?norm|\bln_(fwd|bwd)|\bbn_(fw|bw)|::bn_(fw|bw)"),
        (OpKind.NORM, r"cuApply(LayerNorm|RMSNorm)|cuCompute(PartGrad|Grad)|GammaBeta|add_rmsnorm"),
        (OpKind.LOSS, r"cross_?entropy|nll_loss|mse_loss|smooth_l1|kl_div|vocab_parallel|_xent"),
        (OpKind.SOFTMAX, r"soft_?max"),
        (
            OpKind.ROUTER,
            r"top_?k|rout(er|ing)|gating|count_?expert|moe_align|dispatch_layout|fused_mapping|bitmatrix",
        ),
        (
            OpKind.PERMUTE,
            r"(un)?permute|moe_(sum|scatter|gather)|matmul_scatter|expand_to_fused|reduce_fused_impl",
        ),
        (OpKind.EMBEDDING, r"embedding|indexSelect|pooled_emb|bounds_check_indices|linearize_index|\bemb_"),
        # A dense product of the library's grouped-GEMM namespace is still one product.
        (
            OpKind.GROUPED_GEMM,
            r"[mk]_grouped|matmul_ogs|fused_moe|moe_gemm|grouped_mm|group_?gemm|GemmGrouped",
        ),
        (OpKind.GEMM, r"grouped_gemm::cuda::fp8"),
        (OpKind.GROUPED_GEMM, r"grouped_?gemm|gemm_?grouped|GroupProblemShape"),
        (
            OpKind.GEMM,
            r"gemm|gemv|\bCijk_|xmma|nvjet|matmul|cublas|split_?k|(?<![a-z])[bs]?mm(_|\b)|dot_kernel|trsm|syrk",
        ),
        (OpKind.GEMM, r"cutlass(__5x_\w+)?::Kernel|cutlass_\d+_|epilogue::impl::globalKernel"),
        (OpKind.OPTIMIZER, r"adam|adagrad|lamb(?!da)|fused_?sgd|sgd_|muon|axpby|Optim"),
        (OpKind.REDUCTION, r"(l2|lp|max)_?norm(functor|_?kernel)|norm_?cleanup"),
        (OpKind.OPTIMIZER, r"multi_tensor_apply|MultiTensor"),
        (OpKind.ELEMENTWISE, r"swiglu|geglu|gelu|silu|relu|act_and_mul|dropout"),
        (
            OpKind.CAST,
            r"(?<!broad)(?<!with)(?<!no)cast|quant|(float|half|bfloat16|float8\w*)to\w*copy|(bfloat16|float8\w*|half)_copy|convertTensor",
        ),
        (OpKind.CAST, r"fp8|mxfp|nvfp4"),
        (
            OpKind.PERMUTE,
            r"transpose|CatArray|scatter|gather|recat|roll_cuda|flip|tri[ul]+_tril|index_|RadixSort|sort|_cat_",
        ),
        (
            OpKind.PERMUTE,
            r"batched_?copy|_permut|copy_?tensor|block_bucketize|jagged|segment|slice|unique|compact",
        ),
        (
            OpKind.ELEMENTWISE,
            r"elementwise|triton_poi|SubTensorOp|fill|masked|copy_kernel|OpTensor|pointwise|distribution_",
        ),
        (
            OpKind.REDUCTION,
            r"reduc|triton_(red|per)|scan|pool|argmax|argmin|::sum|_sum|mean|cumsum|histogram|softplus",
        ),
        (
            OpKind.ELEMENTWISE,
            r"triton_|bias|scale|_add|add_|mul|copy|arange|iota|range|where|compare|clamp|upsample|pad",
        ),
    ]
)

_OPERATORS = _compiled(
    [
        (OpKind.GROUPED_GEMM, r"aten::(_scaled)?_grouped_mm|.*grouped_?gemm.*"),
        (
            OpKind.GEMM,
            r"aten::(mm|addmm|bmm|baddbmm|addbmm|_scaled_mm|_int_mm|mv|addmv|dot|vdot|ger|_addmm_activation)",
        ),
        (
            OpKind.CONVOLUTION,
            r"aten::((cudnn|miopen|mkldnn)_)?(convolution|conv\dd|conv_transpose\dd|_convolution).*",
        ),
        (
            OpKind.ATTENTION,
            r"aten::_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention).*",
        ),
        (OpKind.ATTENTION, r"(flash_attn.*|FlashAttn.*)::.*"),
        (
            OpKind.NORM,
            r"aten::(native|cudnn|miopen|_fused)_?\w*(layer|batch|group|rms)_norm.*|aten::batch_norm_.*",
        ),
        (
            OpKind.LOSS,
            r"aten::(_log_softmax.*|nll_loss.*|cross_entropy.*|mse_loss.*|binary_cross_entropy.*|kl_div.*)",
        ),
        (OpKind.SOFTMAX, r"aten::_?(masked_)?softmax.*"),
        (OpKind.EMBEDDING, r"aten::(embedding.*|_embedding_bag.*)"),
        (OpKind.ROUTER, r"aten::topk"),
        (OpKind.OPTIMIZER, r"aten::_fused_(adam|adamw|sgd|adagrad)_?"),
        (
            OpKind.REDUCTION,
            r"aten::(sum|mean|norm|linalg_vector_norm|_foreach_norm|amax|amin|max|min|argmax|cumsum|any|all|var|std)",
        ),
        (
            OpKind.PERMUTE,
            r"aten::(cat|stack|index|index_put_?|_index_put_impl_|index_select|gather|scatter_?\w*|sort|roll|flip)",
        ),
    ]
)

_COLLECTIVES: tuple[tuple[str, Communication], ...] = (
    ("allreduce", Communication.ALL_REDUCE),
    ("allgather", Communication.ALL_GATHER),
    ("reducescatter", Communication.REDUCE_SCATTER),
    ("alltoall", Communication.ALL_TO_ALL),
    ("broadcast", Communication.BROADCAST),
    ("sendrecv", Communication.SEND_RECEIVE),
    ("sendreceive", Communication.SEND_RECEIVE),
    ("send", Communication.SEND),
    ("isend", Communication.SEND),
    ("recv", Communication.RECEIVE),
    ("receive", Communication.RECEIVE),
    ("irecv", Communication.RECEIVE),
    ("barrier", Communication.BARRIER),
    ("reduce", Communication.REDUCE),
    ("gather", Communication.GATHER),
    ("scatter", Communication.SCATTER),
)

_EXPERT_PARALLEL = re.compile(
    r"(internode|intranode|internode_ll|hybrid_ep)\w*::|notify_(dispatch|combine)|EpDispatch|EpCombine"
)

_POINT_TO_POINT = (Communication.SEND, Communication.RECEIVE, Communication.SEND_RECEIVE)


def classify_kernels(names: Sequence[str]) -> tuple[Int8, Int8]:
    """Kind and communication of kernel names; two arrays of shape ``[len(names)]`` (OpKind, Communication)."""
    kinds = np.zeros(len(names), dtype=np.int8)
    communication = np.zeros(len(names), dtype=np.int8)
    for row, name in enumerate(names):
        kinds[row], communication[row] = _classify(name)
    return kinds, communication


@lru_cache(maxsize=1 << 16)
def _classify(name: str) -> tuple[int, int]:
    """Kind and communication of one kernel name."""
    name = name[:_LONGEST_NAME].lower()
    transfer = _first(_COMMUNICATION_KERNELS, name, Communication.NONE)
    kind = kind_of_communication(transfer) if transfer else _first(_KERNELS, name, OpKind.OTHER)
    return int(kind), int(transfer)


def classify_operators(names: Sequence[str]) -> Int8:
    """Kind that a launching operator gives its kernels, ``OTHER`` where it does not decide; shape ``[len(names)]``."""
    found = [
        next(
            (kind for kind, pattern in _OPERATORS if pattern.fullmatch(name[:_LONGEST_NAME].lower())),
            OpKind.OTHER,
        )
        for name in names
    ]
    return np.array(found, dtype=np.int8)


def is_expert_parallel(name: str) -> bool:
    """Whether a communication kernel is one of the libraries that only serve expert parallelism."""
    return _EXPERT_PARALLEL.search(name) is not None


def kind_of_communication(transfer: int) -> OpKind:
    """``P2P`` for sends and receives, ``COLLECTIVE`` otherwise."""
    return OpKind.P2P if transfer in _POINT_TO_POINT else OpKind.COLLECTIVE


def parse_communication(name: str) -> Communication:
    """The transfer a collective name means (``_allgather_base``, ``nccl:all_reduce``, ``send 0->1``), NONE for ''."""
    plain = name.lower().removeprefix("nccl:").removeprefix("gloo:").removeprefix("c10d::")
    plain = re.sub(r"[_\s-]|coalesced", "", plain)
    if not plain:
        return Communication.NONE
    return next((value for prefix, value in _COLLECTIVES if plain.startswith(prefix)), Communication.UNKNOWN)


def is_computation(kind: Int8) -> Bool:
    """Which kinds are kernels that compute: everything but communication, copies, fills, host calls, annotations."""
    return ~np.isin(kind, _NOT_COMPUTATION)


_NOT_COMPUTATION = np.array(
    [OpKind.COLLECTIVE, OpKind.P2P, OpKind.MEMCPY, OpKind.MEMSET, OpKind.HOST, OpKind.ANNOTATION],
    dtype=np.int8,
)


def coverage(timeline: Timeline, largest: int = 10) -> dict[str, Any]:
    """How much device time has a kind.

    Returns:
        ``classified_fraction`` (share of summed device time whose kind is not ``OTHER``; 1 without device slices),
        ``unclassified`` (the largest names without a kind: name, count, total_ms).
    """
    device = timeline.on_device()
    duration, name = timeline.slices.duration[device], timeline.slices.name[device]
    other = timeline.slices.kind[device] == OpKind.OTHER
    total = int(duration.sum())
    times = np.bincount(name[other], weights=duration[other], minlength=1)
    counts = np.bincount(name[other], minlength=1)
    order: Int64 = np.argsort(-times, kind="stable")[:largest]
    return {
        "classified_fraction": 1.0 - int(duration[other].sum()) / total if total else 1.0,
        "unclassified": [
            {"name": timeline.strings[i], "count": int(counts[i]), "total_ms": times[i] / 1e6}
            for i in order
            if counts[i]
        ],
    }


def _first(rules: tuple[tuple[Any, re.Pattern[str]], ...], name: str, default: Any) -> Any:  # noqa: ANN401
    return next((value for value, pattern in rules if pattern.search(name)), default)
