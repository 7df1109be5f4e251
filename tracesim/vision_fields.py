"""Fields of a scenario whose model reads images: how long an image is, and how many a sample has."""

from __future__ import annotations

from op_graphs.model import ModelDescription, ModelError
from op_graphs.parameters import tensor_parallel_problem, vision_parameters
from op_graphs.plan import ParallelPlan, TrainingPlan

from .scenario_fields import Problems

_LENGTH, _IMAGES = "training.seq_len", "training.images_per_sample"


def image_length(model: ModelDescription | None, seq_len: int, problems: Problems) -> int:
    """The sequence length: of a model of image patches the tokens of an image, which the scenario need not say."""
    if model is None or model.patches is None:
        return seq_len
    tokens = model.patches.tokens
    if _LENGTH in problems.given and problems.sound(_LENGTH) and seq_len != tokens:
        size = model.patches.image_size
        problems.add(
            _LENGTH,
            seq_len,
            f"is not the {tokens} tokens that {model.name} makes of an image of {size} x {size}; leave it out",
        )
    return tokens


def check_vision(
    model: ModelDescription, parallel: ParallelPlan, training: TrainingPlan, problems: Problems
) -> None:
    """Note what images, their encoder and the parallel plan do not allow together."""
    reads_images = model.patches is not None or model.vision is not None
    if reads_images and parallel.cp > 1 and problems.sound("parallel.cp"):
        problems.add(
            "parallel.cp", parallel.cp, f"{model.name} reads images, whose patches are not split; set cp: 1"
        )
    if model.patches is not None and problems.sound("parallel.sp", "parallel.tp"):
        tokens = model.patches.tokens
        if parallel.sp and tokens % parallel.tp:
            problems.add(
                "parallel.sp",
                parallel.sp,
                f"the {tokens} tokens of an image do not divide over tp = {parallel.tp} ranks; set sp: false",
            )
    if parallel.vision_stage == "own" and model.vision is None and problems.sound("parallel.vision_stage"):
        problems.add(
            "parallel.vision_stage",
            parallel.vision_stage,
            f"{model.name} has no vision encoder; set it to colocated",
        )
    images = training.images_per_sample
    if not problems.sound(_IMAGES):
        return
    if model.vision is None:
        if images != 1:
            problems.add(_IMAGES, images, f"{model.name} has no vision encoder; leave it out")
        return
    _check_image_tokens(model, training, problems)
    _check_projector(model, parallel, problems)


def _check_image_tokens(model: ModelDescription, training: TrainingPlan, problems: Problems) -> None:
    assert model.vision is not None
    each, images = model.vision.tokens_per_image, training.images_per_sample
    if images * each > training.seq_len and problems.sound(_LENGTH):
        problems.add(
            _IMAGES,
            images,
            f"times {each} tokens an image is {images * each}, more than seq_len = {training.seq_len}; "
            + (
                f"nearest: {training.seq_len // each}" if training.seq_len >= each else f"set seq_len: {each}"
            ),
        )


def _check_projector(model: ModelDescription, parallel: ParallelPlan, problems: Problems) -> None:
    assert model.vision is not None
    if not problems.sound("parallel.tp"):
        return
    if tensor_parallel_problem(model, parallel.tp):
        return
    try:
        vision_parameters(model, parallel.tp, parallel.sp)
    except ModelError as error:
        rule = str(error).partition(f"does not fit {model.name}: ")[2]
        problems.add("parallel.tp", parallel.tp, f"does not fit {model.name}: {rule}; set tp: 1")
