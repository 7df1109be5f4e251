"""Two timelines side by side, simulated or measured: what matches, where their steps differ, and why.

Figures are means over the steps of a rank, then over ranks, so runs of different length and size compare.
"""

from tracesim.diff.comparison import Comparison, compare_timelines, diff_timelines
from tracesim.diff.figures import compare, kind_figures, step_figures
from tracesim.diff.markdown import markdown
from tracesim.diff.merged import merged_timeline
from tracesim.diff.simulated_side import is_scenario, simulate_beside
from tracesim.diff.tables import render_diff

__all__ = [
    "Comparison",
    "compare",
    "compare_timelines",
    "diff_timelines",
    "is_scenario",
    "kind_figures",
    "markdown",
    "merged_timeline",
    "render_diff",
    "simulate_beside",
    "step_figures",
]
