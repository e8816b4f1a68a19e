"""Time our train.py beside TRL's GRPOTrainer on a CPU. Same policy, data, rewards, settings.

TRL lives in an environment of its own, whose Python is an argument:

    python3 -m venv TRL && TRL/bin/pip install trl
    python tests/bench/bench_peers.py --trl-python TRL/bin/python --steps 36 --turns 5
    python tests/bench/bench_peers.py --trl-python TRL/bin/python --model FOLDER --data sums.jsonl \
        --reward math_lenient --prompts-per-step 16 --max-new-tokens 12 --lr 1e-5 --steps 4 \
        --turns 1

All train with GSPO: ratios of completions, the same band, the mean over completions, no KL. AdamW
has no decay and a constant learning rate, in float32, with as many updates a rollout. TRL is set as
a careful user would: one rollout for all of its updates, no gradient checkpointing, no bf16, no
logging. trl-defaults sets of the objective importance_sampling_level="sequence" alone, and has one
update a rollout. trl-wide is that with as many updates as the others.

Contestants take turns, and who goes first changes. Each prints a line after a step: time is
taken when the line arrives, and starts when the model is loaded. The built-in policy, trained,
answers the same held-out problems greedily, sampled by our train.py."""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rewards  # noqa: E402
from support.data import messages_of  # noqa: E402

PEERS = {  # contestant -> its name in the table
    "ours": "ours",
    "trl": "TRL",
    "trl-defaults": "TRL, its defaults",
    "trl-wide": "TRL, its band and mean",
}
PHASES = ("sample", "score", "freeze")  # the rest of a step is the updates
BEGINS = "training begins"  # TRL's worker prints it when its model is loaded
LEVEL = 0.8  # mean reward of three steps in a row, whose first time is shown
BATCH = {"group_size": 8, "updates": 4, "clip_low": 3e-4, "clip_high": 4e-4}


# ---- inputs of all contestants -------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", required=True, help="of an environment with TRL")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["ours", "trl"])
    parser.add_argument("--model", default="tiny", help="tiny, or a folder of a model")
    parser.add_argument("--data", help="JSONL with prompt and answer, for a folder")
    parser.add_argument("--reward", default="math", help="as in train.py, for a folder")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="for a folder")
    parser.add_argument("--lr", type=float, default=1e-6, help="for a folder")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40, help="rollouts of a run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSONL that every run is appended to")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, folder: Path) -> dict:
    """Return the settings of all contestants. Write the prompts, where they are the task's."""
    settings = vars(arguments) | BATCH | {"out": None, "held_out": None}
    settings["eval_data"] = str(folder / "eval.jsonl")  # one prompt: no time goes to evaluation
    if arguments.model == "tiny":
        from support.tasks import TASKS, built_in_policy, problems

        task = TASKS["arithmetic"]
        settings |= {"data": str(folder / "train.jsonl"), "reward": task.verifier, "lr": 2e-4}
        settings |= {"held_out": str(folder / "held_out.jsonl")}
        settings |= {"model": str(built_in_policy(task, "tiny"))}
        settings |= {"max_new_tokens": task.max_new_tokens}
        count = arguments.steps * arguments.prompts_per_step
        write_rows(folder / "train.jsonl", itertools.islice(problems(task, 0), count))
        held_out = problems(task, 0, held_out=True)
        write_rows(folder / "held_out.jsonl", itertools.islice(held_out, 256))
    write_rows(folder / "eval.jsonl", read_rows(settings["data"])[:1])
    for name in ("model", "data"):
        settings[name] = str(Path(settings[name]).resolve())
    file, colon, function = settings["reward"].rpartition(":")
    if Path(file).is_file():  # in a sum, paths must be absolute
        settings["reward"] = f"{Path(file).resolve()}{colon}{function}"
    return settings


def read_rows(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def write_rows(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- one run of one contestant -------------------------------------------------------------------


def run(peer: str, settings: dict, folder: Path) -> dict:
    """In a process of its own: its steps, each with seconds, phases, reward."""
    settings = settings | {"peer": peer}
    if peer == "trl-defaults":
        settings["updates"] = 1
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [settings["trl_python"], str(Path(__file__).resolve()), "--trl-worker", str(folder)]
    line_of_a_step = r'\{"step": '
    if peer == "ours":
        command, line_of_a_step = train_command(settings, folder), r"step \d+"
    threads = str(settings["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
        )
        with process.stdout:
            lines = [(time.perf_counter(), line) for line in process.stdout]  # as each arrives
        _, status, usage = os.wait4(process.pid, 0)  # resources of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{peer}: exit {process.returncode}: {(folder / 'errors').read_text()[-4000:]}")

    ends = [(when, line) for when, line in lines if re.match(line_of_a_step, line)]
    begun = max(when for when, _ in lines if when < ends[0][0])  # printed as training begins
    steps = our_steps(folder) if peer == "ours" else [json.loads(line) for _, line in ends]
    assert len(ends) == len(steps) == settings["steps"], f"{peer}: {len(ends)} lines of steps"
    before = begun
    for step, (when, _) in zip(steps, ends):
        step["elapsed"], step["seconds"] = when - begun, when - before
        step["update"] = step["seconds"] - sum(step[phase] for phase in PHASES)
        before = when
    held_out = held_out_accuracy(peer, settings, folder)
    gb = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return {"peer": peer, "steps": steps, "held_out": held_out, "peak_gb": gb}


def train_command(settings: dict, folder: Path, **flags) -> list[str]:
    """Our train.py with these settings. The flags come last, so they count."""
    completions = settings["prompts_per_step"] * settings["group_size"]
    given = {"algo": "gspo", "runs": folder, "name": "run", "warmup_steps": 0, "device": "cpu"}
    given |= {"completions_per_update": completions // settings["updates"], "save_every": 0}
    given |= {"eval_prompts": 1, "eval_samples": 0, "eval_every": 0}
    for name in ("model", "data", "eval_data", "reward", "prompts_per_step", "group_size", "steps"):
        given[name] = settings[name]
    for name in ("max_new_tokens", "lr", "clip_low", "clip_high", "seed"):
        given[name] = settings[name]
    words = [sys.executable, str(ROOT / "train.py")]
    for name, value in (given | flags).items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


def our_steps(folder: Path) -> list[dict]:
    """Rows of metrics.jsonl in the words of the table."""
    names = {"reward": "reward", "clip": "clip_fraction", "length": "length_mean", "dead": "dead"}
    names |= {phase: f"seconds_{phase}" for phase in PHASES}
    rows = read_rows(folder / "run/metrics.jsonl")
    return [{name: row.get(ours, 0.0) for name, ours in names.items()} for row in rows]


def held_out_accuracy(peer: str, settings: dict, folder: Path) -> float | None:
    """Return the share of held-out problems that the trained policy solves, by our train.py."""
    if settings["held_out"] is None:
        return None
    trained = folder / f"run/checkpoints/step-{settings['steps']}"
    if peer != "ours":
        trained = folder / "trained"
    given = {"model": trained, "name": "held-out", "steps": 1, "lr": 1e-9}
    given |= {"eval_data": settings["held_out"], "eval_prompts": 256}
    subprocess.run(train_command(settings, folder, **given), check=True, capture_output=True)
    return read_rows(folder / "held-out/starts.jsonl")[0]["eval_solved"]


# ---- TRL, in its own environment -----------------------------------------------------------------


def trl_worker(folder: Path) -> None:
    """Train with GRPOTrainer as the settings say. Print a line of JSON after every rollout."""
    import datasets
    import torch
    import transformers
    import trl

    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    rows = read_rows(settings["data"])
    template = transformers.AutoTokenizer.from_pretrained(settings["model"]).chat_template
    prompts = trl_prompts(rows, bool(template))
    columns = {"prompt": prompts, "row": [json.dumps(row) for row in rows]}
    watch = Watch(settings)

    class Timed(trl.GRPOTrainer):
        """Trains as ever, and notes the seconds of its phases."""

        def _generate_and_score_completions(self, *args, **named):
            method = super()._generate_and_score_completions
            return watch.timed("prepare", method, *args, **named)

        def _generate_single_turn(self, *args, **named):
            return watch.timed("sample", super()._generate_single_turn, *args, **named)

        def _calculate_rewards(self, *args, **named):
            return watch.timed("score", super()._calculate_rewards, *args, **named)

        def _compute_loss(self, *args, **named):
            loss = super()._compute_loss(*args, **named)
            watch.step["clips"].append(self._metrics["train"]["clip_ratio/region_mean"][-1])
            return loss

    class Report(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            print(BEGINS, flush=True)

        def on_step_end(self, args, state, control, **_):
            if state.global_step % settings["updates"] == 0:
                watch.print_step(state.global_step // settings["updates"])

    trainer = Timed(
        model=settings["model"],
        args=trl_config(trl, settings, folder),
        reward_funcs=watch.reward,
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=[Report()],
    )
    trainer.train()
    trainer.model.save_pretrained(folder / "trained")
    trainer.processing_class.save_pretrained(folder / "trained")


def trl_prompts(rows: list[dict], chats: bool) -> list[str] | list[list[dict]]:
    """Return prompts as TRL takes them: all text, or all lists of messages."""
    if chats or any(isinstance(row["prompt"], list) for row in rows):
        return [messages_of(row["prompt"]) for row in rows]
    return [row["prompt"] for row in rows]


class Watch:
    """Of the rollout under way: the seconds of its phases, its rewards, lengths, clip shares."""

    def __init__(self, settings: dict):
        self.settings = settings
        self.verifiers = rewards.parse_reward(settings["reward"])
        self.clear()

    def clear(self) -> None:
        self.step = dict.fromkeys((*PHASES, "prepare"), 0.0)
        self.step |= {"rewards": [], "lengths": [], "clips": []}

    def timed(self, phase: str, method, *arguments, **named):
        begun = time.perf_counter()
        result = method(*arguments, **named)
        self.step[phase] += time.perf_counter() - begun
        return result

    def reward(self, prompts, completions, completion_ids, row, **_) -> list[float]:
        """Our reward as a function for TRL."""
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        scores = self.verifiers.score(texts, [json.loads(one) for one in row])
        self.step["rewards"] += [float(one.reward) for one in scores]
        self.step["lengths"] += map(len, completion_ids)
        return [float(one.reward) for one in scores]

    def print_step(self, number: int) -> None:
        step, size = self.step, self.settings["group_size"]
        # the time before the updates without sampling and rewards: mostly old log-probs
        step["freeze"] = step["prepare"] - step["sample"] - step["score"]
        groups = [step["rewards"][i : i + size] for i in range(0, len(step["rewards"]), size)]
        line = {"step": number} | {phase: step[phase] for phase in PHASES}
        line["reward"] = statistics.fmean(step["rewards"])
        line["length"] = statistics.fmean(step["lengths"])
        line["dead"] = statistics.fmean(len(set(group)) == 1 for group in groups)
        line["clip"] = statistics.fmean(step["clips"])
        print(json.dumps(line), flush=True)
        self.clear()


def trl_config(trl, settings: dict, folder: Path):
    objective = {"importance_sampling_level": settings.get("level_of_ratios", "sequence")}
    if settings["peer"] == "trl":
        objective |= {"loss_type": "grpo", "beta": 0.0, "scale_rewards": "group"}
        objective |= {"epsilon": settings["clip_low"], "epsilon_high": settings["clip_high"]}
    completions = settings["prompts_per_step"] * settings["group_size"]
    return trl.GRPOConfig(
        **objective,
        # one rollout of all completions, then one optimiser step for each part of it
        per_device_train_batch_size=completions // settings["updates"],
        gradient_accumulation_steps=1,
        steps_per_generation=settings["updates"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=settings["steps"] * settings["updates"],
        seed=settings["seed"],
        # a CPU: defaults that cost time or precision there are off
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # nothing beside the training
        output_dir=str(folder / "trl"),
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


# ---- turns and table -----------------------------------------------------------------------------


def mean(result: dict, name: str) -> float:
    """Of a run's steps but the first, which allocates and warms up."""
    return statistics.fmean(step[name] for step in result["steps"][1:] or result["steps"])


def reached(result: dict) -> tuple[int, float] | tuple[None, None]:
    """(step, seconds from the beginning) when three steps in a row have the mean reward LEVEL."""
    steps = result["steps"]
    for i in range(2, len(steps)):
        if statistics.fmean(step["reward"] for step in steps[i - 2 : i + 1]) >= LEVEL:
            return i + 1, steps[i]["elapsed"]
    return None, None


def table(turns: list[dict]) -> str:
    """Return medians over the turns as Markdown, and in brackets that of their ratios to ours."""
    measures = {
        "seconds a step": lambda r: mean(r, "seconds"),
        "– sampling": lambda r: mean(r, "sample"),
        "– rewards": lambda r: mean(r, "score"),
        "– old log-probs": lambda r: mean(r, "freeze"),
        "– updates, and the rest": lambda r: mean(r, "update"),
        f"seconds to reward {LEVEL}": lambda r: reached(r)[1],
        f"steps to reward {LEVEL}": lambda r: reached(r)[0],
        "held out after them, greedy": lambda r: r["held_out"],
        "share clipped": lambda r: mean(r, "clip"),
        "tokens of a completion": lambda r: mean(r, "length"),
        "share of dead groups": lambda r: mean(r, "dead"),
        "peak memory, GB": lambda r: r["peak_gb"],
    }
    peers = list(turns[0])
    lines = ["| median of turns (times ours) | " + " | ".join(map(PEERS.get, peers)) + " |"]
    lines.append("|---" * (len(peers) + 1) + "|")
    for label, measure in measures.items():
        ours = [measure(turn["ours"]) for turn in turns]
        cells = [cell([measure(turn[peer]) for turn in turns], ours) for peer in peers]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values: list[float | None], ours: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return f"in {len(there)} of {len(values)} turns"
    text = f"{statistics.median(values):.3g}"
    if values != ours and None not in ours and min(ours) > 0:
        ratio = statistics.median(value / own for value, own in zip(values, ours))
        text += f" ({ratio:.2f})"
    return text


def main() -> None:
    arguments = parse_arguments()
    turns = []
    with tempfile.TemporaryDirectory() as shared:
        settings = prepare(arguments, Path(shared))
        for turn in range(arguments.turns):
            done = {}
            order = arguments.peers if turn % 2 == 0 else arguments.peers[::-1]
            for peer in order:
                with tempfile.TemporaryDirectory() as own:
                    done[peer] = run(peer, settings | {"seed": turn}, Path(own))
                seconds = mean(done[peer], "seconds")
                print(f"turn {turn + 1}, {peer}: {seconds:.3g} s a step", flush=True)
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps({"turn": turn, **done[peer]}) + "\n")
            turns.append({peer: done[peer] for peer in arguments.peers})
    size = f"{arguments.prompts_per_step} x {BATCH['group_size']} completions"
    print(f"\n{arguments.model}, {size}, {BATCH['updates']} updates a rollout\n")
    print(table(turns))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl-worker"]:
        trl_worker(Path(sys.argv[2]))
    else:
        main()
