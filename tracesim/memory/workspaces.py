"""Memory that libraries take from the framework's allocator for themselves, by machine.

It counts inside ``torch.cuda.max_memory_allocated``. cuBLAS keeps a workspace for each pair of thread and stream, of
which training has two (the forward and the autograd thread): what ``CUBLAS_WORKSPACE_CONFIG`` says, else 32 MiB on
Hopper and later and 8.125 MiB before (PyTorch ``ATen/cuda/CublasHandlePool.cpp``). Transformer Engine keeps one more:
32 MiB on Hopper and later, 4 MiB before (``pytorch/module/base.py``, ``get_cublas_workspace_size_bytes``), and four
more of the same for the streams of its grouped GEMM. Without Transformer Engine the golden values of Megatron-LM's
tests hold two workspaces of cuBLAS more with one tensor-parallel rank and one more with several; what they belong to is
not known. The CUDA context and NCCL's buffers are not allocated by the
framework and do not count. Each is an allocation of its own.
"""

from __future__ import annotations

from hardware_profiles.profile import HardwareProfile
from op_graphs.plan import LibraryPlan

_MIB = 2**20
_HOPPER = 90
_CUBLAS_THREADS = 2
_GROUPED_STREAMS = 4


def library_workspaces(
    profile: HardwareProfile, libraries: LibraryPlan | None = None, *, grouped: bool = False, tp: int = 1
) -> tuple[int, ...]:
    """Bytes of each cuBLAS and Transformer Engine workspace on a machine; none where neither library exists.

    ``grouped`` counts those of grouped GEMMs too.
    """
    if profile.compute_capability <= 0:
        return ()
    libraries = libraries or LibraryPlan()
    is_hopper = profile.compute_capability >= _HOPPER
    cublas = 32 * _MIB if is_hopper else 8 * _MIB + _MIB // 8
    if libraries.cublas_workspace_kib is not None:
        cublas = libraries.cublas_workspace_kib * 1024
    if libraries.transformer_engine:
        streams = 1 + (_GROUPED_STREAMS if grouped else 0)
        return (*(cublas,) * _CUBLAS_THREADS, *((32 if is_hopper else 4) * _MIB,) * streams)
    return (cublas,) * (_CUBLAS_THREADS + (2 if tp == 1 else 1))
