"""Which degrees of tensor and expert parallelism fit a model: the divisibility that cutting its tensors needs."""

from __future__ import annotations

from .mixers import MIXERS, Mixer
from .model import ModelDescription

_LARGEST_ADVICE = 1 << 12


def dense_ffn_sizes(model: ModelDescription) -> list[int]:
    """Widths that occur among the dense MLPs, in ascending order; empty where every layer has experts."""
    return sorted({model.layer_ffn_size(layer) for layer in model.layer_numbers} - {0})


def mixers_of(model: ModelDescription) -> list[Mixer]:
    """The mixers that layers and prediction heads of a model have, in the order of the registry."""
    found = {model.mixer(layer) for layer in model.layer_numbers}
    return [mixer for name, mixer in MIXERS.items() if name in found]


def tensor_parallel_problem(model: ModelDescription, tp: int) -> str:
    """Why the model cannot be cut over ``tp`` ranks, with the nearest degree that fits; '' if it can.

    Mixers must be cut evenly (``op_graphs.mixers``: heads of attention, heads and groups of a state space); dense FFN
    widths and the shared experts' width must divide by ``tp``. A vision encoder inside the model is cut alike. The
    vocabulary is padded, so any ``tp`` fits it; routed experts are cut by another degree, see
    :func:`expert_parallel_problem`.
    """
    reasons = _misfits(model, tp)
    if not reasons:
        return ""
    most = max((mixer.most_ranks(model) for mixer in mixers_of(model)), default=1)
    legal = [degree for degree in range(1, most + 1) if not _misfits(model, degree)]
    nearest = min(legal, key=lambda degree: (abs(degree - tp), degree))
    return f"tp {tp} does not fit {model.name}: {'; '.join(reasons)}. The nearest tp that fits is {nearest}"


def expert_parallel_problem(model: ModelDescription, ep: int, etp: int = 1) -> str:
    """Why the experts cannot be dealt out over ``ep`` ranks and cut over ``etp``, with the nearest degrees that can.

    '' if they can. The experts must divide by ``ep`` and their width by ``etp``; a model without experts has only the
    degrees 1.
    """
    if model.moe is None:
        if ep == 1 and etp == 1:
            return ""
        return f"ep {ep} and etp {etp} do not fit {model.name}: it has no experts. Both must be 1"
    reasons = [
        f"{name} {degree} does not fit {model.name}: {size} {what}. The nearest {name} that fits is "
        f"{_nearest_divisor(size, degree)}"
        for name, degree, size, what in (
            ("ep", ep, model.moe.experts, "experts do not divide by it"),
            ("etp", etp, model.moe.expert_ffn_size, "(expert_ffn_size) does not divide by it"),
        )
        if degree < 1 or size % degree
    ]
    return "; ".join(reasons)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (d for d in range(1, min(number, _LARGEST_ADVICE) + 1) if number % d == 0)
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def _misfits(model: ModelDescription, tp: int) -> list[str]:
    if tp < 1:
        return ["it must be at least 1"]
    reasons = [reason for mixer in mixers_of(model) for reason in mixer.misfits(model, tp)]
    reasons += [f"ffn_size {size} does not divide by it" for size in dense_ffn_sizes(model) if size % tp]
    if model.moe is not None and model.moe.shared_ffn_size % tp:
        reasons.append(f"shared_ffn_size {model.moe.shared_ffn_size} does not divide by it")
    if model.vision is not None:
        reasons += [f"vision encoder: {reason}" for reason in _misfits(model.vision.encoder, tp)]
    return reasons
