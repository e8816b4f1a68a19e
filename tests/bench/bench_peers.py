"""Time our train.py against TRL's GRPOTrainer on a CPU: same policy, data, rewards, settings.

TRL lives in an environment of its own. docs/peers.md has the commands with a real model:

    python3 -m venv TRL && TRL/bin/pip install trl
    python tests/bench/bench_peers.py --trl-python TRL/bin/python --steps 12

All train with GSPO: one ratio per completion, the same band, a mean over completions, no KL; AdamW
without weight decay, constant learning rate, float32, equally many updates per rollout. TRL is set
up as a careful user would. trl-defaults sets only importance_sampling_level="sequence" in the
objective, with one update per rollout; trl-wide is the same with as many updates as the others.

Contestants take turns, and the order changes. The clock starts when the model is loaded and is read
after every step. Then our train.py samples greedy answers of the trained built-in policy."""

import collections
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import transformers

import common
import rewards
from common import read_rows
from support import pretrain, tasks
from support.data import messages_of

PEERS = ("ours", "trl", "trl-defaults", "trl-wide")
# the rest of a step is the updates
PHASES = ("seconds_sample", "seconds_verify", "seconds_score")
LEVEL = 0.8  # mean reward of three steps in a row
UPDATES = 4  # a rollout
SHARED = {"group_size": 8, "clip_low": 3e-4, "clip_high": 4e-4}


def prepare(given, folder: Path) -> dict:
    """Return the settings of all contestants. Write the prompts if they are the task's."""
    settings = vars(given) | SHARED | {"held_out": None}
    if given.model == "tiny":
        task = tasks.TASKS["arithmetic"]
        settings |= {"model": str(pretrain.built_in_policy(task, "tiny")), "reward": task.verifier}
        settings |= {"max_new_tokens": task.max_new_tokens, "lr": 2e-4}
        settings |= {name: str(folder / f"{name}.jsonl") for name in ("data", "held_out")}
        counts = {"data": given.steps * given.prompts_per_step, "held_out": 256}
        for name, count in counts.items():
            rows = itertools.islice(tasks.problems(task, 0, name == "held_out"), count)
            Path(settings[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return settings


# ---- one run of one contestant -------------------------------------------------------------------


def run(peer: str, settings: dict, folder: Path) -> dict:
    """In a process of its own: its steps, each with seconds, phases, reward."""
    updates = 1 if peer == "trl-defaults" else UPDATES
    completions = settings["prompts_per_step"] * settings["group_size"]
    settings |= {"peer": peer, "updates": updates, "per_update": completions // updates}
    command = [settings["trl_python"], __file__, "--trl-worker", str(folder), json.dumps(settings)]
    if peer == "ours":
        command = train_command(settings, folder)
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        with process.stdout:
            lines = [(time.perf_counter(), line) for line in process.stdout]  # as each arrives
        _, status, usage = os.wait4(process.pid, 0)  # resources of this process alone
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{peer}: exit {process.returncode}: {(folder / 'errors').read_text()[-4000:]}")

    steps = read_rows(folder / "run/metrics.jsonl")
    ends = [when for when, line in lines if line.startswith("step ")]
    assert len(ends) == len(steps) == settings["steps"], f"{peer}: {len(ends)} lines of steps"
    begun = max(when for when, _ in lines if when < ends[0])  # printed as training begins
    for step, before, end in zip(steps, [begun, *ends], ends):
        step["seconds"] = end - before
        step["seconds_update"] = step["seconds"] - sum(step[phase] for phase in PHASES)
    held_out = held_out_accuracy(settings, folder) if settings["held_out"] else None
    gb = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return {"steps": steps, "held_out": held_out, "peak_gb": gb}


def train_command(settings: dict, folder: Path, **flags) -> list[str]:
    """Our train.py with these settings. The flags come last, so they win."""
    given = {"algo": "gspo", "runs": folder, "name": "run", "warmup_steps": 0, "device": "cpu"}
    given |= {"completions_per_update": settings["per_update"], "save_every": 0}
    # one prompt: no time goes to evaluation
    given |= {"eval_data": settings["data"], "eval_prompts": 1, "eval_samples": 0, "eval_every": 0}
    names = ["model", "data", "reward", "prompts_per_step", "group_size", "steps"]
    names += ["max_new_tokens", "lr", "clip_low", "clip_high", "seed"]
    given |= {name: settings[name] for name in names}
    words = [sys.executable, str(common.ROOT / "train.py")]
    for name, value in (given | flags).items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return words


def held_out_accuracy(settings: dict, folder: Path) -> float:
    """Return the share of held-out problems that the trained policy solves, by our train.py."""
    trained = folder / f"run/checkpoints/step-{settings['steps']}"
    given = {"model": trained, "name": "held-out", "steps": 1, "lr": 1e-9}
    given |= {"eval_data": settings["held_out"], "eval_prompts": 256}
    subprocess.run(train_command(settings, folder, **given), check=True, capture_output=True)
    return read_rows(folder / "held-out/starts.jsonl")[0]["eval_solved"]


# ---- TRL, in its own environment -----------------------------------------------------------------


def trl_worker(folder: Path, settings: dict) -> None:
    """Train with GRPOTrainer as the settings say, into a folder like that of one of our runs."""
    import datasets
    import torch
    import trl

    torch.set_num_threads(settings["threads"])
    rows = read_rows(settings["data"])
    chats = transformers.AutoTokenizer.from_pretrained(settings["model"]).chat_template
    prompts = [messages_of(row["prompt"]) if chats else row["prompt"] for row in rows]
    columns = {"prompt": prompts, "row": [json.dumps(row) for row in rows]}
    watch = Watch(settings, folder / "run")
    trainer = trl.GRPOTrainer(
        model=settings["model"],
        args=trl_config(trl, settings, folder),
        reward_funcs=watch.reward,
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=[watch],
    )
    watch.metrics = trainer._metrics["train"]
    watch.time(trainer, "_generate_and_score_completions", "prepare")
    watch.time(trainer, "_generate_single_turn", "seconds_sample")
    watch.time(trainer, "_calculate_rewards", "seconds_verify")
    trainer.train()
    trained = folder / f"run/checkpoints/step-{settings['steps']}"
    trainer.model.save_pretrained(trained)
    trainer.processing_class.save_pretrained(trained)


class Watch(transformers.TrainerCallback):
    """Write a row of metrics after each of TRL's rollouts, under train.py's names."""

    def __init__(self, settings: dict, folder: Path):
        self.settings, self.path = settings, folder / "metrics.jsonl"
        folder.mkdir()
        self.verifiers = rewards.parse_reward(settings["reward"])
        self.metrics = {}  # the trainer's own
        self.seconds, self.rewards = collections.Counter(), []  # of the rollout under way

    def time(self, trainer, name: str, phase: str) -> None:
        """From now on, add the seconds that a trainer method takes to a phase."""
        method = getattr(trainer, name)

        def timed(*arguments, **named):
            begun = time.perf_counter()
            result = method(*arguments, **named)
            self.seconds[phase] += time.perf_counter() - begun
            return result

        setattr(trainer, name, timed)

    def reward(self, completions, row, **_) -> list[float]:
        """Our reward as a function for TRL."""
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        scores = self.verifiers.verify(texts, [json.loads(one) for one in row])
        found = [float(one.reward) for one in scores]
        self.rewards += found
        return found

    def on_train_begin(self, *_, **__):
        print("training begins", flush=True)

    def on_step_end(self, args, state, control, **_):
        number, updates_left = divmod(state.global_step, self.settings["updates"])
        if updates_left:
            return
        # the time before the updates without sampling and rewards: mostly old log-probs
        seconds = self.seconds
        rest = seconds.pop("prepare") - seconds["seconds_sample"] - seconds["seconds_verify"]
        row = {"step": number, **seconds, "seconds_score": rest}
        size = self.settings["group_size"]
        groups = [self.rewards[i : i + size] for i in range(0, len(self.rewards), size)]
        row["reward"] = statistics.fmean(self.rewards)
        row["dead"] = statistics.fmean(len(set(group)) == 1 for group in groups)
        clipped = self.metrics["clip_ratio/region_mean"]  # an item for each update
        row["clip_fraction"] = statistics.fmean(clipped[-self.settings["updates"] :])
        common.add_row(self.path, row)
        print(f"step {number}", flush=True)
        self.seconds.clear()
        self.rewards.clear()


def trl_config(trl, settings: dict, folder: Path):
    objective = {"importance_sampling_level": "sequence"}
    if settings["peer"] == "trl":
        objective |= {"loss_type": "grpo", "beta": 0.0, "scale_rewards": "group"}
        objective |= {"epsilon": settings["clip_low"], "epsilon_high": settings["clip_high"]}
    return trl.GRPOConfig(
        **objective,
        # one rollout of all completions, then one optimizer step for each part of it
        per_device_train_batch_size=settings["per_update"],
        steps_per_generation=settings["updates"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
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
    """Return the mean of a metric over the steps, without the first, which warms up."""
    return statistics.fmean(step.get(name, 0.0) for step in result["steps"][1:] or result["steps"])


def steps_to_level(result: dict) -> int | None:
    """Return the step that ends the first three in a row with the mean reward LEVEL."""
    rewards = [step["reward"] for step in result["steps"]]
    means = [statistics.fmean(rewards[step - 3 : step]) for step in range(3, len(rewards) + 1)]
    return next((step for step, mean in enumerate(means, start=3) if mean >= LEVEL), None)


def table(turns: list[dict]) -> str:
    """Return medians over the turns as Markdown, and in brackets the median ratio to ours."""
    measures = {
        "seconds a step": lambda r: mean(r, "seconds"),
        "– sampling": lambda r: mean(r, "seconds_sample"),
        "– rewards": lambda r: mean(r, "seconds_verify"),
        "– old log-probs": lambda r: mean(r, "seconds_score"),
        "– updates, and the rest": lambda r: mean(r, "seconds_update"),
        f"steps to reward {LEVEL}": steps_to_level,
        "held out after them, greedy": lambda r: r["held_out"],
        "share clipped": lambda r: mean(r, "clip_fraction"),
        "share of dead groups": lambda r: mean(r, "dead"),
        "peak memory, GB": lambda r: r["peak_gb"],
    }
    lines = [["median of turns (times ours)", *turns[0]]]
    for label, measure in measures.items():
        ours = [measure(turn["ours"]) for turn in turns]
        cells = [cell([measure(turn[peer]) for turn in turns], ours) for peer in turns[0]]
        lines.append([label, *cells])
    return common.markdown(*lines)


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
    parser = common.parser(__doc__)
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
    given = parser.parse_args()
    threads = str(given.threads)  # of the processes that contestants have
    os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    turns = []
    with tempfile.TemporaryDirectory() as shared:
        settings = prepare(given, Path(shared))
        for turn in range(given.turns):
            done = dict.fromkeys(given.peers)
            for peer in given.peers if turn % 2 == 0 else given.peers[::-1]:
                with tempfile.TemporaryDirectory() as own:
                    done[peer] = run(peer, settings | {"seed": turn}, Path(own))
                seconds = mean(done[peer], "seconds")
                print(f"turn {turn + 1}, {peer}: {seconds:.3g} s a step", flush=True)
            turns.append(done)
    size = f"{given.prompts_per_step} x {SHARED['group_size']} completions"
    print(f"\n{given.model}, {size}, {UPDATES} updates a rollout\n")
    print(table(turns))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl-worker"]:
        trl_worker(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
