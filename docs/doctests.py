"""An extension of griffe: shows the doctests of a docstring as code, before its parameters.

The parser of Sphinx fields reads everything after the first field as part of one; Markdown reads ``>>>`` as a quote.
"""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>> )|\Z)", flags=re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|attr|mod):`~?([^`]+)`")
_FIELD = re.compile(r"^:\w+", flags=re.MULTILINE)


def with_code(docstring: str) -> str:
    """Move the doctests of a docstring in front of its fields, as one block of code; show Sphinx roles as names.

    :param docstring: a docstring without indentation.
    :return: the docstring in Markdown.
    """
    docstring = _ROLE.sub(r"`\1`", docstring)
    examples = _EXAMPLE.findall(docstring)
    if not examples:
        return docstring
    rest = _EXAMPLE.sub("", docstring).rstrip()
    field = _FIELD.search(rest)
    text, fields = (rest, "") if field is None else (rest[: field.start()].rstrip(), rest[field.start() :])
    code = "\n\n".join(example.rstrip() for example in examples)
    return f"{text}\n\n```pycon\n{code}\n```\n\n{fields}".rstrip()


class Doctests(Extension):
    """Rewrites every docstring that griffe loads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_code(obj.docstring.value)
