"""What importing the package does and does not do, each in a process of its own."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gpytorch_gaps
from gpytorch_gaps.utils.version import installed_version

GENEROUS_SECONDS = 300  # a deadline for a machine that is busy with other work, not an expectation


def run(code, *arguments):
    """Runs Python code in a new process; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=GENEROUS_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["fill", "--help"], ["--version"], ["fill"], ["fill", "in.npy", "-o", "out.npy", "--steps=0"]],
)
def test_help_and_usage_errors_do_not_import_torch(arguments):
    code = """if True:
        import runpy, sys
        sys.argv = ["gpytorch-gaps", *sys.argv[1:]]
        try:
            runpy.run_module("gpytorch_gaps", run_name="__main__", alter_sys=True)
        except SystemExit as stopped:
            heavy = {"torch", "gpytorch", "numpy", "scipy", "xarray", "pandas", "matplotlib", "tqdm"}
            print("exit", stopped.code, sorted(heavy & set(sys.modules)))
    """
    expected = 0 if {"--help", "--version"} & set(arguments) else 2
    assert run(code, *arguments).splitlines()[-1] == f"exit {expected} []"


def test_the_package_is_imported_without_xarray_and_pandas():
    code = """if True:
        import sys
        import gpytorch_gaps
        print(sorted({"torch", "numpy", "xarray", "pandas"} & set(sys.modules)))
        for name in gpytorch_gaps.__all__:
            getattr(gpytorch_gaps, name)
        print(sorted({"torch", "xarray", "pandas", "matplotlib"} & set(sys.modules)))
    """
    assert run(code).splitlines() == ["[]", "['torch']"]


@pytest.mark.parametrize("first", ["xarray", "gpytorch_gaps"])
def test_the_accessor_is_there_whatever_is_imported_first(first):
    pytest.importorskip("xarray")
    code = """if True:
        import importlib, sys, warnings
        from importlib.util import find_spec
        warnings.simplefilter("error")
        first, second = sys.argv[1:]
        importlib.import_module(first)
        find_spec(second)  # a look is no import
        importlib.import_module(second)
        import gpytorch_gaps, xarray
        importlib.reload(gpytorch_gaps)
        for data in (xarray.DataArray([1.0, 2.0]), xarray.Dataset()):
            print(type(data.gaps).__name__, "torch" in sys.modules)
        print([finder for finder in sys.meta_path if type(finder).__module__.startswith("gpytorch_gaps")])
    """
    second = "gpytorch_gaps" if first == "xarray" else "xarray"
    assert run(code, first, second).splitlines() == ["GapsAccessor False"] * 2 + ["[]"]


def test_the_accessor_does_without_xarray():
    code = """if True:
        import sys
        sys.path_importer_cache.clear()
        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name == "xarray":
                    raise ModuleNotFoundError("No module named 'xarray'", name="xarray")
        sys.meta_path.insert(0, Hidden())
        import gpytorch_gaps
        try:
            import xarray
        except ModuleNotFoundError as error:
            print(error)
    """
    assert run(code).strip() == "No module named 'xarray'"


def test_sums_and_products_of_kernels_are_patched_once():
    from gpytorch.kernels import AdditiveKernel, ProductKernel

    from gpytorch_gaps.kernels.composite import patch_composite_kernels

    for kind in (AdditiveKernel, ProductKernel):
        upstream = kind.forward.upstream
        assert upstream.__module__.startswith("gpytorch.")
        patch_composite_kernels()
        assert kind.forward.upstream is upstream


def test_type_checkers_see_the_names_that_there_are():
    """The imports for type checkers, the table of `__getattr__` and `__all__` name the same things."""
    tree = ast.parse(Path(gpytorch_gaps.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen, optional = {alias.name for node in imports for alias in node.names}, {"botorch", "plot", "GapFiller"}
    assert set(gpytorch_gaps.__all__) == seen - optional == set(gpytorch_gaps._HOMES) - optional
    modules = {"distributed", "formats", "operators", "preconditioners", "settings", "sizing"}
    for name in gpytorch_gaps.__all__:
        value = getattr(gpytorch_gaps, name)
        assert inspect.ismodule(value) == (name in modules)
        assert value.__name__.rpartition(".")[2] == name
    assert set(gpytorch_gaps.__all__) <= set(dir(gpytorch_gaps))


def test_other_names():
    assert gpytorch_gaps.likelihoods.GappyGridLikelihood is gpytorch_gaps.GappyGridLikelihood
    with pytest.raises(AttributeError, match="module 'gpytorch_gaps' has no attribute 'fill_holes'"):
        gpytorch_gaps.fill_holes  # noqa: B018
    assert not hasattr(gpytorch_gaps, "__wrapped__")


def test_the_version_is_that_of_the_distribution(monkeypatch):
    from importlib import metadata

    assert gpytorch_gaps.__version__ == metadata.version("gpytorch-gaps")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert installed_version() == "0+unknown"


def test_no_modules_import_each_other():
    grimp = pytest.importorskip("grimp")  # comes with import-linter
    graph = grimp.build_graph("gpytorch_gaps", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    left = dict(imported)  # modules that may be part of a cycle: those that import others that may be
    while done := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in done}
    assert not left, f"in a cycle, or importing one: {sorted(left)}"
