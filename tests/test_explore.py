"""docs/explore.html: its reference cases are those of gspo.py, and its script agrees with them.

After a change: python tests/test_explore.py
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import gspo  # noqa: E402

PAGE = ROOT / "docs/explore.html"
CASES = re.compile(r'(?<=id="cases">\n).*?(?=\n</script>)', re.DOTALL)
GIVEN = (  # the page's first view; a long answer and A < 0; GSPO with GRPO's band
    dict(seed=4, length=24, spread=0.125, advantage=1, grpo=0.2, gspo=4e-4),
    dict(seed=2, length=300, spread=0.1, advantage=-1, grpo=0.2, gspo=3e-4),
    dict(seed=12, length=8, spread=0.4, advantage=1, grpo=0.2, gspo=0.2),
)


def log_ratios(seed: int, length: int, spread: float) -> list[float]:
    """The page's random numbers, bit by bit: a linear congruential generator."""
    x, found = seed * 2654435761 % 2**32, []
    for _ in range(length):
        z = -6.0
        for _ in range(12):
            x = (1664525 * x + 1013904223) % 2**32
            z += x / 2**32
        found.append(spread * z * z * z / 3.68)
    return found


def case(given: dict) -> dict:
    """s, the tokens without a gradient under GRPO, and whether the answer has none under GSPO."""
    ratios = log_ratios(given["seed"], given["length"], given["spread"])
    logs = torch.tensor([ratios], dtype=torch.float64)
    batch = torch.zeros_like(logs), torch.tensor([float(given["advantage"])]), logs == logs
    gradients = []
    for name in ("grpo", "gspo"):
        logprobs = logs.clone().requires_grad_()
        bounds = dict.fromkeys(("clip_low", "clip_high"), given[name])
        value, metrics = getattr(gspo, f"{name}_loss")(logprobs, *batch, **bounds)
        value.backward()
        gradients.append(logprobs.grad[0])
    return {
        "given": given,
        "s": round(metrics["ratio_mean"].item(), 12),
        "tokens": (gradients[0] == 0).nonzero()[:, 0].tolist(),
        "answer": bool((gradients[1] == 0).all()),
    }


def table() -> str:
    return "[" + ",\n".join(json.dumps(case(given)) for given in GIVEN) + "]"


def test_cases_of_the_page_are_those_of_gspo():
    page = PAGE.read_text(encoding="utf-8")
    assert CASES.search(page)[0] == table(), "python tests/test_explore.py"
    cases = json.loads(table())
    assert {each["answer"] for each in cases} == {True, False}
    assert all(0 < len(each["tokens"]) < each["given"]["length"] for each in cases)
    assert "http://" not in page and "https://" not in page and page.count("\n") < 120


@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which no test requires")
def test_script_of_the_page_agrees():
    """Only the part up to `draw`, with a document that has the cases and the banner."""
    page = PAGE.read_text(encoding="utf-8")
    script = page.split("<script>\n")[1].split("function draw")[0]
    document = "const nodes = {cases: {textContent: CASES}, mismatch: {hidden: true}}\n"
    document += "const document = {getElementById: id => nodes[id]}\n"
    for cases, agrees in ((table(), "true"), (table().replace('"s": 1.', '"s": 2.'), "false")):
        source = document.replace("CASES", json.dumps(cases)) + script
        source += "console.log(nodes.mismatch.hidden)"
        done = subprocess.run(["node", "-e", source], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == agrees


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(CASES.sub(lambda _: table(), page), encoding="utf-8")
