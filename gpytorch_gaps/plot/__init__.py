"""Pictures of fields with gaps, of fillings and of learned models. Each takes one line.

    plot.field(values, axes)    plot.fill(result)      plot.kernels(model)
    plot.uncertainty(std)       plot.panels({...})     plot.history(history)
    plot.series(x, mean, std)    plot.evaluation(evaluation)    plot.report(result, "page.html")

A picture of one panel is drawn into `ax`, or into a new figure, and returned as Axes. A picture of several panels is a
new figure, which is returned. Figures are managed by pyplot: notebooks and ``plt.show()`` show them, ``plt.close()``
closes them.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("gpytorch_gaps.plot needs matplotlib: pip install 'gpytorch-gaps[plot]'") from error

from gpytorch_gaps.plot.correlations import kernels
from gpytorch_gaps.plot.fields import field, panels, uncertainty
from gpytorch_gaps.plot.filling import fill
from gpytorch_gaps.plot.lines import series
from gpytorch_gaps.plot.page import report
from gpytorch_gaps.plot.scores import evaluation
from gpytorch_gaps.plot.training import history

__all__ = ["evaluation", "field", "fill", "history", "kernels", "panels", "report", "series", "uncertainty"]
