"""Match every regular expression of a file against long repetitions of its own pieces.

    python tests/patterns.py rewards.py      # prints each expression before it is tried

A sample of the expression is made in which one repeated part is pumped up to LENGTH characters.
Exponential backtracking never ends on such texts. Quadratic backtracking takes milliseconds."""

import ast
import importlib
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 2_000  # characters of a pumped text
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
CATEGORIES = {"CATEGORY_DIGIT": "70", "CATEGORY_SPACE": "  \n", "CATEGORY_WORD": "aB7_x"}


def expressions(path: str) -> dict[tuple[int, int], re.Pattern]:
    """(line, column) -> expression, of each call `re.search("...", ...)`, `re.compile("...")`, ...

    A local name inside an f-string becomes the word "name". Line 0 has those of REWRITES."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    calls = ast.walk(ast.parse(Path(ROOT, path).read_text()))
    found = {}
    for node in (node for node in calls if isinstance(node, ast.Call)):
        if re.fullmatch(r"re\.(?!escape)\w+", ast.unparse(node.func)):
            text = node.args[0]
            local = {each.id: "name" for each in ast.walk(text) if isinstance(each, ast.Name)}
            names = re.findall(r"\bre\.([A-Z]+)\b", ast.unparse(node))
            text = eval(ast.unparse(text), local | vars(module))
            flags = sum(getattr(re, name) for name in names)
            found[node.lineno, node.col_offset] = re.compile(text, flags)
    rows = enumerate(getattr(module, "REWRITES", []))
    return found | {(0, place): re.compile(pattern) for place, (pattern, _) in rows}


def walk(nodes):
    """Yield (operation, argument) of every node of a parsed expression, at any depth."""
    for operation, argument in nodes:
        yield str(operation), argument
        for part in parts(argument):
            yield from walk(part)


def parts(argument) -> list:
    """Return the parsed expressions directly inside an argument of one."""
    if isinstance(argument, re._parser.SubPattern):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [part for each in argument for part in parts(each)]
    return []


def sample(nodes, rng: random.Random, pumped=None, length: int = LENGTH) -> str:
    """A text that an expression mostly matches, in which one repeated part is pumped."""
    text = ""
    for operation, argument in nodes:
        match str(operation):
            case "LITERAL":
                text += chr(argument)
            case "ANY" | "NOT_LITERAL":
                text += rng.choice("a (")
            case "IN":
                text += member(argument, rng)
            case "BRANCH":
                holding = [each for each in argument[1] if holds(each, pumped)]
                text += sample(rng.choice(holding or argument[1]), rng, pumped, length)
            case "SUBPATTERN" | "ATOMIC_GROUP":
                text += sample(parts(argument)[0], rng, pumped, length)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                low, high, body = argument
                if body is pumped:
                    piece = sample(body, rng) or "a"
                    text += piece * (length // len(piece))
                else:
                    times = max(rng.randint(low, min(high, low + 2)), holds(body, pumped))
                    text += "".join(sample(body, rng, pumped, length) for _ in range(times))
    return text


def holds(nodes, pumped) -> bool:
    """Return whether a parsed expression holds the part that is pumped."""
    return nodes is pumped or any(pumped in parts(argument) for _, argument in walk(nodes))


def member(choices: list, rng: random.Random) -> str:
    """A character of a class. Of a negated class, one that is seldom excluded."""
    if str(choices[0][0]) == "NEGATE":
        return rng.choice("a (-")
    operation, argument = rng.choice(choices)
    if str(operation) == "LITERAL":
        return chr(argument)
    if str(operation) == "RANGE":
        return chr(rng.randint(*argument))
    return rng.choice(CATEGORIES.get(str(argument), "-("))


def texts(pattern: re.Pattern, samples: int = 4, length: int = LENGTH) -> list[str]:
    """Texts that pump each repeated part, with an end that fits and with one that does not."""
    rng, found = random.Random(0), []
    nodes = re._parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    repeated = [argument for operation, argument in walk(nodes) if operation in REPEATS]
    for body in [body for _, high, body in repeated if high > 9]:  # no bound, or a high one
        for _ in range(samples):
            text = sample(nodes, rng, body, length)
            found += [text, text + "\0", text[: length // 2] + "\0" + text[length // 2 :]]
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for (line, _), pattern in expressions(sys.argv[1]).items():
        print(f"line {line}: {pattern.pattern[:80]!r}", flush=True)
        for text in texts(pattern):
            pattern.fullmatch(text)
            pattern.search(text)
