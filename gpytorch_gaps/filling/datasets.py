"""Filling of Datasets: variable by variable, or all variables on the same grid together."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, adapt
from gpytorch_gaps.filling.arrays.masks import ignoring
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.results.filled import Filled
from gpytorch_gaps.utils.conventions import holds_numbers

_OF_VARIABLES = ("transform", "bounds")  # further options that may be mappings by variable
_BESIDE = ("where", "noise", "mean", "untrusted")  # options that are arrays on the grid of the values
_MIN_OBSERVATIONS = 3  # for a variable that is filled with others: they determine its scale


def fill_dataset(dataset: Any, options: Options, fill: Callable[[ArrayAdapter, Options], Filled]) -> Filled:
    """Fills the variables of a Dataset with the function `fill`.

    :return: mean, standard deviation and gaps as Datasets, models and reports as dictionaries by variable.
    """
    groups = groups_of(dataset, options)
    found: dict[Hashable, Filled] = {}
    for group in groups:
        with group.named_errors():
            found |= group.split(fill(group.adapter(), group.options))
    names = [name for name in dataset.data_vars if name in found]
    stds = {name: found[name].std for name in names if found[name].std is not None}
    known = [name for name in names if found[name].distrusted is not None]
    return Filled(
        dataset.assign({name: found[name].mean for name in names}),
        dataset[list(stds)].assign(stds) if stds else None,
        dataset[names].assign({name: found[name].gaps for name in names}),
        {name: found[name].model for name in names},
        {name: found[name].report for name in names},
        dataset[known].assign({name: found[name].distrusted for name in known}) if known else None,
        {name: found[name]._fitted for name in names},
    )


def fit_dataset(
    dataset: Any, options: Options, fit: Callable[[ArrayAdapter, Options], FillModel]
) -> dict[Hashable, FillModel]:
    """The models that :func:`fill_dataset` would use, by variable."""
    models: dict[Hashable, FillModel] = {}
    for group in groups_of(dataset, options):
        with group.named_errors():
            models |= dict.fromkeys(group.variables, fit(group.adapter(), group.options))
    return models


@dataclass(frozen=True, eq=False)
class Group:
    """Variables of a Dataset, by name, that are filled together, or a single variable."""

    variables: Mapping[Hashable, Any]
    options: Options
    dataset: Any

    def adapter(self) -> ArrayAdapter:
        first, *others = self.variables.values()
        if others:
            return VariablesAdapter(self.variables, self.dataset)
        return adapt(first, dataset=self.dataset)

    def split(self, result: Filled) -> dict[Hashable, Filled]:
        """The result of each variable."""
        names = list(self.variables)
        if len(names) > 1:
            stds = dict.fromkeys(names) if result.std is None else result.std
            fitted = [result._fitted and replace(result._fitted, variable=number) for number in range(len(names))]
            wild = dict.fromkeys(names) if result.distrusted is None else result.distrusted
            return {
                name: Filled(result.mean[name], stds[name], result.gaps[name], result.model, report, wild[name], own)
                for (name, report), own in zip(result.report.items(), fitted, strict=True)
            }
        if self.options.joint:
            note = "filled separately: no other variable could be filled with it"
            result = replace(result, report=replace(result.report, notes=(*result.report.notes, note)))
        return {names[0]: result}

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Adds the names of the variables to errors."""
        try:
            yield
        except ValueError as error:
            names = ", ".join(map(repr, self.variables))
            raise ValueError(f"variable{'s' * (len(self.variables) > 1)} {names}: {error}") from error


def groups_of(dataset: Any, options: Options) -> list[Group]:
    """The numeric variables in groups. With `joint`, variables with the same dimensions are in one group.

    Variables with the same dimensions, in any order, have the same coordinates, those of the Dataset. A variable
    without gaps is useful for the others. A variable without variation is not.
    """
    beside = {key: getattr(options, key) for key in _BESIDE if getattr(options, key) is not None}
    named = [name for given in beside.values() for name in _names(given)]
    numeric = [name for name, held in dataset.data_vars.items() if holds_numbers(held) and name not in named]
    if not numeric:
        raise ValueError(f"values: got a Dataset with {list(dataset.data_vars)}, expected a variable of numbers")
    for key, given in beside.items():
        unknown = [name for name in given if name not in dataset.data_vars] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(f"{key}: got the variable {unknown[0]!r}, expected one of {list(map(str, numeric))}")
    own = {key: {name: _of_variable(dataset, name, given, key) for name in numeric} for key, given in beside.items()}
    if len(numeric) > 1 and "noise" in own and not isinstance(options.noise, Mapping):
        raise ValueError(
            f"noise: got one for all of {', '.join(map(str, numeric))}, which have different units; expected a mapping "
            "from names of variables"
        )
    for name, flags in own.pop("untrusted", {}).items():
        dataset = dataset if flags is None else dataset.assign({name: ignoring(dataset[name], flags)})
    for key in _OF_VARIABLES:
        given = getattr(options, key)
        unknown = [name for name in given if name not in numeric] if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(f"{key}: got the variable {unknown[0]!r}, expected one of {list(map(str, numeric))}")
        if given is not None:
            own[key] = {name: given.get(name) if isinstance(given, Mapping) else given for name in numeric}
    options = replace(options, untrusted=None)
    by_grid: dict[Hashable, list[Hashable]] = {}
    for name in numeric:
        by_grid.setdefault(_grid(dataset[name]) if options.joint else name, []).append(name)
    groups = []
    for names in by_grid.values():
        if len(names) > 1 and (options.smooth or any(bool(dataset[name].isnull().any()) for name in names)):
            by_axis = {key: _of_variables(getattr(options, key)) for key in ("kernels", "periods", "max_gap")}
            together: Any = own | by_axis
            groups.append(Group({name: dataset[name] for name in names}, replace(options, **together), dataset))
        else:
            for name in names:
                alone = {key: by_name[name] for key, by_name in own.items()}
                groups.append(Group({name: dataset[name]}, replace(options, **alone), dataset))
    return groups


def _grid(variable: Any) -> Hashable:
    """A key that is equal for variables that can be filled together."""
    is_informative = int(variable.count()) >= _MIN_OBSERVATIONS and float(variable.std()) > 0
    return frozenset(variable.dims) if is_informative else variable.name


def _names(given: Any) -> list[str]:
    """The names of variables in an option: a single name, a list, or a mapping by variable."""
    if isinstance(given, str):
        return [given]
    entries = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else []
    return [name for one in entries for name in _names(one)]


def _of_variable(dataset: Any, name: Hashable, given: Any, argument: str) -> Any:
    """An option for one variable: its entry in a mapping, or the option for all. Names are replaced by variables."""
    return _resolved(dataset, given.get(name) if isinstance(given, Mapping) else given, argument)


def _resolved(dataset: Any, given: Any, argument: str) -> Any:
    """The option, with variables of the Dataset in place of their names."""
    if isinstance(given, list | tuple):
        return [_resolved(dataset, one, argument) for one in given]
    if isinstance(given, dict):
        return {key: _resolved(dataset, one, argument) for key, one in given.items()}
    if not isinstance(given, str):
        return given
    if given not in dataset:
        raise ValueError(f"{argument}: got {given!r}, expected one of {list(map(str, dataset.variables))}")
    return dataset[given]


def _of_variables(given: Any) -> Any:
    """Kernels or periods for the axes of a variable, changed for an array with an axis of variables in front."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return {key + 1 if isinstance(key, int) and key >= 0 else key: one for key, one in given.items()}
    return [None, *(given if isinstance(given, Sequence) else [given])]
