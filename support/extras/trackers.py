"""Send metrics to TensorBoard, Weights & Biases or Trackio."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path

from support.errors import expecting


def open_tracker(kind: str, folder: Path, flags: dict, began: float, steps: int) -> Callable:
    """Return a function that sends a row of metrics.jsonl. A resumed run continues its curves.

    began: when the run started, in seconds since 1970. steps: how many it has done."""
    with expecting(f"--track {kind}: could not start the tracker"):
        if kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder, purge_step=steps + 1)
            return lambda row: [writer.add_scalar(name, row[name], row["step"]) for name in row]

        module = importlib.import_module(kind)  # wandb and trackio have the same functions
        # with the start time, since an earlier run may have had the same name
        names = {"name": time.strftime(f"{folder.name}-%Y%m%d-%H%M%S", time.gmtime(began))}
        if kind == "wandb":
            names["id"] = names["name"]
        module.init(project="gspo", config=flags, resume="allow", **names)
    return lambda row: module.log(row, step=row["step"])
