"""A hook of mkdocs: typesets LaTeX as MathML when the site is built, so that reading it fetches no script.

`pymdownx.arithmatex` marks what stands between dollars in pages and docstrings; every current browser draws MathML.
"""

import html
import re

from latex2mathml.converter import convert

_MARKED = re.compile(
    r'<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>|<div class="arithmatex">\\\[(?P<block>.*?)\\\]</div>',
    flags=re.DOTALL,
)


def on_page_content(content: str, **_: object) -> str:
    """Replace every marked formula of a page by MathML.

    :param content: the HTML of the page.
    :return: the HTML with ``<math>`` elements.
    """
    return _MARKED.sub(_to_mathml, content)


def _to_mathml(found: re.Match[str]) -> str:
    inline, block = found["inline"], found["block"]
    latex = html.unescape(block if inline is None else inline).strip()
    return convert(latex, display="inline" if inline is not None else "block")
