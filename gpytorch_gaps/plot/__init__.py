"""Pictures of fields with gaps, of what filled them, and of what was learned, in one line each.

    plot.field(values, axes)    plot.fill(result)      plot.kernels(model)
    plot.uncertainty(std)       plot.panels({...})     plot.history(history)
    plot.series(x, mean, std)

A picture of one panel is drawn into `ax`, or into a figure of its own, and returned as Axes; one of several panels
always opens its own figure and returns that. Figures are pyplot's: notebooks show them, ``plt.show()`` shows them, and
whoever opened them closes them.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("gpytorch_gaps.plot needs matplotlib: pip install 'gpytorch-gaps[plot]'") from error

from gpytorch_gaps.plot.correlations import kernels
from gpytorch_gaps.plot.fields import field, uncertainty
from gpytorch_gaps.plot.filling import fill, panels
from gpytorch_gaps.plot.lines import series
from gpytorch_gaps.plot.training import history

__all__ = ["field", "fill", "history", "kernels", "panels", "series", "uncertainty"]
