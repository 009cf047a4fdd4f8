"""What is public is what the API pages show: neither more nor less."""

import importlib
import inspect
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest

import gpytorch_gaps

PAGES = Path(__file__).parent.parent / "docs" / "api"
OPTIONAL = ("plot",)  # public modules that need an extra, and are not in `gpytorch_gaps.__all__`
ELSEWHERE = "gpytorch_gaps.botorch."  # its import changes defaults of the process: tests/test_botorch.py
DOCUMENTED = ("gpytorch_gaps.plot.",)  # whose docstrings are complete: to be extended to all
RETURNED_BY_OTHERS = {  # shown because a public object is one, or returns one, or needs an extra
    "FillModel": "the model of Filled",
    "GapFiller": "not in `__all__`: needs scikit-learn",
    "GapsAccessor": "DataArray.gaps",
    "NoisyPosteriorCovarianceOperator": "likelihood(model(x)).lazy_covariance_matrix",
    "PosteriorCovarianceOperator": "model(x).lazy_covariance_matrix",
    "SolveConfig": "settings.current()",
    "SolveRecord": "record_solves()",
}


def shown():
    """The full name of every object on an API page."""
    return [name for page in sorted(PAGES.glob("*.md")) for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]


def public_modules():
    named = [name for name in gpytorch_gaps.__all__ if isinstance(getattr(gpytorch_gaps, name), ModuleType)]
    return [*named, *OPTIONAL]


def module_called(name):
    if name in OPTIONAL:
        pytest.importorskip("matplotlib")
        return importlib.import_module(f"gpytorch_gaps.{name}")
    return getattr(gpytorch_gaps, name)


def names_in(module):
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return set(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def test_every_object_is_shown_once():
    names = [name.rsplit(".", 1)[-1] for name in shown()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", public_modules())
def test_a_module_has_exactly_the_names_that_its_page_shows(name):
    module = module_called(name)
    prefix = f"{module.__name__}."
    assert {path.rsplit(".", 1)[-1] for path in shown() if path.startswith(prefix)} == names_in(module)


def test_the_package_has_exactly_the_names_that_the_pages_show():
    modules = [f"{module_called(name).__name__}." for name in public_modules()]
    pages = {path.rsplit(".", 1)[-1] for path in shown() if not path.startswith((*modules, ELSEWHERE))}
    own = set(gpytorch_gaps.__all__) - set(public_modules())
    assert pages - (set(RETURNED_BY_OTHERS) - own) == own


@pytest.mark.parametrize("path", [path for path in shown() if not path.startswith(("gpytorch_gaps.plot.", ELSEWHERE))])
def test_a_name_of_the_package_is_the_object_shown(path):
    found, name = pydoc.locate(path), path.rsplit(".", 1)[-1]
    assert found is not None
    assert getattr(gpytorch_gaps, name, found) is found


@pytest.mark.parametrize("path", [path for path in shown() if path.startswith(DOCUMENTED)])
def test_a_docstring_has_every_parameter_and_an_example(path):
    pytest.importorskip("matplotlib")
    found = pydoc.locate(path)
    documented = inspect.getdoc(found) + (inspect.getdoc(found.__init__) or "" if inspect.isclass(found) else "")
    named = set(re.findall(r":param \*{0,2}(\w+):", documented))
    assert set(inspect.signature(found).parameters) - named == set()
    assert ">>>" in documented
    assert inspect.isclass(found) or ":return:" in documented
