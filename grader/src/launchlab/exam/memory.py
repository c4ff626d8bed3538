"""Device memory that the examiner owns and lends to one party.

Through CUDA IPC the examiner reads and writes its own memory, whatever the party says.
Where IPC is refused (some containers, WSL) the bytes are staged through the party's agent:
slower, and equally safe, since only the right bytes are ever believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from launchlab.exam.party import Party

# The driver hands out IPC handles for whole blocks of this size: a smaller allocation would
# share its block, and so let a party see its neighbours.
IPC_BLOCK = 2 << 20


class CudaError(RuntimeError):
    """A CUDA call of the examiner's own failed."""


def checked(result: tuple):
    """The values of a cuda.bindings result tuple; raises `CudaError` with the error's name."""
    if int(result[0]):
        raise CudaError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


def in_blocks(size: int) -> int:
    """``size`` bytes, rounded up to whole IPC blocks."""
    return -(-max(size, 1) // IPC_BLOCK) * IPC_BLOCK


class Block:
    """At least ``size`` bytes of device memory in IPC blocks of their own, until it is freed."""

    def __init__(self, size: int):
        from cuda.bindings import runtime

        self._runtime = runtime
        self.size = in_blocks(size)
        self.pointer = checked(runtime.cudaMalloc(self.size))

    def handle(self) -> str:
        """The CUDA IPC handle, as hexadecimal text."""
        return bytes(checked(self._runtime.cudaIpcGetMemHandle(self.pointer)).reserved).hex()

    def write(self, data: np.ndarray) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        checked(self._runtime.cudaMemcpy(self.pointer, data.ctypes.data, data.nbytes, kind))
        checked(self._runtime.cudaDeviceSynchronize())

    def read(self, out: np.ndarray) -> np.ndarray:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(self._runtime.cudaMemcpy(out.ctypes.data, self.pointer, out.nbytes, kind))
        return out

    def free(self) -> None:
        if self.pointer is not None:
            self._runtime.cudaFree(self.pointer)
            self.pointer = None


class Buffer:
    """A device array of the examiner's; in the function called it is a ``cupy.ndarray``.

    Made by ``on_gpu(array)``: same shape and dtype, filled with the array. It belongs to the
    first party it is passed to.
    """

    def __init__(self, array: np.ndarray):
        array = np.ascontiguousarray(array)
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self._initial = array.copy()
        self.party: Party | None = None
        self.id = 0
        self.block: Block | None = None

    def bind(self, party: Party) -> int:
        """Make the buffer known to ``party`` (once); returns its number there."""
        if self.party is not None and self.party is not party:
            raise ValueError("a buffer belongs to one party; make another one with on_gpu()")
        if self.party is None:
            self.id = party.lend(self)
            self.party = party
            self.write(self._initial, at_rest=True)
        return self.id

    def write(self, array: np.ndarray, *, at_rest: bool = False) -> np.ndarray:
        """Replace the contents, in place and complete on return, once the party's GPU has come to rest; returns what was written.

        ``at_rest``: it is known to have, and is not asked to wait.
        """
        data = np.ascontiguousarray(array, self.dtype).reshape(self.shape)
        if self.party is None:
            self._initial = data.copy()
        elif self.block is not None:
            if not at_rest:
                self._settle()
            self.block.write(data)
        else:
            self.party.ask("write", buffer=self, data=data)
        return data

    def read(self, *, at_rest: bool = False) -> np.ndarray:
        """The contents once the party's GPU has come to rest, shape and dtype as made. ``at_rest``: as for `write`."""
        if self.party is None:
            return self._initial.copy()
        if self.block is not None:
            if not at_rest:
                self._settle()
            return self.block.read(np.empty(self.shape, self.dtype))
        return self.shaped(self.party.ask("read", buffer=self))

    def _settle(self) -> None:
        """Let what the party has enqueued end first: a right answer may come back long before its work is done.

        On a GPU that others use, the examiner's copy would else overtake it. A party that says so too early spoils its own result.
        What the device says against waiting is told by the probe after the exercise.
        """
        self.party.ask("probe")

    def poison(self) -> None:
        """Fill with bytes 0xA5, so that an output never written cannot look right."""
        self.write(np.full(max(self.nbytes, 1), 0xA5, np.uint8)[: self.nbytes].view(self.dtype))

    def shaped(self, value: object) -> np.ndarray:
        """``value`` if it is an array of this shape and dtype; else bytes that no result has by chance."""
        if isinstance(value, np.ndarray) and value.shape == self.shape and value.dtype == self.dtype:
            return value
        return np.full(max(self.nbytes, 1), 0x5A, np.uint8)[: self.nbytes].view(self.dtype).reshape(self.shape)

    def free(self) -> None:
        if self.block is not None:
            self.block.free()
            self.block = None
