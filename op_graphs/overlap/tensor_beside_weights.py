"""Collectives of the backward beside the GEMM that does not need them; those of the forward in place."""

from __future__ import annotations

from .tensor_in_place import TensorInPlace


class TensorBesideWeights(TensorInPlace):
    """An input's second gather beside the input gradient, and that gradient's reduction beside the weight's."""

    name = "beside-weights"
    beside = (
        "the input gathered again beside the input-gradient GEMM, the reduction of that gradient beside the "
        "weight-gradient GEMM"
    )
    follows = "Megatron-LM tensor_parallel/layers.py, Transformer Engine's bulk overlap"
    beside_weights = True
