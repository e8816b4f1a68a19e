"""Build a command line from a dataclass, whose fields are the flags with their ranges and help.

A wrong value fails with one sentence that names the flag, before any model is loaded."""

import argparse
import dataclasses
import re
import types
import typing

from support.errors import UserError, dashed, did_you_mean, need


def flag(default, help: str, **rules):
    """Return a dataclass field that is a flag. A default of None is off, required, or derived.

    `heading` starts a section of --help. `low` and `high` are inclusive bounds, `above` is an
    exclusive lower bound. `choices` lists the allowed values. `needs` names another flag, without
    which this one has no effect."""
    return dataclasses.field(default=default, metadata=rules | {"help": help})


def number(help: str, **rules):
    """Return the flag of a hyperparameter of the objective. None means the algorithm's default."""
    return flag(None, help, is_number=True, **rules)


def parse(kind: type, description: str, arguments: list[str], *, defaults=None, helps=None):
    """Parse a command line into the dataclass `kind`. `defaults` (name -> value) override those of
    its fields, and `helps` (name -> text) are appended to their help."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser._negative_number_matcher = re.compile("-[0-9.]")  # -1*math can be a value of --reward
    fields = dataclasses.fields(kind)
    group = parser
    for field in fields:
        if field.metadata.get("heading"):
            group = parser.add_argument_group(field.metadata["heading"])
        text = field.metadata["help"]
        if field.default is not None:
            text += f", default: {field.default}"
        options = {"help": text + (helps or {}).get(field.name, "")}
        value_type = kinds_of(field)[0]
        if value_type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif value_type == list[str]:
            options |= {"action": "append", "metavar": "STR"}
        elif "choices" in field.metadata:
            options["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
        else:
            options |= {"type": value_type, "metavar": value_type.__name__.upper()}
        group.add_argument(dashed(field.name), **options)
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from error
    if unknown:
        wrong = [word for word in unknown if word.startswith("--")] or unknown
        name = wrong[0].partition("=")[0]
        hint = did_you_mean(name, [dashed(field.name) for field in fields])
        raise UserError(f"{', '.join(wrong)}: no such flag{hint}")
    flags = kind(**(defaults or {}) | vars(given))
    for field in fields:
        check(field, getattr(flags, field.name))
    return flags


def kinds_of(field: dataclasses.Field) -> tuple[type, ...]:
    """Return the types of a field: (float, NoneType) for `float | None`."""
    if isinstance(field.type, types.UnionType):
        return typing.get_args(field.type)
    return (field.type,)


def check(field: dataclasses.Field, value) -> None:
    """Raise UserError for a wrong value, which may also come from the config.json of a run."""
    rules, wrong = field.metadata, f"{dashed(field.name)} {value}"
    kind, *others = kinds_of(field)
    if value is None and others:  # float | None
        return
    kind = typing.get_origin(kind) or kind  # list[str] -> list
    fits = type(value) is kind or (type(value) is int and kind is float)  # JSON has 1 for 1.0
    need(fits, f"{wrong}: expected {kind.__name__}")
    if isinstance(value, list):
        texts = all(isinstance(each, str) and each for each in value)
        need(texts, f"{wrong}: expected non-empty strings")
    if "choices" in rules:
        known = ", ".join(rules["choices"]) + did_you_mean(value, rules["choices"])
        need(value in rules["choices"], f"{wrong}: expected one of {known}")
    if "low" in rules:
        need(value >= rules["low"], f"{wrong}: expected at least {rules['low']}")
    if "above" in rules:
        need(value > rules["above"], f"{wrong}: expected a number above {rules['above']}")
    if "high" in rules:
        need(value <= rules["high"], f"{wrong}: expected at most {rules['high']}")
