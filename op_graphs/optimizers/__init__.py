"""Optimizers by name: what each keeps in memory, and the kernels and collectives of its step.

One file an optimizer, one line in :data:`OPTIMIZERS`; ``docs/optimizers.md`` walks through adding one.
"""

from __future__ import annotations

from .adafactor import Adafactor
from .adam import Adam
from .adam8bit import Adam8bit
from .muon import Muon
from .sgd import Sgd
from .shard import Optimizer, OptimizerShard

__all__ = ["OPTIMIZERS", "Optimizer", "OptimizerShard"]

OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Adam(),
    "sgd": Sgd(),
    "adafactor": Adafactor(),
    "muon": Muon(),
    "adam8bit": Adam8bit(),
}
"""Optimizers by the name ``training.optimizer`` gives them."""
