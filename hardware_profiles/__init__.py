"""Machines as data: one YAML file each, figures with units in their names and a source for every one.

``load_profile`` reads an installed profile by name or a file by path; ``import_simumax`` converts a machine file of
SimuMax with its measured shapes. No formula lives here.
"""

from .loader import list_profiles, load_profile, profile_for_device, profile_from_mapping, profile_to_yaml
from .profile import (
    AttentionFigures,
    GemmFigures,
    GemmTile,
    HardwareProfile,
    HostFigures,
    LinkFigures,
    MeasuredAttention,
    MeasuredCollective,
    MeasuredGemm,
    MemoryFigures,
    NetworkFigures,
    ProfileError,
    ScanFigures,
)
from .simumax import import_simumax

__all__ = [
    "AttentionFigures",
    "GemmFigures",
    "GemmTile",
    "HardwareProfile",
    "HostFigures",
    "LinkFigures",
    "MeasuredAttention",
    "MeasuredCollective",
    "MeasuredGemm",
    "MemoryFigures",
    "NetworkFigures",
    "ProfileError",
    "ScanFigures",
    "import_simumax",
    "list_profiles",
    "load_profile",
    "profile_for_device",
    "profile_from_mapping",
    "profile_to_yaml",
]
