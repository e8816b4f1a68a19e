"""A pretended CUDA device: it refuses the operations that a GPU would refuse. No GPU is needed.

    python tests/pretend.py train.py --device cuda --steps 2

Every tensor is in the CPU's memory and is computed there. Only its place is pretended: a storage
has a place, and with it a tensor's device, as Python sees it. An operation on tensors of both
places raises. Not pretended: speed, rounding, streams, memory, CUDA graphs, recomputation in
the backward pass."""

import runpy
import sys
import types
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIXED = "Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu"


def place_of(tensor: Tensor) -> str:
    """ "cuda", "cpu", or "either": torch made it in an operation, and nobody said where."""
    return getattr(tensor.untyped_storage(), "place", "cpu")


def put(tensor: Tensor, place: str) -> None:
    tensor.untyped_storage().place = place


def tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def type_of(device) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


# ---- operations

COPIES = {"copy_", "_to_copy", "set_", "_has_compatible_shallow_copy_type"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# a number on the CPU may meet a tensor on the GPU, but not here: kernels that take pointers
POINTERS = {"addmm", "bmm", "cat", "embedding", "gather", "index_select", "isin", "masked_scatter"}
POINTERS |= {"mm", "scatter", "scatter_", "searchsorted", "stack", "_fused_adamw_"}


class Operations(TorchDispatchMode):
    """Every operation, also those of the backward pass: places are compared, results placed."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation._schema.name.split("::")[1]
        operands = tensors((args, kwargs))
        places = [place_of(operand) for operand in operands]
        if "cuda" in places and name not in COPIES:
            checked = zip(operands, places)
            if name in INDEXING:  # an index may be on the CPU: it is copied
                values = tensors((args[2:], kwargs))
                checked = [(each, place_of(each)) for each in (args[0], *values)]
            for operand, place in checked:
                if place == "cpu" and (operand.dim() or name in POINTERS):
                    raise RuntimeError(f"{MIXED}: {operation}, {places}")
        result = operation(*args, **kwargs)
        if name == "copy_":
            if places[0] == "either":
                put(operands[0], places[1])
            return result
        place = min(places, key=["cuda", "cpu", "either"].index, default="either")
        if name == "_to_copy":  # `to` has said where, see below. This is a change of dtype
            place = places[0]
        shared = {operand.untyped_storage()._cdata for operand in operands}
        for tensor in tensors(result):
            if tensor.untyped_storage()._cdata not in shared or name == "lift_fresh":
                put(tensor, place)
        return result


# ---- the device that Python sees

FACTORIES = {torch.arange, torch.empty, torch.full, torch.ones, torch.rand, torch.randn}
FACTORIES |= {torch.randint, torch.tensor, torch.zeros, torch.as_tensor, torch.randperm}
DEVICE, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__


class Functions(TorchFunctionMode):
    """Every function of torch that is called from Python: devices are translated."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (DEVICE, IS_CUDA):
            found = torch.device("cuda", 0) if place_of(args[0]) == "cuda" else DEVICE(args[0])
            return found if function == DEVICE else found.type == "cuda"
        if function in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return move(function, args, kwargs)
        if function == torch.histc:  # a GPU counts integers, too, as grouped experts are counted
            args, kwargs = (args[0].float(), *args[1:]), kwargs
        place = torch.get_default_device().type if function in FACTORIES else None
        if kwargs.get("device") is not None:
            place = type_of(kwargs["device"])
            kwargs["device"] = "meta" if place == "meta" else "cpu"
        if function in (Tensor.new_tensor, Tensor.__deepcopy__):
            place = place_of(args[0])
        result = function(*args, **kwargs)
        if place in ("cuda", "cpu"):
            for tensor in tensors(result):
                put(tensor, place)
        return result


def move(function, args, kwargs):
    """tensor.to in all its forms, .cuda() and .cpu()."""
    tensor, *rest = args
    copy = kwargs.pop("copy", False)
    source = target = place_of(tensor)
    if function is not Tensor.to:
        rest = [function.__name__]
    if rest and isinstance(rest[0], Tensor):
        rest[:1] = [place_of(rest[0]), rest[0].dtype]
    device, dtype, _, _ = torch._C._nn._parse_to(*rest, **kwargs)
    if device is not None:
        target = device.type
    if "meta" in (target, DEVICE(tensor).type):
        return Tensor.to(tensor, device, dtype, copy=copy)
    if {source, target} == {"cuda", "cpu"}:
        copy = True
    result = Tensor.to(tensor, dtype or tensor.dtype, copy=copy)
    if result is not tensor:
        put(result, target)
    return result


# ---- torch.cuda


def install() -> None:
    """From here on this process has a CUDA device. It cannot be taken off again."""
    card = types.SimpleNamespace(name="pretended", major=9, minor=0, total_memory=80 * 2**30)
    answers = {"is_available": True, "device_count": 1, "current_device": 0}
    answers |= {"mem_get_info": (80 * 2**30, 80 * 2**30), "get_device_properties": card}
    answers |= {"memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0}
    answers |= dict.fromkeys(["set_sync_debug_mode", "current_stream", "_lazy_init"])
    answers |= dict.fromkeys(["synchronize", "empty_cache", "manual_seed_all", "manual_seed"])
    answers |= {"is_bf16_supported": True, "get_device_capability": (9, 0)}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)

    # autocast for CUDA is the CPU's, which knows the same dtype and nearly the same operations
    for owner, name in (
        (torch.amp.autocast_mode.autocast, "__init__"),
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
    ):
        setattr(owner, name, on_the_cpu(getattr(owner, name)))
    Functions().__enter__()
    Operations().__enter__()


def on_the_cpu(function):
    def call(*args, **kwargs):
        return function(*["cpu" if each == "cuda" else each for each in args], **kwargs)

    return call


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
