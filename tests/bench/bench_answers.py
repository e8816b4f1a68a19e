"""Search for slow comparisons of answers, of made texts and of a random grammar. It takes a minute.

python tests/bench/bench_answers.py
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.extras.answers import same_answer  # noqa: E402

MAX_TEXT = 10_000  # characters of an answer: rewards.py takes no longer one
SIZES = (10, 15, 20, 25, 30, 40, 50, 60, 75, 100, 150, 290, 9_990)


def joined(sign: str, item: str, low: int = 2) -> Callable[[int], str]:
    """Return n -> a text of n items. The # in an item becomes its number."""
    return lambda n: sign.join(item.replace("#", str(low + i)) for i in range(n))


def nested(opening: str, inside: str, closing: str = "") -> Callable[[int], str]:
    return lambda n: opening * n + inside + closing * n


HOSTILE = {  # name -> a text of about n pieces that might take long to read or to compute
    "sum of roots": joined("+", "√#"),
    "higher roots": joined("+", "\\sqrt[#]{x+#}"),
    "rational powers": joined("+", "(x+#)^{1/#}"),
    "unknown powers": joined("+", "x^{y+#}"),
    "powers of numbers": joined("+", "3^{9#}"),
    "large fractions": joined("+", "7^{29#}/9^{29#}", 10),
    "complex arcs": joined("", "\\arccos #i"),
    "nested roots": nested("√", "x"),
    "tower": joined("^", "e"),
    "factorials": joined("+", "2#!"),
    "binomials": joined("+", "\\binom{x}{#}"),
    "large binomials": joined("+", "\\binom{29#}{1400}", 10),
    "sines": joined("+", "\\sin #x"),
    "nested sines": nested("\\sin(", "x", ")"),
    "logarithms": joined("+", "\\ln(x+#i)"),
    "logarithms to a base": joined("+", "\\log_# x"),
    "arcs": joined("+", "\\arcsin #"),
    "calls": joined("+", "f(x+#)"),
    "nested calls": nested("f(", "x", ")"),
    "list of roots": joined(",", "√√√√√√(x+#i)"),
    "sets of sets": joined(",", "\\{\\{x,y\\},\\{#,z\\}\\}"),
    "set of equations": lambda n: "\\{" + joined(",", "x=#y")(n) + "\\}",
    "list of names": joined(",", "x=#"),
    "chain of equations": joined("=", "√#"),
    "union": joined("∪", "(#,x)"),
    "signs": joined("±", "1"),
    "list of signs": joined(",", "±#"),
    "matrix": lambda n: "\\begin{pmatrix}" + joined("\\\\", "√x&√y&√#")(n) + "\\end{pmatrix}",
    "brackets": nested("(", "x", ")"),
    "bars": nested("|", "x", "|"),
    "units": nested("", "5", " m"),
}


def variants(text: str) -> Iterator[str]:
    """Texts to compare it with."""
    yield "x"
    yield "1, 2, 3"
    yield text + " "
    yield text[1:] + text[:1]
    yield text.replace("x", "y")
    yield text.replace("x", "(x+0)")
    yield text.replace("1", "2", 1)
    yield "m=" + text
    for sign in ",+":
        yield sign.join(text.split(sign)[::-1])


def slowest() -> None:
    """Milliseconds of processor time of the slowest comparison of each kind."""
    calls, found = 0, {}
    for name, make in HOSTILE.items():
        for size in SIZES:
            text = make(size)[:MAX_TEXT]
            for other in dict.fromkeys(variants(text)):
                for pair in ((text, other), (other, text)):
                    start = time.process_time()
                    same_answer(*pair)
                    calls += 1
                    took = 1000 * (time.process_time() - start)
                    found[name] = max(found.get(name, (0, 0)), (took, len(text)))
    print(f"{calls} calls; slowest of each kind, milliseconds and characters")
    for name, (took, length) in sorted(found.items(), key=lambda item: -item[1][0])[:20]:
        print(f"{took:8.1f} {length:6d}  {name}")


ATOMS = r"""
    1 2 7 i x y n e \pi 0.5 \frac13 -1 1/3 10^9 10^{40} 10^{-30} 99^{99} 10^9i x+10^9i
"""
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh ln log exp"
ONE = r"\sqrt{A} \sqrt[3]{A} \sqrt[n]{A} |A| (A)!"
TWO = r"(A+B) (A-B) (A)(B) \frac{A}{B} (A)^{B} (A)^{B} \binom{A}{B} \log_{A}(B) (A,B) A=B \{A,B\}"


def expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.12:
        return rng.choice(ATOMS.split())
    functions = [rf"\{name}(A)" for name in FUNCTIONS.split()]
    rule = rng.choice(rng.choice((functions, ONE.split(), TWO.split())))
    left, right = expression(rng, depth - 1), expression(rng, depth - 1)
    return "".join({"A": left, "B": right}.get(sign, sign) for sign in rule)


def slowest_of_grammar(count: int = 20_000, seed: int = 0) -> None:
    """Seconds of processor time of the slowest comparisons of random expressions."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        text = expression(rng, rng.randint(2, 5))
        other = rng.choice((f"{text}+0", f"({text})\\cdot 1", expression(rng, 2)))
        start = time.process_time()
        same_answer(text, other)
        found.append((time.process_time() - start, text[:90]))
    print(f"{count} random expressions; the slowest, milliseconds")
    for took, text in sorted(found, reverse=True)[:5]:
        print(f"{1000 * took:8.1f}  {text}")


if __name__ == "__main__":
    slowest()
    slowest_of_grammar()
