"""Mixers by name."""

from __future__ import annotations

from ..model import MixerName
from .attention import Attention
from .delta_net import DeltaNetMixer
from .mixer import Mixer
from .state_space import StateSpaceMixer

MIXERS: dict[MixerName, Mixer] = {
    "attention": Attention(),
    "state_space": StateSpaceMixer(),
    "delta_net": DeltaNetMixer(),
}
"""Letters of patterns for each are in ``op_graphs.model.MIXER_LETTERS``."""
