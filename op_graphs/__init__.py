"""Operation graphs: the two data types everything passes through, models, and their lowering to operations.

``graph.OpGraph``        what must happen, in which order, at what cost
``timeline.Timeline``    what happened when
``model``, ``presets``   what is trained
``plan``                 how it is split over ranks, and the step's settings
``lower_*``              model + plan -> programs, the templates of a graph
"""

from .graph import OpGraph
from .model import ModelDescription, ModelError
from .plan import OverlapPlan, ParallelPlan, Recompute, TrainingPlan
from .presets import list_models, load_model, model_from_mapping
from .timeline import Timeline

__all__ = [
    "ModelDescription",
    "ModelError",
    "OpGraph",
    "OverlapPlan",
    "ParallelPlan",
    "Recompute",
    "Timeline",
    "TrainingPlan",
    "list_models",
    "load_model",
    "model_from_mapping",
]
