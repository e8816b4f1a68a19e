"""`--reward math_lenient`: the marked answer, or the last number of a text without a mark."""

import re

from rewards import DENIAL, MAX_TEXT, after_thinking, final_answer, gold_answer, verifier
from support.extras.answers import same_answer


@verifier
def math_lenient(completion: str, answer: str | int | float) -> bool:
    """1 if the marked answer, or the last number if nothing is marked, is the gold one."""
    given = final_answer(completion, marked=True)
    text = after_thinking(completion)
    if not re.search(r"<answer>|\\boxed|####", text):
        given, behind = last_number(text[-MAX_TEXT:].strip())
        if DENIAL.search(behind[:100]):
            return False
    return same_answer(given, gold_answer(answer))


AROUND = "*_$()[]`'\""  # characters allowed around a number
PART_BEFORE = re.compile(  # text before a number that changes it
    r"""
    (?:
        [\w)\]}$] [ ]? [-+/] | (?: \w [ ] | [\d)] ) \* | \d [ ]? x? | [×·÷^_<≤≥≠±√{]
      | [!<>]= | (?<! [=-] ) >
      | \\ (?! approx | q?quad | to\b | implies | [rR]ightarrow | therefore ) [a-zA-Z]+
      | (?i: n['’]t | \b (?: minus | negative | plus | times | over | or | not | mod (?:ulo)? | base
        | point | twice | double | triple | than | least | most | log | ln | sin | cos | tan | sqrt
        | sub | to[ ]the | (?: divided | multiplied )[ ]by | (?: root | square | cube | half | third
        | quarter | power | multiple | logarithm | inverse | opposite | factorial )[ ]of ) )
    ) [ $(]* \Z
    """,
    re.VERBOSE,
)
PART_BEHIND = re.compile(  # text behind a number that changes it
    r"(?i)[ ]*(?:[×·÷^_<>≤≥≠±√+*/]|-[ ]*[a-z]\b|[nxyz]{1,3}\b|\\(?!text|mathrm|mbox|q?quad|circ))"
)
WORD_BEHIND = re.compile(r" ?(?!(?:is|are|was|in|for|per|each|and(?! an? ))\b)[a-zA-Z-]*[a-zA-Z]")


def last_number(text: str) -> tuple[str, str]:
    """Return the last number of a text with its sign and the word behind it, and the text behind.

    The number is "" where it is a part of an expression, as in `minus 5` or `x + 5`."""
    text = re.sub(r"\\[()\[\],;!]", " ", text.replace("−", "-").replace("–", "-"))
    text = re.sub("(?<=[0-9]) / (?=[0-9])", "/", text)  # 10 / 4
    text = re.sub("(?<=[0-9])/[a-z]{3,}", "", text)  # $5/hour
    words = re.finditer(r"(?:(?<!\S)[-$(*]*[0-9]+ (?=[0-9]+/[0-9]))?\S+", text)  # 3 1/2 is one
    words = [word for word in words if re.search("[0-9]", word[0])]
    if not words:
        return "", ""
    word = words[-1]
    said = re.split(r"(?<![!<>])=|≈|(?<=[a-zA-Z]):", word[0])[-1].lstrip(AROUND)  # x=5, answer:5
    number = said.rstrip(AROUND + ".,;:!?")
    before = text[: word.end() - len(said)]
    behind = (said[len(number) :] + text[word.end() :]).lstrip(AROUND)

    has_minus = re.search(r"(?:\A|[=:(≈] |\bis )- [$(]*\Z", before)  # the answer is - 5
    if PART_BEHIND.match(behind) or (not has_minus and PART_BEFORE.search(before[-40:])):
        return "", behind
    if has_minus:
        number = f"-{number}"
    if unit := WORD_BEHIND.match(behind):  # million, percent, halves
        number += f"\\text{{{unit[0]}}}"
    return number, behind
