"""A scenario file from a measured trace: what its operators, process groups and device tell, and what they do not.

Dimensions come from the shapes of products and attention among the host's operators (``record_shapes=True`` of the
profiler), degrees from process groups whose names tell their dimension, sharding from the transfers that are made,
microbatches and recompute from what repeats. A trace that tracesim simulated holds its scenario. Everything else is
left at its default and said to be unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hardware_profiles import list_profiles
from op_graphs.timeline import Timeline
from tracesim.errors import TraceError
from tracesim.suggest_plan import suggest_parallel
from tracesim.suggest_shapes import Pair, Shapes, collect_shapes

_TYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32"}
_SAME = 0.9
"""Share of the forward's products that must run again to be called all of them."""


@dataclass(frozen=True)
class Suggestion:
    """A scenario file, and in words what the trace does not tell."""

    text: str
    unknown: tuple[str, ...]


def suggest_scenario(timeline: Timeline) -> Suggestion:
    """Propose a scenario that would simulate what a trace shows.

    Args:
        timeline: read with ``keep_origins``; of several ranks the first is looked at.

    Raises:
        TraceError: if no operator of the trace has shapes from which a transformer's dimensions follow.
    """
    simulated = timeline.properties.get("scenario")
    if simulated:
        return Suggestion(
            f"# The scenario that {timeline.name or 'the trace'} was simulated from.\n{simulated}", ()
        )
    layer = _Layer(collect_shapes(timeline))
    layers, unknown = layer.layers()
    degrees, of_plan = suggest_parallel(timeline, layers)
    pp = int(degrees.get("pp", 1))
    if pp > 1:
        unknown.append(f"model.layers: this rank runs {layers}; as many are assumed on each of {pp} stages")
    model, of_model = layer.model(int(degrees.get("tp", 1)), layers * pp)
    training, of_training = layer.training(layers)
    unknown += [*of_plan, *of_model, *of_training]
    hardware = _hardware(timeline.device)
    if not hardware:
        unknown.append(f"hardware: no profile is known for {timeline.device or 'a device without a name'}")
    lines = [f"# Suggested from {timeline.name or 'a trace'}. What the trace does not tell:"]
    lines += [f"# - {text}" for text in unknown]
    lines += [
        f"model: {_yaml(model)}",
        f"hardware: {hardware or 'h100-sxm'}",
        f"parallel: {_yaml(degrees)}",
        f"training: {_yaml(training)}",
    ]
    return Suggestion("\n".join(lines) + "\n", tuple(unknown))


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Layer:
    """What repeats in the shapes of a rank."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.hidden = _hidden_size(shapes)
        looked_up = [n for (_, width), n in shapes.embedding.items() if width == self.hidden]
        passes = max(looked_up, default=0) or shapes.microbatches * shapes.steps
        self.passes = max(passes, shapes.steps)
        """Forward passes that the trace shows, over all steps."""
        self.heads, self.kv_heads, self.head_size = self._heads()
        self.experts, self.top_k = self._router()
        back = {
            inner: count
            for (inner, outer), count in shapes.linear.items()
            if outer == self.hidden and inner not in (self.hidden, self.heads * self.head_size)
        }
        self.ffn = max(back, key=lambda size: (back[size] * size, size), default=0)
        if not self.ffn:
            raise TraceError(
                "no scenario can be suggested: no linear layer leads from a wider size back to the hidden size "
                f"{self.hidden}. A model of experts in grouped kernels does not show its sizes; write the scenario "
                "by hand."
            )
        self.back = back[self.ffn]

    def _heads(self) -> tuple[int, int, int]:
        """Heads, key-value heads and head size; zeros where attention shows no shapes."""
        shapes = self.shapes
        if shapes.attention:
            return shapes.attention.most_common(1)[0][0]
        if not shapes.scores:
            return 0, 0, 0
        both, sequence, size = shapes.scores.most_common(1)[0][0]
        pairs = (shapes.indices or shapes.tokens).most_common(1)
        batch = next((x * y // sequence for (x, y), _ in pairs if sequence in (x, y)), 1)
        heads = max(both // max(batch, 1), 1)
        # Keys and values come from products of their own, or with the queries from one.
        outputs = {outer for (inner, outer) in shapes.linear if inner == self.hidden and outer % size == 0}
        of_kv = [n // size for n in outputs if n < heads * size]
        fused = [(n // size - heads) // 2 for n in outputs if heads * size < n < 3 * heads * size]
        kv_heads = max((n for n in (*of_kv, *fused) if n and heads % n == 0), default=heads)
        return heads, kv_heads, size

    def _router(self) -> tuple[int, int]:
        """Experts that a product leads to and a top-k chooses from, and how many it chooses; zeros without."""
        choices = {
            key: n for key, n in self.shapes.choices.items() if self.shapes.linear[self.hidden, key[0]]
        }
        return max(choices, key=lambda key: (choices[key], key), default=(0, 0))

    def layers(self) -> tuple[int, list[str]]:
        """Layers that the rank runs, by what each has once."""
        if self.shapes.attention or self.shapes.scores:
            count = (self.shapes.attention or self.shapes.scores).most_common(1)[0][1]
        elif self.experts:
            count = self.shapes.linear[self.hidden, self.experts]
        else:
            count = self.back
        unknown = []
        if (
            not self.shapes.attention
            and not self.shapes.scores
            and not any(width == self.hidden for _, width in self.shapes.embedding)
        ):
            unknown.append(
                "model: neither attention nor an embedding is shown; this may be no transformer at all"
            )
        if count % self.passes:
            unknown.append(f"model.layers: {count} calls in {self.passes} forward passes; rounded")
        return max(round(count / self.passes), 1), unknown

    def model(self, tp: int, layers: int) -> tuple[dict[str, Any], list[str]]:
        """Fields of ``model``."""
        shapes, hidden, ffn = self.shapes, self.hidden, self.ffn
        unknown = []
        heads, kv_heads, head_size = self.heads * tp, self.kv_heads * tp, self.head_size
        if not heads:
            unknown.append("heads: no attention operator has shapes; a head size of 128 is assumed")
            heads = kv_heads = max(hidden // 128, 1)
            head_size = min(128, hidden)
        elif not shapes.attention:
            unknown.append(
                "kv_heads: attention is unfused; taken from the products that lead to keys and values"
            )
        gated = shapes.linear[hidden, ffn] >= 2 * self.back or (hidden, 2 * ffn) in shapes.linear
        model: dict[str, Any] = {
            "hidden_size": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "ffn_size": ffn * tp,
            "layers": layers, "activation": "swiglu" if gated else "gelu",
        }  # fmt: skip
        rows = max((rows for rows, width in shapes.embedding if width == hidden), default=0)
        if not rows:
            unknown.append("vocab_size: no embedding of the hidden size is shown; 32000 is assumed")
        model["vocab_size"] = rows * tp or 32_000
        if self.heads and shapes.bias[hidden, self.heads * self.head_size]:
            model["qkv_bias"] = True
        if self.experts:
            model["moe"] = {"experts": self.experts, "top_k": self.top_k or 1, "expert_ffn_size": ffn * tp}
            unknown.append("moe: shared experts and dense layers among those of experts; none are assumed")
            if not self.top_k:
                unknown.append("moe.top_k: the trace does not record how many are chosen; 1 is assumed")
        unknown += [
            f"activation: {'gated; whether by SiLU or GELU' if gated else 'not gated; which function'}",
            "norm, positions, tied_embeddings: operators do not tell; the defaults are used",
        ]
        return model, unknown

    def training(self, layers: int) -> tuple[dict[str, Any], list[str]]:
        """Fields of ``training``."""
        shapes = self.shapes
        training: dict[str, Any] = {}
        unknown = []
        of_inputs = (shapes.indices or shapes.tokens).most_common(1)
        if of_inputs:
            batch, sequence = of_inputs[0][0]
            training |= {"micro_batch_size": batch, "seq_len": sequence}
            unknown.append(f"order of micro_batch_size and seq_len: inputs are [{batch}, {sequence}, ...]")
        else:
            unknown.append(
                "micro_batch_size and seq_len: linear inputs have no three dimensions; the defaults are used"
            )
        training["num_microbatches"] = max(round(self.passes / shapes.steps), 1)
        known = [name for name, _ in shapes.types.most_common() if name in _TYPES]
        if known:
            training["dtype"] = _TYPES[known[0]]
        recompute, of_recompute = self._recompute(layers)
        if recompute:
            training["recompute"] = recompute
        return training, unknown + of_recompute

    def _recompute(self, layers: int) -> tuple[Any, list[str]]:
        """What of a layer runs again inside the backward pass."""
        shapes = self.shapes
        vocabulary = {rows for rows, width in shapes.embedding if width == self.hidden}
        forward: Counter[Pair] = Counter(
            {
                key: n
                for key, n in shapes.linear.items()
                if not (key[0] == self.hidden and key[1] in vocabulary)
            }
        )
        again = Counter({key: min(n, forward[key]) for key, n in shapes.again.items() if forward[key]})
        if not again:
            return ({"modules": ["core_attn"]} if shapes.attention_again else None), []
        shares = {key: again[key] / n for key, n in forward.items()}
        if min(shares.values()) >= _SAME:
            return "full", []
        of_mlp = {key for key in forward if self.ffn in key or 2 * self.ffn in key}
        if set(again) <= of_mlp and not shapes.attention_again:
            return {"modules": ["mlp"]}, []
        kept = {round(share * layers) for share in shares.values()}
        if len(kept) == 1 and 0 < (number := kept.pop()) < layers:
            return {"layers": number, "method": "block"}, []
        total, forward_total = sum(shapes.again.values()), sum(shapes.linear.values())
        return None, [f"recompute: {total} of {forward_total} linear layers run again in the backward pass"]


def _hidden_size(shapes: Shapes) -> int:
    """The features that most products begin or end with, among those that some product leads back to."""
    weight: Counter[int] = Counter()
    for (inner, outer), count in shapes.linear.items():
        if any(a == outer and b == inner for a, b in shapes.linear):
            weight[inner] += count
            weight[outer] += count
    if not weight:
        raise TraceError(
            "no scenario can be suggested: the operators of the trace show no linear layers that lead to a wider size "
            "and back. Profile with record_shapes=True, with PyTorch's linear layers not hidden in a compiled graph."
        )
    return min(weight, key=lambda size: (-weight[size], size))


def _hardware(device: str) -> str:
    """The installed profile whose name begins with a word of the device's name, the SXM form first."""
    words = set(_words(device))
    fitting = [name for name in list_profiles() if name.partition("-")[0] in words]
    return min(fitting, key=lambda name: ("sxm" not in name, len(name), name), default="")


def _words(text: str) -> Iterator[str]:
    for match in re.finditer(r"[A-Za-z]+\d+[A-Za-z]?", text):
        yield match.group().lower()
