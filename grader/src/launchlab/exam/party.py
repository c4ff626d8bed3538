"""A party that an examiner asks; in open mode it is this very process."""

from __future__ import annotations

import math
import time
from typing import Any

from launchlab.exam.agent import Agent
from launchlab.exam.memory import Block, Buffer, CudaError
from launchlab.exam.remote import Handle
from launchlab.exam.wire import BufferRef, Ref, WireError, clean, decode, encode

ASK_SECONDS = 20.0
REFERENCE_SECONDS = 240.0  # of the reference for an exercise: it builds engines of real models, on slow machines too


class PartyError(Exception):
    """The party's code raised; ``info`` is `launchlab.exam.agent.describe`'s dictionary."""

    def __init__(self, info: dict, party: Party):
        self.party = party
        bases = info.get("bases")
        self.info = {
            "type": clean(info.get("type") or "Exception", 80), "message": clean(info.get("message") or "", 500), "line": clean(info.get("line") or "", 200),
            "own": bool(info.get("own")), "bases": [clean(base, 80) for base in bases[:20]] if type(bases) is list else [],
        }
        super().__init__(f"{self.info['type']}: {self.info['message']}")


class PartyLost(Exception):
    """The party died or stayed silent; ``timed_out`` tells which, the text says how (Chinese)."""

    def __init__(self, text: str, party: Party, timed_out: bool = False):
        super().__init__(text)
        self.party = party
        self.timed_out = timed_out


class Party:
    """Asks an agent, and translates buffers and handles. What `allow` gave bounds every ask. ``asked``: seconds of all asks."""

    def __init__(self) -> None:
        self.asked = 0.0
        self._deadline: float | None = None  # monotonic seconds
        self._beside: tuple[Party, float] | None = None
        self._buffers: list[Buffer] = []
        self._lent = 0
        self.used = False
        self.generation = 0  # counts restarts: numbers of handles begin anew with each

    def allow(self, seconds: float | None, beside: Party | None = None) -> None:
        """From now on all asks together may take ``seconds``; None: each its own. What ``beside`` is asked meanwhile is not counted."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._beside = beside and (beside, beside.asked)

    def _left(self) -> float:
        """Seconds that are left of what was allowed."""
        if self._deadline is None:
            return math.inf
        other, before = self._beside or (self, self.asked)
        return self._deadline + min(other.asked - before, REFERENCE_SECONDS) - time.monotonic()

    def exchange(self, request: dict, blobs: list[bytes], seconds: float) -> tuple[Any, list[bytes]]:
        raise NotImplementedError

    def ask(self, op: str, *, seconds: float = ASK_SECONDS, **fields: Any) -> Any:
        """One ask; returns plain data or a `Handle`. Raises `PartyError` or `PartyLost`."""
        seconds = min(seconds, self._left())
        if seconds <= 0:
            raise PartyLost("这道练习的时间用完了", self, timed_out=True)
        blobs: list[bytes] = []
        request = {"op": op} | {name: encode(value, blobs, self._by_reference) for name, value in fields.items()}
        self.used, began = True, time.monotonic()
        try:
            value, out = self.exchange(request, blobs, seconds)
            return self._wrap(decode(value, out))
        except WireError as error:
            raise PartyError({"type": "WireError", "message": f"回答的格式不对（{error}）"}, self) from None
        finally:
            self.asked += time.monotonic() - began

    def _by_reference(self, value: Any) -> Any:
        if isinstance(value, Handle):
            if value.party is not self:
                raise WireError("a handle of another process cannot be passed here")
            if value.generation != self.generation:
                raise PartyLost("进程已经重新启动，先前得到的对象不在了", self)
            return Ref(value.id, value.kind)
        if isinstance(value, Buffer):
            return BufferRef(value.bind(self))
        raise WireError(f"cannot send a {type(value).__name__}")

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Handle(self, value.id, value.kind)
        if type(value) is list:
            return [self._wrap(item) for item in value]
        if type(value) is dict:
            return {key: self._wrap(item) for key, item in value.items()}
        return value

    def lend(self, buffer: Buffer) -> int:
        """Make ``buffer`` known to the agent: by CUDA IPC where both sides can, else staged."""
        self._buffers.append(buffer)
        self._lent += 1
        number = self._lent
        fields = {"buffer": number, "shape": list(buffer.shape), "dtype": buffer.dtype.str}
        block = self._block(buffer.nbytes)
        if block is not None:
            try:
                self.ask("lend", **fields, handle=block.handle())
                buffer.block, block = block, None
                return number
            except (PartyError, CudaError):
                pass  # no IPC between the two: staged
            finally:
                if block is not None:
                    self._take_back(block)
        self.ask("lend", **fields, handle=None)
        return number

    def _block(self, size: int) -> Block | None:
        return None

    def _take_back(self, block: Block) -> None:
        """A block that was lent, or offered, to the party."""
        block.free()

    def pause(self) -> None:
        """Keep the party from doing anything until `resume`; a party in this process cannot be kept."""

    def resume(self) -> None:
        """End of a `pause`."""

    def forget(self) -> None:
        """End of an exercise: handles and buffers made for it are no longer valid."""
        if not self.used:
            return
        try:
            self.ask("forget")
            self.used = False
        finally:
            for buffer in self._buffers:
                block, buffer.block = buffer.block, None
                if block is not None:
                    self._take_back(block)
            self._buffers.clear()


class OpenParty(Party):
    """Open mode: the names of the notebook's own kernel, asked in process.

    Nothing is secret here and nothing is believed: open mode is for a learner's own checks
    and for authors. Errors of the code under test come through with their own traceback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._agent: Agent | None = None

    def exchange(self, request: dict, blobs: list[bytes], seconds: float) -> tuple[Any, list[bytes]]:
        if self._agent is None:
            self._agent = Agent(_notebook_namespace())
        return self._agent.perform(request, blobs)


def _notebook_namespace() -> dict[str, Any]:
    import __main__

    return vars(__main__)
