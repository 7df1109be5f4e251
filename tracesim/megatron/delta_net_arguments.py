"""Gated DeltaNet of an argument list: sizes of its heads, and which layers have it in place of attention.

``--experimental-attention-variant gated_delta_net`` with ``--linear-attention-freq``: every n-th layer is attention, or
a list of 1 (delta rule) and 0 (attention). Source: Megatron-LM
``models/gpt/experimental_attention_variant_module_specs.py``.
"""

from __future__ import annotations

from typing import Any

from .arguments import Arguments

_VARIANTS = {"gated_delta_net": "gated_delta_net", "gdn": "gated_delta_net", "none": ""}
_NAME = "linear-attention-freq"


def delta_net_sizes(arguments: Arguments) -> dict[str, int | None]:
    """The field of the model; defaults are those of ``TransformerConfig``."""
    return {
        "key_heads": arguments.count("linear-num-key-heads", 16),
        "value_heads": arguments.count("linear-num-value-heads", 32),
        "key_head_size": arguments.count("linear-key-head-dim", 128),
        "value_head_size": arguments.count("linear-value-head-dim", 128),
        "conv_width": arguments.count("linear-conv-kernel-dim", 4),
    }


def delta_net_fields(arguments: Arguments, layers: int) -> dict[str, Any]:
    """Fields of a model of which some layers have the delta rule; none without the variant."""
    if not arguments.choice("experimental-attention-variant", "none", _VARIANTS):
        return {}
    text = arguments.text(_NAME).replace(" ", "").strip("()")
    if text.isdecimal() and int(text):
        pattern = ("G" * (int(text) - 1) + "*")[:layers]
    else:
        pattern = _listed(text)
        if len(pattern) != layers:
            arguments.refuse(
                _NAME, f"must be a number above 0, or a list of 0 or 1 for each of {layers} layers"
            )
            return {}
    sizes = delta_net_sizes(arguments)
    return {"mixer_pattern": pattern} | ({"delta_net": sizes} if "G" in pattern else {})


def _listed(text: str) -> str:
    """Letters of lists such as ``[1,1,0]*12``; empty where it is none."""
    letters = ""
    for term in text.split("+"):
        body, _, times = term.partition("*")
        digits = body.removeprefix("[").removesuffix("]").split(",")
        if set(digits) - {"0", "1"} or not (times or "1").isdecimal() or len(times) > 6:
            return ""
        letters += "".join("G" if digit == "1" else "*" for digit in digits) * int(times or 1)
    return letters
