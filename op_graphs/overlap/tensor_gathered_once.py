"""Collectives of tensor parallelism in place, with gathered inputs kept for the backward."""

from __future__ import annotations

from .tensor_in_place import TensorInPlace


class TensorGatheredOnce(TensorInPlace):
    """As in place, but the forward keeps what it gathered, as autograd keeps what a DTensor's linear reads."""

    name = "gathered-once"
    beside = "nothing; inputs are kept as they were gathered, not gathered again for the weight gradient"
    follows = "torchtitan without asynchronous tensor parallelism"
    gathers_again = False
