"""What the docs show works: every Python block of a page, in order and in one namespace; every command exists.

The blocks of the README are run by test_readme.py, which looks at their results too.

A block that cannot run here says why in its title, ```` ```python title="needs .." ````, and is left out.
"""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

from gpytorch_gaps.__main__ import main
from tests._defaults import defaults_kept

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", flags=re.DOTALL | re.MULTILINE)
MOST_LEFT_OUT = 2


def blocks(page, python):
    """Number of the first line, title and text of each block that is Python, or that is not."""
    content = page.read_text()
    for found in BLOCK.finditer(content):
        language, _, title = found["kind"].partition(" ")
        if (language == "python") == python:
            yield content.count("\n", 0, found.start("text")), title, found["text"]


def commands(page):
    lines = [line for _, _, text in blocks(page, python=False) for line in text.splitlines()]
    return [line for line in lines if re.match(r"(make|gpytorch-gaps|python -m gpytorch_gaps)\b", line)]


def ids(page):
    return page.stem


with_python = [page for page in PAGES[1:] if any(blocks(page, python=True))]


@pytest.fixture(autouse=True)
def own_folder_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    yield
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    plt.close("all")


@pytest.mark.usefixtures("quick_choice")
@pytest.mark.parametrize("page", with_python, ids=ids)
def test_examples_run_in_order(page):
    names = {"__name__": page.stem}
    with warnings.catch_warnings(), defaults_kept():
        optional = re.compile(r"^(?:import|from) (pandas|xarray|matplotlib|botorch)", re.MULTILINE)
        for needed in optional.findall(page.read_text()):
            pytest.importorskip(needed)
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # of torch
        for line, title, text in blocks(page, python=True):
            if not title:
                exec(compile("\n" * line + text, str(page), "exec"), names)  # an error tells its line in the page


def test_hardly_any_example_is_left_out():
    titles = [title for page in PAGES for _, title, _ in blocks(page, python=True) if title]
    assert all(title.startswith('title="needs ') for title in titles)
    assert len(titles) <= MOST_LEFT_OUT


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=ids)
def test_commands_exist(page, capsys):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in commands(page):
        words = shlex.split(command.replace("python -m gpytorch_gaps", "gpytorch-gaps"))
        if words[0] == "make":
            assert words[1] in targets, command
        elif words[1:] != ["..."]:
            _assert_understood(words[1:], capsys)


def _assert_understood(arguments, capsys):
    """The subcommand is there, and its help knows every option."""
    with pytest.raises(SystemExit) as stopped:
        main([arguments[0], "--help"])
    told = capsys.readouterr().out
    assert stopped.value.code == 0, arguments
    for option in arguments[1:]:
        if option.startswith("-"):
            assert re.search(rf"(^|[\s\[,]){option}\b", told, flags=re.MULTILINE), f"{option} of {arguments}"


def test_readme_has_the_two_commands():
    assert commands(ROOT / "README.md")[:2] == ["make test", "make demo"]


def test_every_picture_is_there():
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{target} in {page.name}"


def test_formulas_are_typeset_whole():
    pytest.importorskip("latex2mathml")
    from docs.mathml import on_page_content

    pages = [page.read_text() for page in [*PAGES[1:], *(ROOT / "docs" / "api").glob("*.md")]]
    outside = [BLOCK.sub("", re.sub(r"`[^`\n]+`", "", page)) for page in pages]
    block = [found for page in outside for found in re.findall(r"\$\$(.+?)\$\$", page, flags=re.DOTALL)]
    inline = [found for page in outside for found in re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", page)]
    assert len(block) > 5
    assert len(inline) > 50
    marked = [rf'<div class="arithmatex">\[{latex}\]</div>' for latex in block]
    marked += [rf'<span class="arithmatex">\({latex}\)</span>' for latex in inline]
    for formula in marked:
        typeset = on_page_content(formula)
        assert typeset.startswith("<math"), formula
        assert "\\" not in typeset, formula  # a command that is not known stays as it is


def test_the_drawing_of_floors_is_that_of_the_contract():
    from docs.floors import PICTURE, contracts, drawing, roles

    assert list(roles()) == [name for floor in contracts()[0] for name in floor]
    assert PICTURE.read_text() == drawing(), "run python -m docs.floors"


def test_modules_named_in_the_architecture_exist():
    named = re.findall(r"`(\w+/\w+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert named
    assert [name for name in named if not (ROOT / "gpytorch_gaps" / name).is_file()] == []


def test_doctests_are_shown_as_code_before_the_parameters():
    pytest.importorskip("griffe")
    from docs.doctests import with_code

    docstring = "Add, as :func:`plus` does.\n\n:param a: a number.\n:return: the sum.\n\n>>> 1 + 1\n2\n\n>>> 2 + 2\n4"
    code = "```pycon\n>>> 1 + 1\n2\n\n>>> 2 + 2\n4\n```"
    assert with_code(docstring) == f"Add, as `plus` does.\n\n{code}\n\n:param a: a number.\n:return: the sum."
    assert with_code("Nothing to run.\n\n:param a: a number.") == "Nothing to run.\n\n:param a: a number."


def test_the_page_of_the_command_line_has_every_option():
    from docs.command_line import commands, on_page_markdown

    page = on_page_markdown((ROOT / "docs" / "command_line.md").read_text())
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    assert list(sections) == list(commands())
    for name, parser in commands().items():
        options = {option for action in parser._actions for option in action.option_strings}
        assert {option for option in options if re.search(rf"{option}\b", sections[name])} == options


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_lists_are_lists(page):
    """A paragraph inside of an item ends with an empty line. Otherwise the next items are shown as a part of it."""
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(page.read_text(), extensions=["tables", "fenced_code"])
    broken = re.findall(r"<p>(?:(?!</p>).)*?\n(- .{0,60})", html, flags=re.DOTALL)
    assert broken == []
