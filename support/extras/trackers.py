"""Send metrics to TensorBoard, Weights & Biases or Trackio as well."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path

from support.user import expecting


def open_tracker(kind: str, folder: Path, flags: dict, began: float, steps: int) -> Callable:
    """Return a function that sends a row of metrics.jsonl. A resumed run continues its own curve.

    began is the start of the run in seconds since 1970, steps the number of its steps so far."""
    with expecting(f"--track {kind}: expected that the tracker starts"):
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder, purge_step=steps + 1)
            return lambda row: [writer.add_scalar(name, row[name], row["step"]) for name in row]

        module = importlib.import_module(kind)  # wandb and trackio have the same functions
        # an earlier run may have had the same name
        names = {"name": time.strftime(f"{folder.name}-%Y%m%d-%H%M%S", time.gmtime(began))}
        if kind == "wandb":
            names["id"] = names["name"]
        module.init(project="gspo", config=flags, resume="allow", **names)
    return lambda row: module.log(row, step=row["step"])
