"""Expert dispatch: how tokens reach the ranks of their experts, and how results come back.

One file a dispatcher, one line in :data:`DISPATCHERS`; ``docs/extending.md`` walks through adding one. A rank sends
what balanced routing makes it send, and gets what ``context.load`` says; an exchange takes as long as that of its most
loaded rank.
"""

from __future__ import annotations

from .allgather import AllGather
from .alltoall import AllToAll
from .deepep import DeepEP
from .hybridep import HybridEP
from .permutation import Permutation, kept_bytes
from .routing import Dispatcher, RoutedSizes

__all__ = ["DISPATCHERS", "Dispatcher", "Permutation", "RoutedSizes", "kept_bytes"]

DISPATCHERS: dict[str, Dispatcher] = {
    "alltoall": AllToAll(),
    "allgather": AllGather(),
    "deepep": DeepEP(),
    "hybridep": HybridEP(),
}
"""Dispatchers by the name ``parallel.ep_dispatcher`` gives them."""
