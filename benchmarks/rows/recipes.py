"""What performance recipes of frameworks set beside what a table of results prints.

Megatron-Bridge's tables give model, degrees and precision; what is recomputed, which dispatcher moves tokens, what
overlaps and what is launched as CUDA graphs is in its recipes, by model, GPU and precision
(``scripts/performance/configs/*/*_workload_base_configs.py`` and ``src/megatron/bridge/perf_recipes``). Recipes changed
from release to release; a table names its release. Pairs of a forward and a backward overlap the exchanges of experts
only with one stage or several chunks a stage (Megatron-Core ``validate_args``), whatever a later recipe says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from op_graphs.cuda_graphs import FULL_ITERATION

_LAYER_GRAPHS = ("attn", "moe_router", "moe_preprocess")
_MIXER_GRAPHS = ("attn", "mamba", "moe_router", "moe_preprocess")
_ROUTER_GRAPHS = ("moe_router", "moe_preprocess")
_WHOLE = (FULL_ITERATION,)
FLEXIBLE_SUPER = (26, 6)
"""Release from which recipes of Nemotron 3 Super set ``moe_token_dispatcher_type`` to ``flex``, and take the precision
``nemotron_3_super_bf16_with_nvfp4_mixed``."""
CAPTURED_MOE = (26, 6)
"""Release from which MXFP8 recipes of mixtures capture whole iterations, with what that needs: fused grouped products
that read the numbers of tokens on the device."""


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets."""

    recompute: tuple[str, ...] = ()
    """Modules; ``block:N`` recomputes N layers of a chunk whole."""
    dispatcher: str = "alltoall"
    overlaps_experts: bool = False
    """Whether expert exchanges run beside the other pass of another microbatch."""
    cuda_graphs: tuple[str, ...] = ()
    """As ``training.cuda_graphs``."""
    router_fusion: bool = True
    """``moe_router_fusion`` of a mixture; recipes of Nemotron 3 Nano set False, those of Super leave it at False."""
    weighted_squared_relu_fusion: bool = False
    """``use_fused_weighted_squared_relu``."""
    bf16_last_layers: int = 0
    """``num_layers_at_end_in_bf16``, where ``first_last_layers_bf16`` is set."""
    fp8_head: bool = False
    """``fp8_output_proj``."""
    fuses_experts: bool = False
    """Whether activation and quantisation are part of the experts' products (``use_transformer_engine_op_fuser``)."""

    @property
    def recompute_setting(self) -> str | dict[str, Any]:
        """As ``training.recompute`` says it."""
        if not self.recompute:
            return "none"
        if self.recompute[0].startswith("block:"):
            return {"method": "block", "layers": int(self.recompute[0].partition(":")[2])}
        return {"modules": list(self.recompute)}


def release_of(table: str) -> tuple[int, int]:
    """Year and month of the container that a table names (``26.02.01 NeMo Container``); (0, 0) where it names none."""
    found = re.match(r"(\d\d)\.(\d\d)\b", table)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def bridge_recipe(
    model: str, gpu: str, precision: str, mbs: int, parallel: Mapping[str, Any], release: tuple[int, int]
) -> Recipe:
    """The recipe of a release of Megatron-Bridge for a model preset on a GPU (``h100``, ``b200``, ``gb300``, ...)."""
    if model.startswith("deepseek-v3"):
        recipe = _deepseek(gpu, precision, parallel, release)
    elif model == "kimi-k2":
        recipe = _kimi(mbs)
    elif model == "qwen3-235b-a22b":
        recipe = _qwen_235b(gpu, precision, release)
    elif model == "qwen3-30b-a3b":
        recipe = _qwen_30b(gpu, precision, release)
    elif model == "gpt-oss-120b":
        recipe = _gpt_oss(gpu, precision, release)
    elif model.startswith("nemotron3"):
        recipe = replace(
            _nemotron(model, gpu, precision, release), router_fusion=False, weighted_squared_relu_fusion=True
        )
    else:
        recipe = _llama(model, gpu, precision, sharded=parallel.get("zero") == 3)
    overlaps = recipe.overlaps_experts and (parallel.get("pp", 1) == 1 or parallel.get("vpp", 1) > 1)
    fuses = recipe.cuda_graphs == _WHOLE and model.startswith(("deepseek", "kimi", "qwen3-"))
    head = precision == "mxfp8" and _quantizes_head(model, gpu, release)
    return replace(recipe, overlaps_experts=overlaps, fuses_experts=fuses, fp8_head=head)


def _quantizes_head(model: str, gpu: str, release: tuple[int, int]) -> bool:
    """Builders of DeepSeek-V3 for GB200 and GB300 set ``fp8_output_proj`` beside MXFP8, that of GPT-OSS for GB300."""
    if model.startswith("deepseek-v3"):
        return gpu in ("gb200", "gb300")
    return model == "gpt-oss-120b" and gpu == "gb300" and release >= CAPTURED_MOE


def _captures_mixture(gpu: str, precision: str, release: tuple[int, int]) -> bool:
    return precision == "mxfp8" and release >= CAPTURED_MOE and gpu in ("gb300", "gb200", "b300")


def _deepseek(gpu: str, precision: str, parallel: Mapping[str, Any], release: tuple[int, int]) -> Recipe:
    several_chunks = parallel.get("vpp", 1) > 1
    if gpu == "h100":
        return Recipe(("mla_up_proj", "mlp"), "deepep", True)
    if gpu == "b200":
        if parallel.get("pp") == 8:
            return Recipe(("mla_up_proj", "mlp"), "deepep", True, _LAYER_GRAPHS)
        return Recipe(("mla_up_proj",))
    if several_chunks and _captures_mixture(gpu, precision, release):
        again = () if gpu == "gb300" else ("mla_up_proj",)
        return Recipe(again, "hybridep", True, _WHOLE)
    if gpu == "gb300" and precision == "bf16":
        return Recipe(("moe_act",), "hybridep", False, _LAYER_GRAPHS)
    if gpu == "gb300":
        return Recipe(("mla_up_proj",), "hybridep")
    graphs = _LAYER_GRAPHS if release >= (26, 2) else ()
    return Recipe(("mla_up_proj",), "hybridep", False, graphs)


def _nemotron(model: str, gpu: str, precision: str, release: tuple[int, int]) -> Recipe:
    """``scripts/performance/configs/nemotronh/nemotron_3_workload_base_configs.py``, which all rows agree with.

    Super's recipe asks for the all-to-all dispatcher, and before 26.06
    (``nemotron_3_llm_pretrain.py``) only the back end of the other one was set, which changes nothing. Since then 14 of
    its layers stay in bf16 beside NVFP4, and some linears of the others, which is not expressed.
    """
    if model.startswith("nemotron3-super"):
        later = release >= FLEXIBLE_SUPER
        return replace(
            _nemotron_super(gpu, precision),
            dispatcher="hybridep" if later else "alltoall",
            bf16_last_layers=14 if later and precision == "nvfp4" else 0,
        )
    if gpu == "h100" and precision == "bf16":
        return Recipe(("moe", "layernorm"), "hybridep", False, ("attn", "mamba"))
    # Recipes name moe_act beside moe, which running experts again as a whole includes.
    if gpu == "h100":
        return Recipe(("moe", "layernorm", "core_attn"), "hybridep", False, ("mamba",))
    return Recipe((), "hybridep", False, _MIXER_GRAPHS)


def _nemotron_super(gpu: str, precision: str) -> Recipe:
    if gpu == "b200" and precision == "bf16":
        return Recipe(("moe", "layernorm", "core_attn"), "hybridep")
    if gpu == "b200":
        return Recipe(("moe_act", "layernorm"), "hybridep")
    if gpu == "b300" and precision != "mxfp8":
        return Recipe(("moe_act", "layernorm"), "hybridep", False, _MIXER_GRAPHS)
    return Recipe((), "hybridep", False, _MIXER_GRAPHS)


def _kimi(mbs: int) -> Recipe:
    return Recipe((), "hybridep", True, _WHOLE) if mbs == 1 else Recipe(("mla_up_proj",), "hybridep")


def _qwen_235b(gpu: str, precision: str, release: tuple[int, int]) -> Recipe:
    if _captures_mixture(gpu, precision, release):
        return Recipe(dispatcher="hybridep", overlaps_experts=True, cuda_graphs=_WHOLE)
    if gpu.startswith("gb"):
        return Recipe(dispatcher="hybridep", cuda_graphs=_LAYER_GRAPHS)
    return Recipe(overlaps_experts=gpu == "h100")


def _qwen_30b(gpu: str, precision: str, release: tuple[int, int]) -> Recipe:
    if _captures_mixture(gpu, precision, release):
        return Recipe(dispatcher="hybridep", overlaps_experts=True, cuda_graphs=_WHOLE)
    if gpu == "h100":
        return Recipe(dispatcher="hybridep", cuda_graphs=_ROUTER_GRAPHS if precision == "bf16" else ())
    return Recipe(dispatcher="hybridep", cuda_graphs=_LAYER_GRAPHS if gpu == "b200" else _ROUTER_GRAPHS)


def _gpt_oss(gpu: str, precision: str, release: tuple[int, int]) -> Recipe:
    if gpu.startswith("gb3") or gpu == "b300":
        # No recipe in bf16 for GB300 chooses a dispatcher, and the model's own is the all-to-all.
        dispatcher = "alltoall" if gpu == "gb300" and precision == "bf16" else "hybridep"
        if gpu == "gb300" and _captures_mixture(gpu, precision, release):
            return Recipe((), dispatcher, True, _WHOLE)
        return Recipe((), dispatcher, precision != "bf16", _LAYER_GRAPHS)
    return Recipe(("layernorm", "moe_act"), overlaps_experts=gpu == "gb200")


def _llama(model: str, gpu: str, precision: str, *, sharded: bool) -> Recipe:
    if model == "llama3-8b" and gpu == "h100":
        # With sharded weights the activations of all layers have room.
        return Recipe(("block:5",)) if precision != "bf16" and not sharded else Recipe()
    return Recipe(cuda_graphs=_WHOLE) if model == "llama3-8b" else Recipe()
