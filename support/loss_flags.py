"""An objective's hyperparameters are keyword-only parameters in gspo.py, and flags.

Defaults are written only in signatures, such as `def gspo_loss(..., *, clip_low=3e-4)`. If
--clip-low isn't given, `fill_numbers` fills in the default. `bind` passes values to the losses."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import gspo
from support.errors import UserError, dashed


def functions_of(algorithm: gspo.Algorithm) -> dict[str, Callable]:
    """Return the functions in a row of ALGOS by the names of their fields."""
    names = ("loss", "advantages", "value_loss")
    return {name: getattr(algorithm, name) for name in names if getattr(algorithm, name)}


def keywords_of(function: Callable) -> dict:
    """Return keyword-only parameters and their defaults, except `per`, which a partial may set."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    return {each.name: each.default for each in keywords if each.name != "per"}


def numbers_of(algorithm: gspo.Algorithm) -> dict:
    """Return the numbers of an algorithm, its keyword-only parameters that have a default."""
    numbers = {}
    for function in functions_of(algorithm).values():
        for name, default in keywords_of(function).items():
            if default is not inspect.Parameter.empty and name not in algorithm.loss_reads:
                same = numbers.setdefault(name, default) == default
                assert same, f"gspo.py: {name}: expected one default per algorithm"
    return numbers


def defaults_of_numbers() -> dict[str, str]:
    """Return a help text for each number: which algorithms use it, and their defaults."""
    found = {}  # name -> default -> algorithms
    for algo, algorithm in gspo.ALGOS.items():
        for name, default in numbers_of(algorithm).items():
            found.setdefault(name, {}).setdefault(default, []).append(algo)
    helps = {}
    for name, by_default in found.items():
        listed = [f"{', '.join(algos)} {default}" for default, algos in by_default.items()]
        helps[name] = f", default: {'; '.join(listed)}"
    return helps


def fill_numbers(config) -> None:
    """Fill in the algorithm's defaults. Raises UserError for a number that it doesn't use."""
    numbers = numbers_of(gspo.ALGOS[config.algo])
    flags = {field.name for field in dataclasses.fields(config) if field.metadata.get("is_number")}
    missing = ", ".join(numbers.keys() - flags)  # a fork's number may take another flag's name
    assert not missing, f"{config.algo}: {missing} has no flag made by `number` in train.py"
    for name in sorted(flags):
        value = getattr(config, name)
        if name in numbers:
            setattr(config, name, numbers[name] if value is None else value)
        elif value is not None:
            users = [algo for algo, row in gspo.ALGOS.items() if name in numbers_of(row)]
            unused = f"{dashed(name)} {value}: {config.algo} doesn't use it"
            raise UserError(f"{unused}; it is for {', '.join(users) or 'no algorithm'}")


def bind(config) -> gspo.Algorithm:
    """Return the row of --algo, its functions bound to their numbers and to `per`."""
    algorithm = gspo.ALGOS[config.algo]
    bound = {}
    for field, function in functions_of(algorithm).items():
        names = keywords_of(function).keys() - {*algorithm.loss_reads}
        options = {name: getattr(config, name) for name in names}
        if "per" in inspect.signature(function).parameters:
            options["per"] = algorithm.per
        bound[field] = functools.partial(function, **options)
    return dataclasses.replace(algorithm, **bound)
