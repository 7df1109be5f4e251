"""What performance recipes of frameworks set beside what a table of results prints.

Megatron-Bridge's tables give model, degrees and precision; what is recomputed, which dispatcher moves tokens and what
overlaps is in its recipes, by model, GPU and precision (``scripts/performance/configs/*/*_workload_base_configs.py``).
Recipes changed from release to release; where they did, the micro-batch size of the row tells which one ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets."""

    recompute: tuple[str, ...] = ()
    """Modules; ``block:N`` recomputes N layers of a chunk whole."""
    dispatcher: str = "alltoall"
    overlaps_experts: bool = False
    """Whether expert exchanges run beside the other pass of another microbatch."""

    @property
    def recompute_setting(self) -> str | dict[str, Any]:
        """As ``training.recompute`` says it."""
        if not self.recompute:
            return "none"
        if self.recompute[0].startswith("block:"):
            return {"method": "block", "layers": int(self.recompute[0].partition(":")[2])}
        return {"modules": list(self.recompute)}


def bridge_recipe(model: str, gpu: str, precision: str, mbs: int, parallel: Mapping[str, Any]) -> Recipe:
    """The recipe of Megatron-Bridge for a model preset on a GPU (``h100``, ``b200``, ``gb300``, ...)."""
    eight_bit = precision != "bf16"
    if model.startswith("deepseek-v3"):
        return _deepseek(gpu, precision, mbs, parallel)
    if model == "kimi-k2":
        return Recipe((), "deepep", True) if mbs == 1 else Recipe(("mla_up_proj",), "deepep")
    if model == "qwen3-235b-a22b":
        if gpu.startswith("gb"):
            return Recipe(dispatcher="deepep")
        return Recipe(overlaps_experts=gpu == "h100")
    if model == "qwen3-30b-a3b":
        return Recipe(dispatcher="deepep")
    if model == "gpt-oss-120b":
        if gpu.startswith("gb3") or gpu == "b300":
            return Recipe(dispatcher="deepep", overlaps_experts=eight_bit)
        return Recipe(("layernorm", "moe_act"), overlaps_experts=gpu == "gb200")
    if model.startswith("nemotron3"):
        return _nemotron(model, gpu)
    if model == "llama3-8b" and gpu == "h100" and eight_bit:
        return Recipe(("block:5",))
    return Recipe()


def _nemotron(model: str, gpu: str) -> Recipe:
    """``perf_recipes/nemotronh`` and before them ``configs/nemotronh``; HybridEP counts as node-limited dispatch.

    That 14 of Super's layers stay in bf16 beside NVFP4 is not expressed.
    """
    if gpu == "h100":
        return Recipe(("moe", "layernorm", "core_attn"), "deepep")
    if gpu == "b300" and model.startswith("nemotron3-super"):
        return Recipe(("moe_act", "layernorm"), "deepep")
    return Recipe(dispatcher="deepep")


def _deepseek(gpu: str, precision: str, mbs: int, parallel: Mapping[str, Any]) -> Recipe:
    pp = parallel.get("pp")
    if gpu == "h100":
        return Recipe(("mla_up_proj", "mlp"), "deepep")
    if gpu == "b200":
        return (
            Recipe(("mla_up_proj", "mlp"), "deepep", True) if pp == 8 else Recipe(("mla_up_proj",), "deepep")
        )
    if gpu == "gb300":
        if precision == "bf16":
            return Recipe(("moe_act",), "deepep")
        return Recipe((), "deepep", True) if mbs == 1 else Recipe(("mla_up_proj",), "deepep")
    return Recipe(("mla_up_proj",), "deepep", gpu == "b300" or (gpu == "gb200" and precision != "bf16"))
