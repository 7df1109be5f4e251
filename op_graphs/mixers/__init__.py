"""What mixes tokens in a layer: one file a kind, which says its tensors, FLOPs and programs."""

from .mixer import BlockGradient, Mixer
from .registry import MIXERS

__all__ = ["MIXERS", "BlockGradient", "Mixer"]
