"""A hook of mkdocs: writes the options of every command, read from the parser, into the page of the command line.

A line ``<!-- options of fill -->`` of the page is replaced by one table for each group of options of ``fill``.
"""

import argparse
import re

from gpytorch_gaps.cli.parser import make_parser

_MARKED = re.compile(r"^<!-- options of (\w+) -->$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace every mark of a page by the options of its command.

    :param markdown: the page.
    :return: the page with tables.
    """
    return _MARKED.sub(lambda found: options_of(commands()[found[1]]), markdown)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Find the commands of ``gpytorch-gaps``.

    :return: the parser of each command, by name.
    """
    (found,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


def options_of(parser: argparse.ArgumentParser) -> str:
    """Describe a command.

    :param parser: the parser of the command.
    :return: what it does, its usage and its options, in Markdown.
    """
    required = " ".join(_spelled(action).rpartition(", ")[2] for action in parser._actions if action.required)
    parts = [f"```\n{parser.prog} [options] {required}".rstrip() + "\n```", str(parser.description)]
    for group in parser._action_groups:
        rows = [f"| `{_spelled(action)}` | {action.help} |" for action in group._group_actions]
        if rows:
            parts.append("\n".join([f"| {group.title} | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _spelled(action: argparse.Action) -> str:
    """The option as it is typed, with its value."""
    value = ""
    if action.nargs != 0:
        value = action.metavar or (" | ".join(action.choices) if action.choices else action.dest.upper())
    return " ".join(part for part in (", ".join(action.option_strings), str(value)) if part)
