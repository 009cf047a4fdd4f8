"""An HTML page about a filling: pictures, scores, the model in words, and all assumptions."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from gpytorch_gaps.filling.process.report import FillReport
from gpytorch_gaps.filling.results.evaluation import Evaluation
from gpytorch_gaps.filling.results.filled import Filled
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.filling.results.hyperparameters import describe_model
from gpytorch_gaps.plot.correlations import kernels
from gpytorch_gaps.plot.results import draw_result
from gpytorch_gaps.plot.scores import evaluation as draw_evaluation
from gpytorch_gaps.utils.checks import check_integer
from gpytorch_gaps.utils.files import atomic_write, require_place
from gpytorch_gaps.utils.html import table
from gpytorch_gaps.utils.version import installed_version

_DPI = 130
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
.figures { display: flex; flex-wrap: wrap; gap: 0.7rem; margin: 1rem 0; }
.figures div { flex: 1 1 8rem; background: var(--soft); border-radius: 0.5rem; padding: 0.6rem 0.8rem; }
.figures b { display: block; font-size: 1.35rem; }
.wide { overflow-x: auto; font-size: 0.92rem; }
.wide th { white-space: nowrap; }
.wide img { display: block; width: 100%; min-width: 36rem; background: white; border-radius: 0.4rem; }
ul { padding-left: 1.2rem; }
footer { margin-top: 2.5rem; font-size: 0.85rem; opacity: 0.65; }
"""


def report(
    result: Filled,
    path: Path | str | None = None,
    *,
    axes: Any = None,
    title: str = "Filled gaps",
    folds: int = 5,
    warned: Sequence[str] = (),
) -> str:
    """Write a page about a filling: a single HTML file that loads nothing from elsewhere.

    It shows the field before and after with its error bars, scores of withheld observations, the coverage of intervals,
    the kernel with its hyperparameters in words, the assumptions about each axis, and all notes.

    :param result: the result of ``fill_gaps``. If the array was streamed, there is no model, and no evaluation.
    :param path: the file to write, completely or not at all. Default: nothing is written.
    :param axes: the coordinates of each dimension, if ``result.mean`` has none; as in :func:`field`.
    :param title: the heading of the page.
    :param folds: number of folds of ``result.evaluate``, 0 for no evaluation.
    :param warned: warnings that the page lists.
    :return: the page.
    :raises ValueError: if `result` is not a result of ``fill_gaps``, or if the folder of `path` does not exist.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch_gaps import plot
    >>> result = gaps.fill_gaps(np.array([2.0, np.nan, 2.0]), progress=False)
    >>> plot.report(result, title="Level").count("<h1>Level</h1>")
    1
    """
    if not isinstance(result, Filled):
        raise ValueError(f"result: got {type(result).__name__}; expected the result of fill_gaps")
    check_integer("folds", folds, at_least=0)
    if path is not None:
        path = Path(path)
        require_place("path", path)
    evaluations, why_not = _evaluations(result, folds)
    several = isinstance(result.report, dict)
    reports: Mapping[Any, FillReport] = result.report if several else {None: result.report}
    models: Mapping[Any, Fitted | None] = result._fitted if several and result._fitted else {None: result._fitted}
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, about in reports.items():
        parts += [f"<h2>{escape(str(name))}</h2>"] * several
        parts.append(_section(about, models.get(name), evaluations.get(name), draw_result(result, axes, name)))
    warned = [*warned, why_not] if why_not else warned
    if warned:
        parts.append(f"<h2>Warnings</h2>{_listed(warned)}")
    page = _page(title, "".join(parts))
    if path is not None:
        atomic_write(path, lambda stream: stream.write(page.encode()))
    return page


def _evaluations(result: Filled, folds: int) -> tuple[dict[Any, Evaluation], str]:
    """The evaluation of each variable, or the reason why there is none: no model, or too few observations."""
    if not folds:
        return {}, ""
    try:
        found = result.evaluate(folds)
    except ValueError as error:
        return {}, str(error)
    return found if isinstance(found, dict) else {None: found}, ""


def _section(about: FillReport, fitted: Fitted | None, found: Evaluation | None, drawn: Figure) -> str:
    """The part of the page about one variable."""
    parts = [_figures(about, found), _image(drawn, "The field before and after, and its standard deviation")]
    if found is not None:
        parts += ["<h3>How good it is</h3>", _image(draw_evaluation(found), "Coverage of intervals, and errors")]
        parts.append(f'<div class="wide">{found._repr_html_()}</div>')
    elif about.held_out is not None:
        parts += ["<h3>How good it is</h3>", f"<p>{escape(about.expected_error)}</p>"]
    if fitted is not None:
        names = [axis.name for axis in fitted.filling.source.axes]
        parts += ["<h3>The model</h3>", f"<p>Kernel: {escape(about.kernel)}</p>"]
        parts.append(f'<div class="wide">{table(describe_model(fitted))}</div>')
        parts.append(_image(kernels(fitted.model, names=names), "Correlations along each axis"))
    return "".join([*parts, "<h3>What was done and assumed</h3>", f'<div class="wide">{about.table()}</div>'])


def _figures(about: FillReport, found: Evaluation | None) -> str:
    """The most important numbers, in boxes."""
    score = about.held_out if found is None else found.score
    boxes = [(f"{about.num_gaps:,}", f"gaps filled, {100 * about.num_gaps / about.num_cells:.3g} % of the cells")]
    if about.expected_rmse is not None:
        boxes.append((f"{about.expected_rmse:.3g}", "root mean square error to expect in the gaps"))
    if score is not None:
        boxes.append((f"{100 * score.coverage:.0f} %", f"of {score.count:,} withheld values in 95 % intervals"))
    if about.noise_std is not None:
        of = ", of transformed values" if about.transform else ""
        boxes.append((f"{about.noise_std:.3g}", f"standard deviation of the noise of a measurement{of}"))
    return f'<div class="figures">{"".join(f"<div><b>{value}</b>{words}</div>" for value, words in boxes)}</div>'


def _image(figure: Figure, words: str) -> str:
    """A figure as an image inside the page. The figure is closed."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DPI, facecolor="white")
    plt.close(figure)
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<div class="wide"><img alt="{escape(words)}" src="data:image/png;base64,{data}"></div>'


def _listed(entries: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</ul>"


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}"
        f"<footer>gpytorch-gaps {installed_version()}</footer></body></html>\n"
    )
