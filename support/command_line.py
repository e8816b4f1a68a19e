"""Turn a dataclass into a command line. Its fields are the flags, with their ranges and help.

A wrong value fails with one sentence that names the flag, before anything else loads."""

import argparse
import dataclasses
import re
import types
import typing

from support.errors import UserError, dashed, did_you_mean, need


def flag(default, help: str, **rules):
    """Return a dataclass field that is a flag. A default of None depends on other flags.

    heading starts a section of --help. low and high are inclusive bounds, above is an exclusive
    lower bound. choices lists the allowed values. needs names a flag without which this one has no
    effect."""
    return dataclasses.field(default=default, metadata=rules | {"help": help})


def number(help: str, **rules):
    """A flag for a number in the objective; None means the algorithm's default."""
    return flag(None, help, is_number=True, **rules)


def parse(kind: type, description: str, arguments: list[str], *, defaults=None, helps=None):
    """Parse a command line into a dataclass. defaults {name: value} override its own, and helps
    {name: text} extend the help."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser._negative_number_matcher = re.compile("-[0-9.]")  # --reward -1*math is a value
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
    if value is None and type(None) in kinds_of(field):
        return
    kind = typing.get_origin(kinds_of(field)[0]) or kinds_of(field)[0]
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
