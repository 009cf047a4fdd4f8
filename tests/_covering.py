"""Parameters of a test in combinations that cover every pair of values, instead of the full product.

A covering array runs far fewer cases than the product and still has every two values meet; where three or more must
meet, a test that draws its cases (hypothesis) covers them.

>>> @covering(shape=["line", "plane"], dtype=["single", "double"], batch=[0, 1])
... def test_something(shape, dtype, batch): ...
>>> len(test_something.pytestmark[0].args[1])
4
"""

from itertools import combinations, product

import pytest


def covering(**values):
    """A ``pytest.mark.parametrize`` over the named values in which every pair of values of two names occurs.

    Names and values keep their order, so the cases are the same in every run and on every worker.
    """
    lists = [list(found) for found in values.values()]
    rows = covering_rows([len(found) for found in lists])
    cases = [tuple(found[k] for found, k in zip(lists, row, strict=True)) for row in rows]
    return pytest.mark.parametrize(tuple(values), cases)


def covering_rows(sizes):
    """Indices into lists of these sizes; every two columns contain all pairs of their indices.

    Greedy: the next row is the combination with the most pairs that no row has yet, the first one of several.

    >>> covering_rows([2, 2, 2])
    [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    candidates = list(product(*map(range, sizes)))
    columns = list(combinations(range(len(sizes)), 2)) or [(0,)]

    def pairs(row):
        return {(at, tuple(row[i] for i in at)) for at in columns}

    missing, rows = set().union(*map(pairs, candidates)), []
    while missing:
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows


def in_turn(**values):
    """A ``pytest.mark.parametrize`` with as many cases as the longest list; shorter ones are repeated in turn."""
    lists = [list(found) for found in values.values()]
    cases = [tuple(found[k % len(found)] for found in lists) for k in range(max(map(len, lists)))]
    return pytest.mark.parametrize(tuple(values), cases)
