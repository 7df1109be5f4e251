"""Two timelines side by side, simulated or measured: where do they spend a step differently?"""

from tracesim.diff.comparison import diff_timelines
from tracesim.diff.figures import compare, kind_figures, step_figures
from tracesim.diff.tables import render_diff

__all__ = ["compare", "diff_timelines", "kind_figures", "render_diff", "step_figures"]
