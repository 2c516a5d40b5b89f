"""The roads to a tensor's memory that no dispatch mode sees: NumPy and DLPack views, storages, swapped tensors.

Most are refused for tensors of the model. NumPy arrays are handed out as copies and compared when the load is over,
because reading a table with NumPy is common and harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from probe_cli.errors import ProbeError
from probe_cli.model.patched import patched
from probe_cli.model.storage import storage_key
from probe_cli.probe.recorder import Recorder
from probe_cli.probe.writes import code_line

__all__ = ["guard_memory"]

_HINT = "write to the tensor itself (copy_, item assignment); a dry run cannot follow writes to bare memory"
_STORAGE_WRITERS = (
    "fill_",
    "copy_",
    "__setitem__",
    "resize_",
    "_byteswap",
    "_set_cdata",
    "_set_from_file",
    "_swap_data_ptr_",
)


@contextmanager
def guard_memory(recorder: Recorder) -> Iterator[None]:
    """Inside, in this thread: no memory of the model can be written behind the recorder's back. A tensor whose value is not
    known prints as its shape."""
    guard = _Guard(recorder)
    storages = {name: guard.storage_method(name) for name in _STORAGE_WRITERS if hasattr(torch.UntypedStorage, name)}
    with ExitStack() as stack:
        stack.enter_context(patched(torch.UntypedStorage, **storages))
        stack.enter_context(
            patched(
                torch.Tensor,
                __format__=guard.format(torch.Tensor.__format__),
                numpy=guard.numpy(torch.Tensor.numpy),
                tolist=guard.tolist(torch.Tensor.tolist),
                __dlpack__=guard.export(torch.Tensor.__dlpack__, "__dlpack__"),
            )
        )
        stack.enter_context(patched(torch.utils, swap_tensors=guard.swap(torch.utils.swap_tensors)))
        stack.enter_context(patched(torch._C, _swap_tensor_impl=guard.swap_back(torch._C._swap_tensor_impl)))
        stack.enter_context(patched(torch._tensor_str, _str=guard.text(torch._tensor_str._str)))
        for module in (torch, torch.utils.dlpack):
            stack.enter_context(patched(module, to_dlpack=guard.export(module.to_dlpack, "to_dlpack")))
        yield
        guard.compare()


class _Guard:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._thread = threading.get_ident()
        #: (array handed out, what it was copied from, where): compared at the end.
        self._arrays: list[tuple[Any, Any, str]] = []

    def _elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _refuse(self, op: str, key: int, what: str) -> ProbeError:
        recorder = self._recorder
        owners = recorder.inventory.on_storage(key)
        name = owners[0].full_name if owners else f"a tensor made from {recorder.loading()}"
        return recorder.fail(
            f"{op} {what} {name} while loading {recorder.loading()}, at {code_line()}",
            hint=_HINT,
        )

    def storage_method(self, name: str) -> Callable[..., Any]:
        """A storage's method that writes: refused for what the recorder follows."""
        original = getattr(torch.UntypedStorage, name)

        def write(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._elsewhere():
                key = storage._cdata
                if self._recorder.inventory.on_storage(key) or key in self._recorder.origins:
                    raise self._refuse(f"UntypedStorage.{name}", key, "writes the memory of")
            return original(storage, *args, **kwargs)

        return write

    def export(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """DLPack shares memory and cannot be watched."""

        def share(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._elsewhere():
                key = storage_key(tensor)
                if self._recorder.inventory.on_storage(key):
                    raise self._refuse(name, key, "shares the memory of")
                if tensor.device.type == "meta":
                    tensor = self._recorder.real_value(tensor, name).clone()
            return original(tensor, *args, **kwargs)

        return share

    def swap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Swapping exchanges what two Python objects are; what holds either of them would see it."""

        def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
            if not self._elsewhere():
                for tensor in (one, other):
                    if self._recorder.inventory.owners(tensor):
                        raise self._refuse("torch.utils.swap_tensors", storage_key(tensor), "replaces")
            original(one, other)

        return swap_tensors

    def swap_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The last step of `swap_tensors`, for code that imported it by name: class and attributes have been swapped."""

        def swap_impl(one: torch.Tensor, other: torch.Tensor) -> None:
            if not self._elsewhere():
                for tensor in (one, other):
                    if self._recorder.inventory.owners(tensor):
                        one.__class__, other.__class__ = other.__class__, one.__class__
                        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
                        raise self._refuse("torch.utils.swap_tensors", storage_key(tensor), "replaces")
            original(one, other)

        return swap_impl

    def text(self, original: Callable[..., str]) -> Callable[..., str]:
        """`repr` of a tensor: loading code that logs one must not fail for it."""

        def text(tensor: torch.Tensor, **kwargs: Any) -> str:
            if not self._elsewhere() and not self._recorder.values.can_follow(storage_key(tensor), tensor):
                with _disable_current_modes():
                    tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return original(tensor, **kwargs)

        return text

    def format(self, original: Callable[..., str]) -> Callable[..., str]:
        """A scalar in an f-string: its value where it is known or asked for in a format, else its shape."""

        def format(tensor: torch.Tensor, spec: str) -> str:
            if not self._elsewhere() and tensor.dim() == 0:
                if not spec and not self._recorder.values.can_follow(storage_key(tensor), tensor):
                    return repr(tensor)
                tensor = self._recorder.real_value(tensor, "format")
            return original(tensor, spec)

        return format

    def tolist(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`tolist()` reads meta tensors without an operator, and real ones element by element."""

        def tolist(tensor: torch.Tensor) -> Any:
            if not self._elsewhere():
                tensor = self._recorder.real_value(tensor, "tolist")
            return original(tensor)

        return tolist

    def numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`numpy()` with real values; a copy wherever the memory belongs to the model or to a source."""

        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._elsewhere():
                return original(tensor, *args, **kwargs)
            recorder = self._recorder
            owners = recorder.inventory.on_storage(storage_key(tensor))
            if not owners and tensor.device.type != "meta":
                recorder.real_value(tensor, "numpy")
                return original(tensor, *args, **kwargs)
            shared = original(recorder.real_value(tensor, "numpy"), *args, **kwargs)
            name = recorder.describe(tensor)
            where = f"{name} through numpy() while loading {recorder.loading()}, at {code_line()}"
            handed = shared.copy()
            self._arrays.append((handed, shared, where))
            return handed

        return numpy

    def compare(self) -> None:
        """Raises ProbeError if an array that was handed out as a copy has been written to."""
        for handed, shared, where in self._arrays:
            if handed.tobytes() != shared.tobytes():
                raise self._recorder.fail(
                    f"the load writes {where}",
                    hint=_HINT,
                )
