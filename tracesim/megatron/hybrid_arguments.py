"""Hybrid models of an argument list: which part each layer is, and the sizes of state-space layers.

``--hybrid-layer-pattern`` says all in one text: a letter a layer, ``|`` between pipeline stages, and behind each ``/``
the layers of one prediction head. Earlier versions have ``--hybrid-override-pattern`` (with
``--mtp-hybrid-override-pattern``), or only the shares of attention and MLPs, from which layers are allotted. Source:
Megatron-LM ``ssm/mamba_hybrid_layer_allocation.py``, ``ssm/mamba_mixer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arguments import Arguments
from .delta_net_arguments import delta_net_sizes

_LETTERS, _ALL_LATENT = "MG*-E", "+"
_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")


@dataclass(frozen=True)
class HybridLayers:
    """The layers of a hybrid model."""

    stages: tuple[str, ...]
    """A letter a layer, of each pipeline stage where the pattern says them; else all in one."""
    head: str
    """Layers of one prediction head."""
    heads: int

    @property
    def pattern(self) -> str:
        """A letter a layer."""
        return "".join(self.stages)

    def layout(self) -> str | None:
        """The pipeline layout, where the pattern says the stages."""
        if len(self.stages) == 1:
            return None
        parts = [f"t*{len(stage)}" if stage else "" for stage in self.stages]
        parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}{'m' * self.heads}L"
        return "|".join(parts)


def read_hybrid(arguments: Arguments) -> HybridLayers | None:
    """The layers where the arguments are those of a hybrid model; None for a plain transformer."""
    hybrid = arguments.flag("is-hybrid-model")
    # ``--spec local`` are plain layers without Transformer Engine (``uses_transformer_engine``).
    spec = [] if arguments.get("spec") == "local" else arguments.words("spec")
    if spec and not {word.rpartition(".")[2] for word in spec} & set(_SPECS):
        arguments.refuse("spec", f"names layers in code of its own; known are local, {', '.join(_SPECS)}")
    name = "hybrid-layer-pattern" if arguments.given("hybrid-layer-pattern") else "hybrid-override-pattern"
    text = arguments.text(name)
    shares = [arguments.number(f"hybrid-{part}-ratio", 0.0) for part in ("attention", "mlp")]
    head = arguments.text("mtp-hybrid-override-pattern")
    if not (text or hybrid or spec or any(shares)):
        return None
    if not text:
        layers = arguments.required("num-layers")
        if min(shares) < 0 or sum(shares) > 1:
            arguments.problems.append(
                "--hybrid-attention-ratio and --hybrid-mlp-ratio must be shares of 1 together"
            )
            shares = [0.0, 0.0]
        return HybridLayers((allotted(layers, *shares),), head, arguments.count("mtp-num-layers") or 0)
    if _ALL_LATENT in text and "*" not in text:
        # A letter of its own for latent attention, which all attention of a model here is or is not.
        text = text.replace(_ALL_LATENT, "*")
        arguments.imply({"multi-latent-attention": True})
    main, *heads = text.replace(" ", "").split("/")
    found = HybridLayers(tuple(main.split("|")), heads[0] if heads else head, len(heads) or _heads(arguments))
    wrong = sorted(set(main + "".join(heads)) - set(_LETTERS) - {"|"})
    if wrong:
        arguments.refuse(
            name, f"{wrong[0]!r} is no layer that is simulated; known are {', '.join(_LETTERS)} and |, /"
        )
    elif len(set(heads)) > 1:
        arguments.refuse(name, "prediction heads of different layers have no rule")
    stated = arguments.count("num-layers")
    if stated and len(found.pattern) != stated and not wrong:
        told = f"names {len(found.pattern)} layers, --num-layers says {stated}"
        if name == "hybrid-layer-pattern":
            # Megatron-LM warns and goes by the pattern; with the older name it stops.
            arguments.assumed.append(f"--{name} {told}: the pattern holds")
        else:
            arguments.refuse(name, told)
    arguments.get("mtp-num-layers")
    return found


def _heads(arguments: Arguments) -> int:
    return arguments.count("mtp-num-layers") or 0


def allotted(layers: int, attention_share: float, mlp_share: float) -> str:
    """Layers from shares: attention spread evenly between layers of a state space, and MLPs among those.

    Both are placed where a running sum of their spacing falls below one half, as Megatron-LM does.
    """
    kinds = ["M"] * layers
    attention = round(layers * attention_share)
    spacing = (layers - attention) / (attention + 1)
    _place(kinds, "*", range(layers), spacing)
    mlps = round(layers * mlp_share)
    if mlps:
        _place(
            kinds,
            "-",
            [at for at, kind in enumerate(kinds) if kind == "M"],
            (layers - attention - mlps) / mlps,
        )
    return "".join(kinds)


def _place(kinds: list[str], letter: str, places: range | list[int], spacing: float) -> None:
    left = spacing
    for at in places:
        if left < 0.5:
            kinds[at] = letter
            left += spacing
        else:
            left -= 1


def place_stages(arguments: Arguments, plan: dict[str, Any], hybrid: HybridLayers) -> None:
    """Give the plan the stages that the pattern says."""
    layout, pp = hybrid.layout(), int(plan["pp"])
    if layout is None:
        return
    if plan["layout"]:
        arguments.refuse("pipeline-model-parallel-layout", "the pattern of layers says the stages already")
    if len(hybrid.stages) % pp:
        arguments.refuse(
            "hybrid-layer-pattern",
            f"has {len(hybrid.stages)} stages, which --pipeline-model-parallel-size {pp} does not divide",
        )
        return
    plan["layout"], plan["vpp"] = layout, len(hybrid.stages) // pp


def hybrid_fields(arguments: Arguments, hybrid: HybridLayers, hidden: int) -> Mapping[str, Any]:
    """Fields of the model."""
    fields: dict[str, Any] = {"layer_pattern": hybrid.pattern, "mtp_layers": hybrid.heads}
    repeated = arguments.flag("mtp-use-repeated-layer")
    if hybrid.heads:
        fields |= {"mtp_pattern": hybrid.head, "mtp_repeated": repeated and hybrid.heads > 1}
    if arguments.flag("disable-mamba-mem-eff-path"):
        arguments.refuse(
            "disable-mamba-mem-eff-path", "keeps what each kernel of the scan reads, which has no rule"
        )
    arguments.flag("use-mamba-mem-eff-path")
    head = arguments.count("mamba-head-dim", 64) or 64
    heads = arguments.count("mamba-num-heads", max(1, 2 * hidden // head))
    space = {
        "heads": heads,
        "head_size": head,
        "state_size": arguments.count("mamba-state-dim", 128),
        "groups": arguments.count("mamba-num-groups", 8),
        "chunk_size": arguments.count("mamba-chunk-size", 128),
    }
    if "M" in hybrid.pattern + hybrid.head:
        fields["state_space"] = space
    delta_net = delta_net_sizes(arguments)
    if "G" in hybrid.pattern + hybrid.head:
        fields["delta_net"] = delta_net
    return fields
