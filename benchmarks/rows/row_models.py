"""Model and machine of a row: explicit dimensions where the row has them, else a preset by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from op_graphs.model import ModelDescription, ModelError
from op_graphs.presets import list_models, load_model, model_from_mapping

from .row import RowSkippedError, count_at, mapping_at, text_at
from .source_settings import SourceSettings

MACHINES: tuple[tuple[str, str | dict[str, Any]], ...] = (
    (r"a100[ _-]*40gb", {"base": "a100-sxm-80g", "memory": {"capacity_gib": 40, "bandwidth_gb_per_s": 1555}}),
    # The A800 is an A100 whose NVLink carries 400 GB/s in both directions together (NVIDIA A800 datasheet).
    (r"(a800|a100/a800).*", {"base": "a100-sxm-80g", "network": {"domain": {"bandwidth_gb_per_s": 200}}}),
    (r"a100.*pcie", "a100-pcie-80g"),
    (r"(nvidia[ _])?a100([ _-](80 ?gb|sxm4?)?){0,2}(\(ampere\))?", "a100-sxm-80g"),
    # The cards of torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W (its benchmarks/*.md).
    # Their clock is fitted on a run that is no row: bf16 in torchao's float8/README.md (8B, 8 cards of 95 GiB). At that
    # power 8 bits reach the share of their peak that bf16 does, 1.97 times its rate in the mean of three products
    # (pytorch/FBGEMM, pull request 2546, "H100 500W"). Compiled casts along columns reach the 0.43 TB/s that torchao's
    # run with scales of rows asks for (6,768 tokens a second and GPU) beside the one in bf16 (6,150).
    (
        r"h100-96gb-hbm2e-500w",
        {
            "base": "h100-sxm",
            "training_clock_ratio": 0.779,
            "gemm": {"sustained_dtype_ratio": {"fp8": 1.0}},
            "memory": {"capacity_gib": 95.0, "bandwidth_gb_per_s": 2400, "column_cast_efficiency": 0.178},
        },
    ),
    (r"h100.*(hbm2e|96gb|pcie|nvl)", ""),
    (r"(dgx-)?h100([ _-](80 ?gb|sxm5?)?){0,2}( \(cw\))?", "h100-sxm"),
    (r"h200([ _-](141gb|sxm)){0,2}", "h200-sxm"),
    (r"h800([ _-](80gb|sxm)?){0,2}", "h800-sxm"),
    (r"(dgx-)?b200", "b200-sxm"),
    (r"(dgx-)?gb200", "gb200-nvl72"),
    (r"(dgx-)?b300", "b300-sxm"),
    (r"(dgx-)?gb300", "gb300-nvl72"),
    (r"mi300x?", "mi300x"),
)
"""Machine by pattern of a row's ``gpu``, first match of the whole text; empty where no profile fits."""

_RACK_NODES, _NODE_GPUS = 18, 4

PRESETS = {
    "llama27b": "llama2-7b",
    "llama213b": "llama2-13b",
    "llama270b": "llama2-70b",
    "llama38b": "llama3-8b",
    "llama370b": "llama3-70b",
    "llama3405b": "llama3-405b",
    "llama318b": "llama3-8b",
    "llama3170b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "llama3370b": "llama3-70b",
    "gpt3175b": "gpt3-175b",
    "qwen2514b": "qwen2.5-14b",
    "qwen2532b": "qwen2.5-32b",
    "qwen2572b": "qwen2.5-72b",
    "qwen2505b": "qwen2.5-0.5b",
    "qwen257b": "qwen2.5-7b",
    "qwen306b": "qwen3-0.6b",
    "qwen314b": "qwen3-14b",
    "qwen332b": "qwen3-32b",
    "qwen38b": "qwen3-8b",
    "qwen330ba3b": "qwen3-30b-a3b",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "qwen3235b": "qwen3-235b-a22b",
    "qwen330b": "qwen3-30b-a3b",
    "qwen3moe30b": "qwen3-30b-a3b",
    "qwen3moe235b": "qwen3-235b-a22b",
    "deepseekv3": "deepseek-v3",
    "deepseekv3671b": "deepseek-v3",
    # torchtitan/models/deepseek_v3: its flavors 16B and 236B are the shapes of DeepSeek-V2-Lite and DeepSeek-V2.
    "deepseekv316b": "deepseek-v2-lite",
    "deepseekv3236b": "deepseek-v2",
    "kimik2": "kimi-k2",
    "gptoss120b": "gpt-oss-120b",
    "gptoss20b": "gpt-oss-20b",
    "moonlight16b": "moonlight-16b-a3b",
    "moonlight16ba3b": "moonlight-16b-a3b",
    "nemotron3nano": "nemotron3-nano-30b-a3b",
    "nemotronnanov3": "nemotron3-nano-30b-a3b",
    "nemotron3nano30b": "nemotron3-nano-30b-a3b",
    "nemotron3nano30ba3b": "nemotron3-nano-30b-a3b",
    "nemotronsuperv3": "nemotron3-super-120b-a12b",
    "qwen3next80ba3b": "qwen3-next-80b-a3b",
    "nemotron3super": "nemotron3-super-120b-a12b",
    "llama370bsft": "llama3-70b",
    "mixtral8x22b": "mixtral-8x22b",
    "llama7b": "llama2-7b",
    "llama13b": "llama2-13b",
}
"""Preset by a row's model name, letters and digits only."""

_BY_OWN_NAME = {re.sub(r"[^a-z0-9]", "", preset): preset for preset in list_models()}

# (layers, width, heads) of scripts/train/yamls/pretrain/mpt-*.yaml of llm-foundry; they give the sizes in the rows.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_GPT: dict[str, Any] = {
    "activation": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""GPT as Megatron-LM trains it by default."""
_INTERNLM_7B: dict[str, Any] = {
    "layers": 32,
    "hidden_size": 4096,
    "ffn_size": 11008,
    "heads": 32,
    "vocab_size": 103168,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rotary",
    "qkv_bias": True,
    "attention_output_bias": True,
}
"""config.json of internlm/internlm-7b."""
_NEMOTRON: dict[str, dict[str, Any]] = {
    # nemo/collections/llm/gpt/model/nemotron.py; Nemotron-4 15B is arXiv:2402.16819, 340B arXiv:2406.11704.
    "8b": {"layers": 32, "hidden_size": 4096, "ffn_size": 16384, "heads": 32},
    "15b": {"layers": 32, "hidden_size": 6144, "ffn_size": 24576, "heads": 48, "kv_heads": 8},
    "22b": {"layers": 40, "hidden_size": 6144, "ffn_size": 24576, "heads": 48},
    "340b": {"layers": 96, "hidden_size": 18432, "ffn_size": 73728, "heads": 96, "kv_heads": 8},
}
_LIGHTNING: dict[str, Any] = {
    # src/megatron/bridge/recipes/nemotronh/nemotron_3_5_lightning.py: the layers of Nemotron 3 Nano and a prediction
    # head that is applied twice; its TFLOP/s a token are those of that.
    "base": "nemotron3-nano-30b-a3b",
    "name": "nemotron3.5-lightning",
    "mtp_layers": 2,
    "mtp_pattern": "*E",
    "mtp_repeated": True,
}
_GPT_SIZES: dict[str, dict[str, int]] = {
    # NeMo-Framework-Launcher conf/training/gpt3/5b.yaml, 20b.yaml, 40b.yaml; arXiv:2104.04473, section 5.2 (174.6B) and
    # Table 1 (529.6B).
    "gpt35b": {"layers": 24, "hidden_size": 4096, "heads": 32},
    "gpt320b": {"layers": 44, "hidden_size": 6144, "heads": 48},
    "gpt340b": {"layers": 48, "hidden_size": 8192, "heads": 64},
    "gpt1746b": {"layers": 96, "hidden_size": 12288, "heads": 96},
    "gpt5296b": {"layers": 105, "hidden_size": 20480, "heads": 128},
}


def machine_of(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    """Hardware of a scenario for the ``gpu`` of a row; raise RowSkippedError where no profile fits."""
    gpu = settings.gpu_of(text_at(row, "table"), text_at(row, "gpu"))
    for pattern, machine in MACHINES:
        if re.fullmatch(pattern, gpu.lower().replace(" (", "(")):
            if not machine:
                break
            fabric = settings.fabric_on(gpu)
            if fabric is None:
                return machine
            changed: dict[str, Any] = {"base": machine} if isinstance(machine, str) else dict(machine)
            network = {**changed.get("network", {}), "fabric": {"bandwidth_gb_per_s": fabric}}
            return {**changed, "network": network}
    raise RowSkippedError(f"no hardware profile fits the GPU {gpu!r}")


def placed(machine: str | dict[str, Any], gpus: int) -> str | dict[str, Any]:
    """A machine as a job of so many GPUs finds it.

    On racks of 18 nodes with four GPUs that share one NVLink domain, Slurm gives a job segments of equally many nodes
    in each, as many as divide its nodes (``--segment`` in ``scripts/performance/utils/executors.py`` of
    Megatron-Bridge).
    """
    if machine not in ("gb200-nvl72", "gb300-nvl72") or gpus <= _RACK_NODES * _NODE_GPUS or gpus % _NODE_GPUS:
        return machine
    nodes = gpus // _NODE_GPUS
    segment = next(count for count in range(_RACK_NODES, 0, -1) if nodes % count == 0)
    return {"base": machine, "name": machine, "network": {"gpus_per_domain": segment * _NODE_GPUS}}


def model_of(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    """Model of a scenario; raise RowSkippedError where neither the row nor a preset gives its dimensions."""
    model = mapping_at(row, "model")
    name = text_at(model, "name")
    known = re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*\)", "", name).lower())
    stated = _stated_dimensions(model, text_at(row, "notes"))
    preset = PRESETS.get(known) or _BY_OWN_NAME.get(known)
    if preset is not None:
        return {"base": preset, "name": preset, **stated} if stated else preset
    if known == "nemotron35lightning":
        return _LIGHTNING
    if (size := re.fullmatch(r"nemotron4?(\d+b)", known)) and size.group(1) in _NEMOTRON:
        return _nemotron(size.group(1))
    if known == "internlm7b":
        return {"name": "internlm-7b", **_INTERNLM_7B}
    if known.startswith("mpt") and known[3:] in _MPT:
        return _mpt(known[3:])
    if known not in _GPT_SIZES and not re.match(r"(gpt|mt-?nlg|megatron)\b", name.lower()):
        raise RowSkippedError(f"no preset and no rule for the architecture of {name or 'an unnamed model'!r}")
    stated = {**_GPT_SIZES.get(known, {}), **stated}
    if settings.shape_from_size:
        completed = _completed(stated, name, stated.get("vocab_size") or settings.vocab_size or 0)
        # Layers in the row itself are its own, whatever the name of the model that it is cut from says.
        stated = completed | ({"layers": stated["layers"]} if model.get("layers") is not None else {})
    missing = [key for key in ("layers", "hidden_size", "heads") if key not in stated]
    if missing:
        raise RowSkippedError(f"the row does not say {', '.join(missing)} of {name}")
    vocab = stated.get("vocab_size") or settings.vocab_size
    if vocab is None:
        raise RowSkippedError(f"the row does not say the vocabulary of {name}")
    ffn = stated.get("ffn_size", 4 * stated["hidden_size"])
    described = {"name": name, **_GPT, **stated, "ffn_size": ffn, "vocab_size": vocab}
    if settings.vocab_unpadded:
        tp = count_at(mapping_at(row, "parallel"), "tp", default=1)
        described |= {"vocab_size": vocab // tp * tp, "vocab_padding_multiple": 1}
    return described


def read_model_of(reference: str | Mapping[str, Any]) -> ModelDescription:
    """The model that a scenario's ``model`` names; raise RowSkippedError where it is none."""
    try:
        return load_model(reference) if isinstance(reference, str) else model_from_mapping(reference, "model")
    except ModelError as error:
        raise RowSkippedError(" ".join(str(error).split())) from None


def _completed(stated: dict[str, int], name: str, vocab: int) -> dict[str, int]:
    """Dimensions with layers from the size in the name (``GPT 181B``) and heads of about 128 elements.

    A table whose heading gives one shape holds rows of other depths, which their sizes tell: a layer has 12 times the
    square of the width. Heads, where not said, are the multiple of 8 dividing the width that is nearest to 128 elements
    a head.
    """
    hidden, size = stated.get("hidden_size"), re.search(r"(\d+(?:\.\d+)?)B", name)
    if hidden is None or size is None:
        return stated
    layers = round((float(size.group(1)) * 1e9 - vocab * hidden) / (12 * hidden**2))
    heads = min(
        (count for count in range(8, hidden // 32, 8) if hidden % count == 0),
        key=lambda count: abs(count - hidden / 128),
    )
    found = {"heads": heads, **stated, "layers": layers}
    return (
        stated | found
        if abs(layers - stated.get("layers", layers)) > 1 or "layers" not in stated
        else {
            "heads": heads,
            **stated,
        }
    )


def _nemotron(size: str) -> dict[str, Any]:
    shape = _NEMOTRON[size]
    return {
        "name": f"nemotron-{size}",
        "vocab_size": 256_000,
        "activation": "squared_relu",
        "norm": "layernorm",
        "positions": "rotary",
        "tied_embeddings": False,
        **shape,
    }


def _mpt(size: str) -> dict[str, Any]:
    layers, width, heads = _MPT[size]
    shape = {
        "layers": layers,
        "hidden_size": width,
        "ffn_size": 4 * width,
        "heads": heads,
        "vocab_size": 50368,
    }
    no_bias = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {"name": f"mpt-{size}", **_GPT, **no_bias, **no_dropout, **shape}


def _stated_dimensions(model: Mapping[str, Any], notes: str) -> dict[str, int]:
    """Dimensions in the row itself, then those in a shape text of its notes (``NHIDDEN=14336 / NLAYERS=72``)."""
    keys = {
        "layers": ("layers", r"NLAYERS=(\d+)"),
        "hidden_size": ("hidden", r"N?HIDDEN=(\d+)"),
        "heads": ("heads", r"NHEADS=(\d+)"),
        "ffn_size": ("ffn", None),
        "vocab_size": ("vocab", r"VOCAB_LENGTH=(\d+k?)\b"),
        "kv_heads": ("kv_heads", None),
    }
    stated: dict[str, int] = {}
    for ours, (theirs, pattern) in keys.items():
        if model.get(theirs) is not None:
            stated[ours] = count_at(model, theirs)
        elif pattern and (found := re.search(pattern, notes)):
            text = found.group(1)
            stated[ours] = int(text[:-1]) * 1000 if text.endswith("k") else int(text)
    return stated
