"""Draws the floors of the package from the contract in pyproject.toml: ``python -m docs.floors``.

What each folder is for is read from the table in architecture.md, so that the drawing, the contract and the page agree.
"""

import re
import tomllib
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "images" / "floors.svg"
WIDTH, HEIGHT, SPACE = 860, 34, 8  # of the drawing, of a floor, between floors, in pixels
CORE, OTHER = "#dce9f5", "#f1f1f1"


def contracts() -> tuple[list[list[str]], set[str]]:
    """Read the contracts of import-linter.

    :return: the modules of each floor, from the top; and the modules that import neither settings nor GPyTorch.
    """
    configured = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one for one in configured if one["type"] == "layers")["layers"]
    core = next(one for one in configured if one["type"] == "forbidden")["source_modules"]
    return [re.split(r" [|:] ", layer) for layer in layers], {name.rsplit(".", 1)[-1] for name in core}


def roles() -> dict[str, str]:
    """Read the table of floors in architecture.md.

    :return: what each module or folder is for, from the top floor to the lowest.
    """
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (HERE / "architecture.md").read_text(), flags=re.MULTILINE)
    return {name: role.strip().replace("`", "") for name, role in rows}


def drawing() -> str:
    """Draw one row of boxes a floor.

    :return: an SVG image.
    """
    floors, core = contracts()
    known = roles()
    height = len(floors) * (HEIGHT + SPACE) + SPACE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="The floors of the package; imports go down only">'
    ]
    for row, names in enumerate(floors):
        width = (WIDTH - SPACE * (len(names) + 1)) / len(names)
        for column, name in enumerate(names):
            x, y = SPACE + column * (width + SPACE), SPACE + row * (HEIGHT + SPACE)
            text = f'<tspan font-weight="bold">{name}</tspan>'
            if len(names) == 1:
                text += f' <tspan fill="#555" dx="8">{escape(known[name].replace("`", ""))}</tspan>'
            parts += [
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="4" stroke="#888" '
                f'fill="{CORE if name in core else OTHER}"/>',
                f'<text x="{x + 12:g}" y="{y + 22}" fill="#111">{text}</text>',
            ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawing())
