"""A hook of mkdocs: shows every notebook, with the outputs that it was saved with, as a page of the site.

In the repository, links lead to ``../notebooks/NAME.ipynb``; on the site, to ``notebooks/NAME.md``.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
_LINK = re.compile(r"\]\((?:\.\./)?(?P<folder>notebooks/)?(?P<name>\w+)\.ipynb\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``notebooks/NAME.md`` and its pictures for each ``NAME.ipynb``.

    :param files: the pages and pictures of the site.
    :param config: the configuration of the site.
    :return: the same, with the notebooks.
    """
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        pictures = f"{notebook.stem}_files"
        text, resources = MarkdownExporter().from_filename(
            str(notebook), resources={"output_files_dir": pictures, "unique_key": notebook.stem}
        )
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to notebooks lead to their pages.

    :param markdown: a page.
    :return: the page with these links.
    """
    return _LINK.sub(r"](\g<folder>\g<name>.md)", markdown)
