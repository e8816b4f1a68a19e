"""Count memory: run models without data, and add up the bytes of all tensors that are alive.

Floating-point tensors have a shape, a dtype and a lifetime, but no storage (torch's `FakeTensor`).
Integers and masks are real, because our functions read them. Any size runs in seconds."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def tensors(values) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Counting(TorchDispatchMode):
    """A context in which new floating-point tensors have no data.

    bytes_now, bytes_peak: of the tensors alive, each storage once. Integers don't count: there are
    thousands of times fewer."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.bytes_now = self.bytes_peak = 0
        self.known = weakref.WeakSet()  # storages

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = tensors((args, kwargs))
        if operands and not any(isinstance(operand, FakeTensor) for operand in operands):
            return tree_map(self.without_data, operation(*args, **kwargs))
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the norm of gradients is read, which has no data

        with self.fake:
            result = operation(*args, **kwargs)
        if not operands and not any(one.is_floating_point() for one in tensors(result)):
            return operation(*args, **kwargs)  # new integers are real
        for one in tensors(result):
            self.count(one)
        return tree_map(some_integers, result)

    def without_data(self, value):
        """Replace a floating-point tensor, computed from integers, by one without data."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        fake = self.fake.from_tensor(value.detach())
        self.count(fake)
        return fake

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_floating_point() or storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.bytes_now += size
        self.bytes_peak = max(self.bytes_peak, self.bytes_now)
        weakref.finalize(storage, self.forget, size)

    def forget(self, size: int) -> None:
        self.bytes_now -= size

    def peak_of(self, work: Callable) -> int:
        """Peak bytes while work() runs, including what was alive before."""
        self.bytes_peak = self.bytes_now
        work()
        return self.bytes_peak


def some_integers(value):
    """Replace integers computed without data: every token is 0, every condition is True."""
    if not isinstance(value, FakeTensor) or value.is_floating_point():
        return value
    if value.dtype == torch.bool:
        return torch.ones(value.shape, dtype=torch.bool)
    return torch.zeros(value.shape, dtype=value.dtype)
