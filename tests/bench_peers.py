r"""Our train.py beside two peers on a CPU, in turns: same policy, data, rewards and settings.

The peers are TRL's GRPOTrainer and the policy gradient code of the RLHF book. Each lives in an
environment of its own, whose Python is an argument; the book's code is a checkout's folder:

    python3 -m venv TRL && TRL/bin/pip install trl
    python3 -m venv BOOK && BOOK/bin/pip install torch transformers accelerate pydantic \
        reasoning-gym wandb rich
    git clone https://github.com/natolambert/rlhf-book
    python tests/bench_peers.py --trl-python TRL/bin/python \
        --book-python BOOK/bin/python --book rlhf-book/code
    python tests/bench_peers.py --trl-python TRL/bin/python --model FOLDER --data train.jsonl \
        --reward math_lenient --prompts-per-step 16 --max-new-tokens 12 --lr 1e-5 --steps 6

All train with GSPO: sequence-level ratios, the same band, the mean over sequences, no KL, Adam
without decay, a constant learning rate, float32, and as many updates per rollout. TRL is set as a
careful user would: one rollout for all of its updates, no gradient checkpointing, no bf16, fused
AdamW (its own default), no logging. The book's code runs as it is, without gradient checkpointing
and in float32 too (tests/peer_book.py says how, and what cannot be made equal).

Three contestants of --peers show what defaults do. trl-defaults sets of the objective only
importance_sampling_level="sequence": a band of 0.2, DAPO's mean over tokens, and one update a
rollout remain, of the same batch at the same learning rate. trl-wide is that with as many updates
as the others make. book-bf16 is the book's code with the bf16 weights and the gradient
checkpointing that it loads every model with.

Each may use the number of threads that is fastest for it. Contestants take turns, and who goes
first changes. Time is read from the arrival of the line that each prints after a step; it starts
when the model is loaded and training begins. The trained policies are saved and answer the same
held-out problems greedily, sampled by our rollout.py.
"""

import argparse
import functools
import importlib
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

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = "tiny"
PEERS = {  # contestant -> what the table calls it
    "ours": "ours",
    "trl": "TRL",
    "trl-defaults": "TRL, its defaults",
    "trl-wide": "TRL, its band and mean",
    "book": "RLHF book",
    "book-bf16": "RLHF book, bf16",
}
OWN_SETTINGS = {"trl-defaults": {"updates": 1}}  # where a contestant's differ from what was asked
TOO_SMALL_TO_MOVE = "1e-30"  # a learning rate whose updates float32 weights round away
PHASES = ("sample", "score", "freeze")  # the rest of a step is the updates
MILESTONES = (5, 10, 20, 30)  # steps whose reward is shown
BEGINS = "training begins"  # a worker prints it when its model is loaded


# ---------------------------------------------------------------- what both are given


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="Python of an environment with TRL")
    parser.add_argument("--book-python", help="Python of an environment for the RLHF book's code")
    parser.add_argument("--book", type=Path, help="folder that holds its policy_gradients/")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        help="default: ours, and trl, trl-defaults, book as far as their Pythons are given",
    )
    parser.add_argument("--ours", type=Path, default=ROOT, help="checkout whose train.py runs")
    parser.add_argument("--model", default=BUILT_IN, help="tiny, or a folder of a model")
    parser.add_argument("--task", default="arithmetic", help="problems of the built-in policy")
    parser.add_argument("--data", help="JSONL with prompt and answer, for a --model of your own")
    parser.add_argument("--reward", help="as in train.py; default: the task's, or math")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4, help="optimiser steps per rollout")
    parser.add_argument("--max-new-tokens", type=int, help="default: the task's, or 256")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, help="default: 2e-4 for tiny, else 1e-6")
    parser.add_argument("--clip-low", type=float, default=3e-4)
    parser.add_argument("--clip-high", type=float, default=4e-4)
    parser.add_argument("--steps", type=int, default=40, help="rollouts per run")
    parser.add_argument("--book-steps", type=int, help="of the book's code; default: --steps")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--level", type=float, default=0.8, help="mean reward of three steps")
    parser.add_argument("--held-out", type=Path, help="JSONL that the trained policies answer")
    parser.add_argument("--held-out-prompts", type=int, default=256, help="at most")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, os.cpu_count() or 1}),
        help="if several, each contestant tries them first and keeps its fastest",
    )
    parser.add_argument("--probe-steps", type=int, default=4, help="steps of such a trial")
    parser.add_argument("--out", type=Path, help="JSONL that every run is appended to")
    arguments = parser.parse_args()
    if (arguments.model == BUILT_IN) != (arguments.data is None):
        parser.error(f"--model {arguments.model}: a folder and --data need each other")
    if arguments.prompts_per_step * arguments.group_size % arguments.updates:
        parser.error(f"--updates {arguments.updates}: expected a divisor of prompts x group size")
    choose_peers(arguments, parser)
    return arguments


def choose_peers(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fills in --peers, and refuses those whose environment is not given."""
    given = {
        "ours": True,
        "trl": arguments.trl_python is not None,
        "book": arguments.book_python is not None and arguments.book is not None,
    }
    if arguments.peers is None:
        peers = ("ours", "trl", "trl-defaults", "book")
        arguments.peers = [peer for peer in peers if given[kind_of(peer)]]
    for peer in arguments.peers:
        if not given[kind_of(peer)]:
            parser.error(f"--peers {peer}: expected --trl-python, or --book-python and --book")
    book = arguments.book and arguments.book / "policy_gradients" / "rollout.py"
    if book and not book.exists():
        parser.error(f"--book {arguments.book}: expected policy_gradients/rollout.py in it")
    if "ours" not in arguments.peers or len(arguments.peers) < 2:
        parser.error("--peers: expected ours and at least one other; --trl-python, --book-python?")


def kind_of(peer: str) -> str:
    """Whose code a contestant runs: ours, trl or book."""
    return peer.split("-")[0]


def import_module_of(ours: str | Path, name: str):
    """rewards.py or rollout.py of the checkout; rewards.py needs the standard library only."""
    if str(ours) not in sys.path:
        sys.path.insert(0, str(ours))
    return importlib.import_module(name)


def prepare(arguments: argparse.Namespace, folder: Path) -> dict:
    """The settings of all contestants; writes the prompts, and the policy if it is built in."""
    settings = vars(arguments) | {"ours": str(arguments.ours.resolve())}
    del settings["out"]
    for name in ("book", "held_out"):
        settings[name] = settings[name] and str(settings[name].resolve())
    if arguments.model == BUILT_IN:
        rewards = import_module_of(arguments.ours.resolve(), "rewards")
        task = rewards.TASKS[arguments.task]
        number = arguments.steps * arguments.prompts_per_step
        rows = list(itertools.islice(rewards.problems(task, seed=0), number))
        write_rows(folder / "train.jsonl", rows)
        held_out = rewards.problems(task, seed=0, held_out=True)
        rows = list(itertools.islice(held_out, arguments.held_out_prompts))
        write_rows(folder / "held_out.jsonl", rows)
        settings["held_out"] = str(folder / "held_out.jsonl")
        settings["model"] = str(built_in_policy(arguments, folder))
        settings["data"] = str(folder / "train.jsonl")
        defaults = {"reward": task.verifier, "max_new_tokens": task.max_new_tokens, "lr": 2e-4}
    else:
        settings["data"] = str(Path(arguments.data).resolve())
        defaults = {"reward": "math", "max_new_tokens": 256, "lr": 1e-6}
    for name, value in defaults.items():
        if settings[name] is None:
            settings[name] = value
    settings["eval_data"] = str(folder / "eval.jsonl")  # one prompt: no time goes to evaluation
    write_rows(folder / "eval.jsonl", read_rows(settings["data"])[:1])
    return settings


def built_in_policy(arguments: argparse.Namespace, folder: Path) -> Path:
    """The built-in policy as a folder: a checkpoint of train.py after a step that moves nothing."""
    flags = ["--model", BUILT_IN, "--task", arguments.task, "--lr", TOO_SMALL_TO_MOVE]
    flags += ["--steps", "1", "--prompts-per-step", "1", "--group-size", "2"]
    flags += ["--eval-prompts", "1", "--eval-samples", "0", "--runs", str(folder), "--name", "tiny"]
    command = [sys.executable, str(arguments.ours / "train.py"), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "tiny" / "checkpoints" / "step-1"


def read_rows(path: str | Path) -> list[dict]:
    lines = Path(path).read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------- one run of one contestant


def run(peer: str, settings: dict, folder: Path) -> dict:
    """One training run in a process of its own: its steps, each with seconds, phases, reward."""
    command = command_of(peer, settings, folder)
    threads = str(settings["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    with open(folder / "errors", "w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
        )
        with process.stdout:
            lines = [(time.perf_counter(), line) for line in process.stdout]  # as each arrives
        _, status, usage = os.wait4(process.pid, 0)  # resources of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            print("".join(line for _, line in lines[-5:]), errors.read()[-4000:], file=sys.stderr)
            sys.exit(f"{peer}: exit {process.returncode}")

    if peer == "ours":
        metrics = read_rows(folder / "run" / "metrics.jsonl")
        steps = [our_step(row, settings) for row in metrics]
        ends = [(when, line) for when, line in lines if re.match(r"step \d+ \|", line)]
        begun = max(when for when, _ in lines if when < ends[0][0])  # printed as training begins
    else:
        ends = [(when, line) for when, line in lines if line.startswith('{"step": ')]
        steps = [json.loads(line) for _, line in ends]
        begun = next(when for when, line in lines if line.strip() == BEGINS)
    assert len(ends) == len(steps) == settings["steps"], f"{peer}: {len(ends)} lines of steps"

    for step, (when, _) in zip(steps, ends):
        step["elapsed"] = when - begun
    for step, before in zip(steps, [0.0] + [step["elapsed"] for step in steps]):
        step["seconds"] = step["elapsed"] - before
        step["update"] = step["seconds"] - sum(step[phase] for phase in PHASES)
    return {
        "peer": peer,
        "threads": settings["threads"],
        "seed": settings["seed"],
        "peak_gb": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9,
        "steps": steps,
        "held_out": held_out_accuracy(peer, settings, folder),
    }


def command_of(peer: str, settings: dict, folder: Path) -> list[str]:
    """The command of a run; a peer's is one of our workers in the peer's own environment."""
    if peer == "ours":
        return our_command(settings, folder)
    (folder / "settings.json").write_text(json.dumps(settings | {"peer": peer}))
    if kind_of(peer) == "trl":
        worker = [str(Path(__file__).resolve()), "--trl-worker"]
    else:
        worker = [str(Path(__file__).resolve().with_name("peer_book.py"))]
    return [settings[f"{kind_of(peer)}_python"], *worker, str(folder / "settings.json")]


def held_out_accuracy(peer: str, settings: dict, folder: Path) -> float | None:
    """Share of the held-out problems that the trained policy answers greedily, sampled by us."""
    if settings["held_out"] is None:
        return None
    import torch
    import transformers

    rewards = import_module_of(settings["ours"], "rewards")
    rollout = import_module_of(settings["ours"], "rollout")
    transformers.utils.logging.disable_progress_bar()
    trained = folder / "trained"
    if peer == "ours":
        trained = folder / "run" / "checkpoints" / f"step-{settings['steps']}"
    policy = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    rows = read_rows(settings["held_out"])[: settings["held_out_prompts"]]
    samples = rollout.generate(
        policy,
        [rollout.encode_prompt(tokenizer, row["prompt"]) for row in rows],
        group_size=1,
        max_new_tokens=settings["max_new_tokens"],
        temperature=0.0,
        **rollout.end_and_pad_ids(policy, tokenizer),
    )
    texts = [
        tokenizer.decode(ids[:length], skip_special_tokens=True)
        for ids, length in zip(samples.completions.tolist(), samples.lengths.tolist())
    ]
    scores = rewards.parse_reward(settings["reward"]).score(texts, rows)
    return statistics.mean(float(score.correct) for score in scores)


def our_command(settings: dict, folder: Path) -> list[str]:
    completions = settings["prompts_per_step"] * settings["group_size"]
    flags = {"algo": "gspo", "runs": folder, "name": "run", "warmup_steps": 0}
    flags |= {"completions_per_update": completions // settings["updates"], "device": "cpu"}
    flags |= {"eval_prompts": 1, "eval_samples": 0, "eval_every": 0, "save_every": 0}
    for name in ("model", "data", "eval_data", "reward", "prompts_per_step", "group_size", "steps"):
        flags[name] = settings[name]
    for name in ("max_new_tokens", "temperature", "lr", "clip_low", "clip_high", "seed"):
        flags[name] = settings[name]
    command = [sys.executable, str(Path(settings["ours"], "train.py"))]
    for name, value in flags.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    return command


def our_step(row: dict, settings: dict) -> dict:
    """A row of metrics.jsonl in the words of the table."""
    completions = settings["prompts_per_step"] * settings["group_size"]
    step = {phase: row.get(f"seconds_{phase}", 0.0) for phase in PHASES}
    step |= {"step": row["step"], "reward": row["reward"], "clip": row["clip_fraction"]}
    return step | {
        "tokens": row["length_mean"] * completions,
        "dead": row["dead_right"] + row["dead_wrong"],
    }


# ---------------------------------------------------------------- what the workers share


def nothing_yet() -> dict:
    """Of the rollout under way: the seconds of its phases, its rewards, lengths and clip shares."""
    return dict.fromkeys(PHASES, 0.0) | {"rewards": [], "lengths": [], "clips": []}


def timed(step: dict, phase: str, method, *arguments, **named):
    """What the method returns; its seconds are added to a phase of step."""
    begun = time.perf_counter()
    result = method(*arguments, **named)
    step[phase] += time.perf_counter() - begun
    return result


def print_step(number: int, step: dict, group_size: int) -> None:
    """The line of a finished step in the words of the table; rows of a group are contiguous."""
    rewards = step["rewards"]
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    line = {"step": number} | {phase: step[phase] for phase in PHASES}
    line["reward"] = statistics.mean(rewards)
    line["tokens"] = sum(step["lengths"])
    line["dead"] = statistics.mean(len(set(group)) == 1 for group in groups)
    line["clip"] = statistics.mean(step["clips"])
    print(json.dumps(line), flush=True)


# ---------------------------------------------------------------- TRL, in its own environment


def trl_worker(path: str) -> None:
    """Trains with GRPOTrainer as the settings say; prints a line of JSON after every rollout."""
    import datasets
    import torch
    import transformers
    import trl

    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    rows = read_rows(settings["data"])
    prompts = [row["prompt"] for row in rows]
    if tokenizer.chat_template:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    columns = {"prompt": prompts, "row": [json.dumps(row) for row in rows]}

    step = nothing_yet() | {"prepare": 0.0}
    trainer = timed_trainer(trl, step)(
        model=settings["model"],
        args=trl_config(trl, settings, Path(path).parent),
        reward_funcs=trl_reward(settings, step),
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=[trl_report(transformers, settings, step)],
    )
    trainer.train()
    trainer.model.save_pretrained(Path(path).parent / "trained")


def trl_reward(settings: dict, step: dict):
    """Our reward as a function for TRL; what a rollout earned is noted in step."""
    reward = import_module_of(settings["ours"], "rewards").parse_reward(settings["reward"])

    def score(prompts, completions, completion_ids, row, **_):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        scores = reward.score(texts, [json.loads(one) for one in row])
        step["rewards"] += [one.reward for one in scores]
        step["lengths"] += map(len, completion_ids)
        return [one.reward for one in scores]

    return score


def timed_trainer(trl, step: dict):
    """GRPOTrainer, which trains as ever and notes the seconds of its phases in step."""

    class Timed(trl.GRPOTrainer):
        def _generate_and_score_completions(self, *args, **named):
            method = super()._generate_and_score_completions
            return timed(step, "prepare", method, *args, **named)

        def _generate_single_turn(self, *args, **named):
            return timed(step, "sample", super()._generate_single_turn, *args, **named)

        def _calculate_rewards(self, *args, **named):
            return timed(step, "score", super()._calculate_rewards, *args, **named)

        def _compute_loss(self, *args, **named):
            loss = super()._compute_loss(*args, **named)
            step["clips"].append(self._metrics["train"]["clip_ratio/region_mean"][-1])
            return loss

    return Timed


def trl_report(transformers, settings: dict, step: dict):
    """Prints step when the last update of its rollout is done, and empties it."""

    class Report(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            print(BEGINS, flush=True)

        def on_step_end(self, args, state, control, **_):
            if state.global_step % settings["updates"] == 0:
                # what is neither sampled nor scored before the updates: mostly old log-probs
                step["freeze"] = step["prepare"] - step["sample"] - step["score"]
                number = state.global_step // settings["updates"]
                print_step(number, step, settings["group_size"])
                step.update(nothing_yet() | {"prepare": 0.0})

    return Report()


def trl_objective(settings: dict) -> dict:
    """What makes it GSPO; else the one setting that public configurations share."""
    if settings["peer"] in ("trl-defaults", "trl-wide"):
        return {"importance_sampling_level": settings.get("ratios", "sequence")}
    return {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",  # mean over sequences
        "epsilon": settings["clip_low"],
        "epsilon_high": settings["clip_high"],
        "beta": 0.0,
        "scale_rewards": "group",
        "num_iterations": 1,
    }


def trl_config(trl, settings: dict, folder: Path):
    completions = settings["prompts_per_step"] * settings["group_size"]
    return trl.GRPOConfig(
        **trl_objective(settings),
        # one rollout of all completions, then one optimiser step for each part of it
        per_device_train_batch_size=completions // settings["updates"],
        gradient_accumulation_steps=1,
        steps_per_generation=settings["updates"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        # optimiser
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=settings["steps"] * settings["updates"],
        seed=settings["seed"],
        # a CPU: defaults that cost time or precision there are off
        # (use_transformers_continuous_batching samples tens of times slower than its default here)
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


# ---------------------------------------------------------------- turns and table


def fastest_threads(peer: str, settings: dict, choices: list[int]) -> int:
    """The number of threads with which a few steps are fastest."""
    if len(choices) == 1:
        return choices[0]
    seconds = {}
    for threads in choices:
        tried = settings | {"threads": threads, "seed": 0, "steps": settings["probe_steps"]}
        tried["held_out"] = None  # only how fast it is
        with tempfile.TemporaryDirectory() as folder:
            seconds[threads] = mean(run(peer, tried, Path(folder)), "seconds")
        print(f"{peer}, threads {threads}: {seconds[threads]:.3g} s a step", flush=True)
    return min(seconds, key=seconds.get)


def mean(result: dict, name: str, last: int | None = None) -> float:
    """Of a run's steps but the first, which allocates and warms up; or of the last few."""
    steps = result["steps"][1:] or result["steps"]
    return statistics.mean(step[name] for step in steps[-last if last else None :])


def seconds_to(result: dict, level: float) -> float | None:
    """From the beginning of training until three steps in a row have this mean reward."""
    steps = result["steps"]
    for three in zip(steps, steps[1:], steps[2:]):
        if statistics.mean(step["reward"] for step in three) >= level:
            return three[-1]["elapsed"]
    return None


def steps_to(result: dict, level: float) -> int | None:
    reached = seconds_to(result, level)
    if reached is None:
        return None
    return sum(step["elapsed"] <= reached for step in result["steps"])


def reward_until(result: dict, number: int) -> float | None:
    """Mean sampled reward of three steps, the last of them the given one."""
    steps = result["steps"]
    if number > len(steps):
        return None
    return statistics.mean(step["reward"] for step in steps[max(number - 3, 0) : number])


def table(turns: list[dict], level: float) -> str:
    """Medians over the turns as Markdown; in brackets the median of the turns' ratios to ours."""
    peers = list(turns[0])
    lines = [
        "| median of turns (times ours) | " + " | ".join(PEERS[peer] for peer in peers) + " |",
        "|---" * (len(peers) + 1) + "|",
    ]

    def row(label, measure, form=".3g", ratio=False):
        cells = []
        for peer in peers:
            values = [measure(turn[peer]) for turn in turns]
            ours = [measure(turn["ours"]) for turn in turns]
            cell = median_text(values, form)
            if ratio and peer != "ours" and None not in values + ours and min(ours) > 0:
                ratios = [value / own for value, own in zip(values, ours)]
                cell += f" ({statistics.median(ratios):.2f})"
            cells.append(cell)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    row("seconds a step", lambda result: mean(result, "seconds"), ratio=True)
    for phase, label in (
        ("sample", "sampling"),
        ("score", "rewards"),
        ("freeze", "old log-probs"),
        ("update", "updates, and the rest"),
    ):
        row(f"– {label}", functools.partial(mean, name=phase), ratio=True)
    row(f"seconds to reward {level:g}", lambda result: seconds_to(result, level), ratio=True)
    row(f"steps to reward {level:g}", lambda result: steps_to(result, level), "g", ratio=True)
    row("reward of the first step", lambda result: result["steps"][0]["reward"], ".2f")
    for number in MILESTONES:
        measure = functools.partial(reward_until, number=number)
        row(f"reward of steps {number - 2} to {number}", measure, ".2f")
    row("steps of a run", lambda result: len(result["steps"]), "g")
    row("held out after them, greedy", lambda result: result["held_out"], ".1%")
    row("clip fraction", lambda result: mean(result, "clip"), ".1%")
    row("sampled tokens a step", lambda result: mean(result, "tokens"), ".0f")
    row("dead groups", lambda result: mean(result, "dead"), ".0%")
    row("threads", lambda result: result["threads"], "g")
    row("peak memory, GB", lambda result: result["peak_gb"])
    return "\n".join(lines)


def median_text(values: list[float | None], form: str) -> str:
    reached = len(values) - values.count(None)
    if reached == 0:
        return "–"
    if reached < len(values):
        return f"in {reached} of {len(values)} turns"
    return format(statistics.median(values), form)


def settings_of(peer: str, settings: dict) -> dict:
    """What a contestant is given."""
    own = settings | OWN_SETTINGS.get(peer, {})
    if kind_of(peer) == "book":
        own["steps"] = settings["book_steps"] or settings["steps"]
    return own


def trl_version(python: str) -> str:
    command = [python, "-c", "import importlib.metadata as m; print(m.version('trl'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    arguments = parse_arguments()
    peers = arguments.peers
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(arguments, Path(folder))
        given = {peer: settings_of(peer, settings) for peer in peers}
        threads = {peer: fastest_threads(peer, given[peer], arguments.threads) for peer in peers}
        turns = []
        for turn in range(arguments.turns):
            done = {}
            for peer in peers if turn % 2 == 0 else peers[::-1]:
                with tempfile.TemporaryDirectory() as own:
                    this = given[peer] | {"seed": turn, "threads": threads[peer]}
                    result = done[peer] = run(peer, this, Path(own))
                print(
                    f"turn {turn + 1}, {peer}: {mean(result, 'seconds'):.3g} s a step, "
                    f"reward {result['steps'][0]['reward']:.2f} -> {mean(result, 'reward', 3):.2f}",
                    flush=True,
                )
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps({"turn": turn, "settings": this, **result}) + "\n")
            turns.append({peer: done[peer] for peer in peers})
    if arguments.trl_python:
        print(f"\nTRL {trl_version(arguments.trl_python)}", end="")
    size = f"{arguments.prompts_per_step} x {arguments.group_size} completions"
    print(f"\n{arguments.model}, {size}, {arguments.updates} updates a rollout\n")
    print(table(turns, arguments.level))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl-worker"]:
        trl_worker(sys.argv[2])
    else:
        main()
