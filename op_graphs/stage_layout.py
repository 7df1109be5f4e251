"""Which pipeline stage holds which part of the model.

Without a layout the rule is Megatron-LM's (``num_layers_in_first_pipeline_stage`` and
``num_layers_in_last_pipeline_stage``, set by ``--decoder-first-pipeline-num-layers`` and
``--decoder-last-pipeline-num-layers``): the first and the last pipeline *rank* may hold a number of layers of their
own, the others share the rest equally, and a rank spreads its layers equally over its ``vpp`` model chunks. The
embedding lies on the first stage, output head and prediction heads on the last. A vision encoder lies with the
embedding, or (``vision_stage: own``) alone on the first stage; then the rule holds for the stages behind it.

A layout (``--pipeline-model-parallel-layout``) says it stage by stage, in order of the stages: ``E`` embedding, ``t``
a decoder layer, ``m`` a multi-token prediction head, ``L`` output head and loss; ``|`` begins the next stage, ``*N``
repeats the letter, ``|`` or ``( )`` group before it; commas and spaces mean nothing. A stage may be without layers.
``V``, our addition, is a vision encoder with its projector; without it the encoder lies with the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .plan import ParallelPlan

_LETTERS = {
    "E": "embedding",
    "t": "layer",
    "m": "prediction head",
    "L": "loss",
    "V": "vision encoder",
}
_MOST_PARTS = 1 << 16


def layers_per_stage(
    layers: int, parallel: ParallelPlan, prediction_heads: int | None = None, vision: bool = True
) -> tuple[int, ...]:
    """Layers of each global stage, in order ``0 .. pp * vpp - 1``.

    Stage ``s`` holds the layers behind those of the stages before it. Without a layout every entry is at least 1, but
    for that of an encoder alone; the sum is ``layers`` always. ``prediction_heads`` is what a layout is checked
    against, None for no check; ``vision`` says whether the model has a vision encoder.

    Raise ValueError if the layers cannot be split that way.
    """
    if parallel.layout is not None:
        stages = parse_layout(parallel.layout)
        problem = layout_problem(stages, layers, parallel, prediction_heads, vision)
        if problem:
            raise ValueError(problem)
        return tuple(stage.count("t") for stage in stages)
    if parallel.vision_stage == "own":
        if parallel.pp == 1 or parallel.vpp > 1:
            given = f"pp is {parallel.pp}, vpp is {parallel.vpp}"
            raise ValueError(
                f"a vision encoder on a stage of its own needs pp > 1 and vpp: 1, {given}; with vpp > 1 give a layout "
                'such as "V|Et|t|tL"'
            )
        behind = replace(parallel, pp=parallel.pp - 1, vision_stage="colocated")
        return (0, *layers_per_stage(layers, behind))
    per_rank = _layers_per_rank(layers, parallel)
    for rank, held in enumerate(per_rank):
        if held % parallel.vpp:
            raise ValueError(
                f"{held} layers on pipeline rank {rank} do not divide over its {parallel.vpp} model chunks"
            )
    return tuple(per_rank[stage % parallel.pp] // parallel.vpp for stage in range(parallel.stages))


def embedding_stage(parallel: ParallelPlan) -> int:
    """Global stage of the embedding: 0, or 1 behind a vision encoder on a stage of its own."""
    if parallel.layout is None:
        return int(parallel.vision_stage == "own")
    return next((at for at, stage in enumerate(parse_layout(parallel.layout)) if "E" in stage), 0)


def _layers_per_rank(layers: int, parallel: ParallelPlan) -> list[int]:
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if (first is not None or last is not None) and parallel.pp == 1:
        raise ValueError("a first or last stage of its own size needs pp > 1, pp is 1")
    fixed = (first or 0) + (last or 0)
    equal_ranks = parallel.pp - (first is not None) - (last is not None)
    remaining = layers - fixed
    if remaining < 0:
        raise ValueError(f"the first and last stages take {fixed} layers, the model has {layers}")
    if equal_ranks == 0 and remaining:
        raise ValueError(
            f"the two stages take {fixed} layers, {remaining} of the model's {layers} are left over"
        )
    if equal_ranks and remaining < equal_ranks * parallel.vpp:
        raise ValueError(
            f"{remaining} layers are fewer than the {equal_ranks * parallel.vpp} stages they are shared by "
            f"(pp = {parallel.pp}, vpp = {parallel.vpp})"
        )
    if equal_ranks and remaining % (equal_ranks * parallel.vpp):
        raise ValueError(
            f"{remaining} layers do not divide over {equal_ranks} pipeline ranks of {parallel.vpp} model chunks"
        )
    per_rank = [remaining // equal_ranks if equal_ranks else 0] * parallel.pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    return per_rank


# -- layouts -----------------------------------------------------------------------------------------------------


def parse_layout(text: str) -> tuple[str, ...]:
    """The letters of each stage, repetitions written out: ``"Et*2|(t|)*2L"`` is ``("Ett", "t", "t", "L")``.

    Raise ValueError naming the place of what cannot be read.
    """
    parts, end = _sequence(text, 0, 0)
    if end < len(text):
        raise ValueError(f"character {end + 1}: ) closes no group")
    return tuple("".join(parts).split("|"))


def _sequence(text: str, start: int, depth: int) -> tuple[list[str], int]:
    """Letters and bars from ``start`` to the end of the group, or of the text, and where that is."""
    parts: list[str] = []
    at = start
    while at < len(text) and text[at] != ")":
        if text[at] in ", ":
            at += 1
            continue
        if text[at] == "(":
            if depth == 16:
                raise ValueError(f"character {at + 1}: groups are nested deeper than 16")
            item, closing = _sequence(text, at + 1, depth + 1)
            if closing == len(text):
                raise ValueError(f"character {at + 1}: ( is never closed")
            at = closing + 1
        elif text[at] in _LETTERS or text[at] == "|":
            item, at = [text[at]], at + 1
        else:
            meaning = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
            raise ValueError(
                f"character {at + 1}: {text[at]!r} means nothing; {meaning}, | next stage, *N times"
            )
        times, at = _repetition(text, at)
        if len(parts) + len(item) * times > _MOST_PARTS:
            raise ValueError(f"character {at}: more than {_MOST_PARTS} parts")
        parts += item * times
    return parts, at


def _repetition(text: str, at: int) -> tuple[int, int]:
    """How often what ends at ``at`` is meant, and where its ``*N`` ends."""
    if at == len(text) or text[at] != "*":
        return 1, at
    end = at + 1
    while end < len(text) and text[end] in "0123456789" and end < at + 7:
        end += 1
    if end == at + 1 or int(text[at + 1 : end]) == 0:
        raise ValueError(f"character {at + 1}: * needs a number from 1 behind it")
    return int(text[at + 1 : end]), end


def layout_problem(
    stages: Sequence[str],
    layers: int,
    parallel: ParallelPlan,
    prediction_heads: int | None = None,
    vision: bool = True,
) -> str:
    """Which rule a layout breaks, with what would be legal; '' if it places every part of the model exactly once."""
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        return "it says where every layer goes; leave out first_stage_layers and last_stage_layers"
    if parallel.vision_stage != "colocated":
        return "it says where the vision encoder goes (V); leave out vision_stage"
    if len(stages) != parallel.stages:
        fits = f"; set vpp: {len(stages) // parallel.pp}" if len(stages) % parallel.pp == 0 else ""
        return f"it has {len(stages)} stages, and pp * vpp = {parallel.pp} * {parallel.vpp} = {parallel.stages}{fits}"
    whole = "".join(stages)
    for letter, name, wanted in (
        ("t", "layers", layers),
        ("E", "embeddings", 1),
        ("L", "losses", 1),
        ("m", "prediction heads", prediction_heads),
    ):
        found = whole.count(letter)
        if wanted is not None and found != wanted:
            which = "missing" if found < wanted else "too many"
            return (
                f"it places {found} {name} ({letter}), the model has {wanted}: {abs(found - wanted)} {which}"
            )
    encoders = whole.count("V")
    if encoders and not vision:
        return "it places a vision encoder (V), the model has none"
    if encoders > 1:
        return f"it places {encoders} vision encoders (V), the model has 1"
    if encoders and not whole.startswith("VE"):
        return "the vision encoder (V) must come right before the embedding (E), on its stage or on the first alone"
    if not stages[1 if stages[0] == "V" and len(stages) > 1 else 0].removeprefix("V").startswith("E"):
        return (
            "the embedding (E) must be the first part of the first stage, or of the second behind a V alone"
        )
    if not stages[-1].endswith("L"):
        return "the loss (L) must be the last part of the last stage"
    if whole.count("m") and not stages[-1].endswith("m" * whole.count("m") + "L"):
        return "prediction heads (m) must stand together right before the loss (L), on its stage"
    return ""
