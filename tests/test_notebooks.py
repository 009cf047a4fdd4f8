"""The notebooks run from a clean kernel, on something small."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat, nbclient, ipykernel and matplotlib")
for needed in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(needed, reason=f"notebooks need {needed}")

from notebooks.execute import executed, main  # noqa: E402

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LONG = {"climate"}  # half a minute: run by `make notebooks`; tests/benchmarks/test_climate.py has its parts
EXECUTED = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.benchmark] if path.stem in LONG else []) for path in NOTEBOOKS
]


# run by a kernel first: candidate kernels are compared after one step
QUICK_CHOICE = """
from gpytorch_gaps.filling.learning import learn

learn.FIRST_STEPS = learn.FURTHER_STEPS = 1
del learn
"""


@pytest.fixture(autouse=True)
def clean_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("GPYTORCH_GAPS_QUICK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):  # nobody's own settings
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def write(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", EXECUTED)
def test_notebook_runs(path, tmp_path):
    startup = tmp_path / "ipythondir" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "quick.py").write_text(QUICK_CHOICE)
    notebook = executed(path, timeout=3000)  # a cell that fails raises
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "image/png" in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_tells_nothing_of_a_machine(path):
    text = path.read_text()
    for trace in ("/home/", "/root/", "/work/", "/tmp/", "/Users/", "site-packages", "iopub"):
        assert trace not in text


def test_execution_in_place_keeps_outputs_but_no_times(tmp_path, monkeypatch):
    path = tmp_path / "small.ipynb"
    write(path, "from pathlib import Path\nprint(Path.cwd().name, 6 * 7)", "1 + 1")
    main([str(path)])
    first, second = nbformat.read(path, as_version=4).cells
    assert first.outputs[0].text == f"{tmp_path.name} 42\n"
    assert second.outputs[0].data["text/plain"] == "2"
    assert not first.metadata
    assert not second.metadata


def test_a_failing_cell_is_an_error_and_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "broken.ipynb"
    write(path, "1 / 0")
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"broken\.ipynb: .*") as error:
        main([str(path)])
    assert "ZeroDivisionError" in str(error.value)
    assert path.read_bytes() == before
