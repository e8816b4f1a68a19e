"""docs/from-ppo-to-gspo.md: what it shows of gspo.py is what stands there.

After a change of a loss: python tests/test_lesson.py
"""

import ast
import difflib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import gspo  # noqa: E402

PAGE = ROOT / "docs/from-ppo-to-gspo.md"
# a line that no reader sees, and the block behind it
DIFF = re.compile(r"<!-- diff (\w+) (\w+) -->\n```diff\n.*?```\n", re.DOTALL)


def lines_of(name: str) -> list[str]:
    """The source of a loss without its docstring and without what all losses take."""
    source = inspect.getsource(getattr(gspo, name))
    function = ast.parse(source).body[0]
    given = function.args
    optional = given.args[-len(given.defaults) :] + given.kwonlyargs
    own = [
        f"{argument.arg}={ast.get_source_segment(source, default)}"
        for argument, default in zip(optional, given.defaults + given.kw_defaults)
    ]
    own[0] = "..."  # denom, and the four before it
    return [f"def {name}({', '.join(own)}):", *source.splitlines()[function.body[1].lineno - 1 :]]


def shown(old: str, new: str) -> str:
    """The comment and the block: both functions whole, - of the old one, + of the new one."""
    before, after = lines_of(old), lines_of(new)
    changes = [*difflib.unified_diff(before, after, lineterm="", n=len(before))][3:]
    return f"<!-- diff {old} {new} -->\n```diff\n" + "\n".join(changes) + "\n```\n"


def with_diffs(text: str) -> str:
    return DIFF.sub(lambda found: shown(found[1], found[2]), text)


def test_diffs_of_the_lesson_are_those_of_gspo():
    text = PAGE.read_text(encoding="utf-8")
    assert len(DIFF.findall(text)) == text.count("```diff") > 3
    assert text == with_diffs(text), "a loss has changed: python tests/test_lesson.py"


if __name__ == "__main__":
    PAGE.write_text(with_diffs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
