"""Kernel names of real traces and what they compute."""

from __future__ import annotations

import pytest

from op_graphs.vocabulary import Communication, OpKind
from tracesim.kernel_kinds import (
    classify_kernels,
    classify_operators,
    is_expert_parallel,
    parse_communication,
)

KERNELS = {
    "GEMM": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "volta_sgemm_128x32_nn",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(...)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)",
        "void gemv2T_kernel_val<int, int, __half>(...)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1",
        "triton_mm",
        "triton_tem_fused_mm_3",
    ],
    "GROUPED_GEMM": [
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::m_grouped_fp8_ptp128c::GemmKernel>(...)",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>(...)",
        "fused_moe_kernel",
    ],
    "ATTENTION": [
        "void cutlass::device_kernel<flash::FlashAttnBwd<flash::CollectiveMainloopBwd<2>>>(...)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(...)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(...)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
        "attn_fwd",
    ],
    "NORM": [
        "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16>>(...)",
        "void cuComputeGradGammaBeta<float, float>(float const*)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb1ELb0ELb1ELi1EEEvPT0_",
        "triton_per_fused_add_native_layer_norm_20",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(...)",
    ],
    "SOFTMAX": ["void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>(...)"],
    "LOSS": ["void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(...)",
             "liger_cross_entropy_kernel"],
    "ELEMENTWISE": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<...::{lambda(float)#1}> >(...)",
        "void at::native::unrolled_elementwise_kernel<CUDAFunctor_add<float>, memory::LoadWithCast<2> >(...)",
        "rotary_kernel",
        "void cuda::swiglu_backward<__nv_bfloat16>(void const*)",
        "triton_poi_fused_add_9",
    ],
    "REDUCTION": ["void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float> > >(...)"],
    "EMBEDDING": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(...)",
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>(...)",
    ],
    "ROUTER": ["void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(...)", "_combined_routing_compute"],
    "PERMUTE": [
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(...)",
        "void cuda::batched_transpose<512, 128, 1, 1>(unsigned char const*)",
        "void dpsk::grouped_gemm::cuda::utils::transpose<512, 128, 4, 4>(...)",
        "_permute_kernel",
    ],
    "CAST": ["void cuda::per_token_cast_to_fp8_with_channels<__nv_bfloat16, 128, false, 128, false>(...)"],
    "CONVOLUTION": [
        "sm90_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_kernel_cudnn",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(...)",
        "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "igemm_bwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
        "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4, 64>>(...)",
    ],
    "SCAN": [
        "_chunk_scan_fwd_kernel",
        "_state_passing_bwd_kernel",
        "_chunk_scan_chunk_state_bwd_dx_kernel",
        "_bmm_chunk_fwd_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_bwd_kernel_dqkwg",
        "chunk_scaled_dot_kkt_fwd_kernel",
    ],
    "OPTIMIZER": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(...)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., FusedAdamMathFunctor<float, 4> >(...)",
    ],
    "MEMSET": ["__amd_rocclr_fillBufferAligned.kd"],
    "OTHER": ["my_own_thing"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in KERNELS.items() for name in names]
)
def test_kernel_names(name, kind):
    kinds, communication = classify_kernels([name])
    assert (OpKind(int(kinds[0])).name, int(communication[0])) == (kind, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Communication.ALL_REDUCE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Communication.ALL_REDUCE),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Communication.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(...)", Communication.REDUCE_SCATTER),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(...)", Communication.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(...)", Communication.REDUCE),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", Communication.SEND_RECEIVE),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", Communication.UNKNOWN),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*)", Communication.ALL_TO_ALL),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", Communication.ALL_TO_ALL),
        ("void dpsk::ep::internode::cached_notify<false>(int)", Communication.ALL_TO_ALL),
        ("void vllm::cross_device_reduce_1stage<__hip_bfloat16, 8>(...)", Communication.ALL_REDUCE),
        ("nvshmemi_barrier_on_stream_kernel", Communication.BARRIER),
    ],
)  # fmt: skip
def test_communication_kernels(name, expected):
    kinds, communication = classify_kernels([name])
    assert Communication(int(communication[0])) == expected
    assert OpKind(int(kinds[0])).is_communication


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", OpKind.GEMM),
        ("aten::addmm", OpKind.GEMM),
        ("aten::native_layer_norm_backward", OpKind.NORM),
        ("aten::_softmax", OpKind.SOFTMAX),
        ("aten::_log_softmax", OpKind.LOSS),
        ("aten::_scaled_dot_product_flash_attention", OpKind.ATTENTION),
        ("aten::embedding_dense_backward", OpKind.EMBEDDING),
        ("aten::cudnn_convolution", OpKind.CONVOLUTION),
        ("aten::copy_", OpKind.OTHER),
        ("aten::mmm", OpKind.OTHER),
    ],
)
def test_launching_operators(name, expected):
    assert classify_operators([name])[0] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", Communication.ALL_REDUCE),
        ("nccl:all_to_all", Communication.ALL_TO_ALL),
        ("_reduce_scatter_base", Communication.REDUCE_SCATTER),
        ("all_gather_into_tensor_coalesced", Communication.ALL_GATHER),
        ("nccl:send 0->1", Communication.SEND),
        ("nccl:recv 1<-0", Communication.RECEIVE),
        ("reduce", Communication.REDUCE),
        ("wait", Communication.UNKNOWN),
        ("", Communication.NONE),
    ],
)
def test_names_of_collectives(name, expected):
    assert parse_communication(name) == expected


def test_expert_parallel_libraries_are_told_from_nccl():
    assert is_expert_parallel("void deep_ep::internode::dispatch<false>(int4*)")
    assert not is_expert_parallel("ncclDevKernel_SendRecv(...)")
