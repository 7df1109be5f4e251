"""A small scenario to change one field of, and the problems a changed one has."""

from __future__ import annotations

import copy

import pytest

from tracesim.errors import ScenarioError
from tracesim.scenario import load_scenario

SMALL = {
    "model": "llama3-8b",
    "hardware": "h100-sxm",
    "parallel": {"tp": 2, "sp": True, "pp": 4, "dp": 8},
    "training": {"global_batch_size": 64},
}


def scenario(**sections):
    """SMALL with some keys replaced; a key of a section is written section__key."""
    mapping = copy.deepcopy(SMALL)
    for path, value in sections.items():
        *outer, key = path.split("__")
        inner = mapping
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[key] = value
    return mapping


def problems_of(source, overrides=()):
    with pytest.raises(ScenarioError) as caught:
        load_scenario(source, overrides)
    return str(caught.value)
