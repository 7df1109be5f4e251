"""Names of kernels in tables: what a person calls them."""

from __future__ import annotations

import pytest

from tracesim.analysis.short_names import short_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::Add<float> >(int)", "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::embedding_backward<float>(x)", "embedding_backward"),
        ("void dpsk::ep::internode::dispatch<false, 8, false, 8>(int4*", "dispatch"),
        ("void cutlass::device_kernel<flash::FlashAttnBwd<flash::Mainloop, 3> >(X)", "FlashAttnBwd"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16", "cutlass_80_tensorop_s1688gemm_256x64_16"),
        ("_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionI", "ImplicitGemmConvolution"),
        ("_Z12my_kernel_v2PfS_", "my_kernel_v2"),
        ("ncclKernel_AllReduce_RING_LL(ncclDevComm*, unsigned long)", "ncclKernel_AllReduce_RING_LL"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("volta_sgemm_32x32_sliced1x4_nt", "volta_sgemm_32x32_sliced1x4_nt"),
        ("attention_residual", "attention_residual"),
        ("", ""),
        ("void", "void"),
        ("operator<<", "operator<<"),
    ],
)  # fmt: skip
def test_functions_without_namespaces_arguments_and_parameters(name: str, expected: str) -> None:
    assert short_name(name) == expected
