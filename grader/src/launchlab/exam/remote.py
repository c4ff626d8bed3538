"""What a test cell holds of another process: names to call, and handles of what came back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from launchlab.exam.party import Party

BUILD_SECONDS = 60.0  # a call may compile kernels or build an engine


class Namespace:
    """``student`` and ``reference``: attribute access names a function of that process."""

    def __init__(self, party: Party):
        self._party = party

    def __getattr__(self, name: str) -> Remote:
        if name.startswith("_"):
            raise AttributeError(name)
        return Remote(self._party, name)

    def value(self, name: str) -> Any:
        """The global variable ``name``: plain data, or a `Handle`."""
        return self._party.ask("value", name=name)

    def define(self, source: str, name: str) -> Handle:
        """Run helper ``source`` there in a namespace of its own; returns its ``name`` as a `Handle`."""
        return self._party.ask("define", source=source, name=name)

    def plant(self, name: str) -> Handle:
        """An instrument of `launchlab.exam.planted`, by its name, as a `Handle`."""
        from launchlab.exam import planted  # out of a sandboxed process's sight, which imports this module, too

        return self.define(planted.source(name), name)


class Remote:
    """A function of the other process, by name. Calling it runs it there."""

    def __init__(self, party: Party, name: str):
        self.party, self.target = party, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.party.ask("call", target=self.target, args=list(args), kwargs=kwargs, seconds=BUILD_SECONDS)


class Handle:
    """An object of the other process: a graph, an array, a function, an engine …"""

    def __init__(self, party: Party, number: int, kind: str):
        self.party, self.id, self.kind, self.generation = party, number, kind, party.generation

    @property
    def target(self) -> Handle:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.party.ask("call", target=self, args=list(args), kwargs=kwargs, seconds=BUILD_SECONDS)

    def run(self, times: int = 1) -> None:
        """Launch (or call) it ``times`` times, then wait for the device."""
        repeat(self, times)

    def numpy(self) -> np.ndarray:
        """An array, copied to the host."""
        return self.party.ask("host", target=self)

    def instantiate(self) -> Handle:
        """A graph's definition instantiated by the examiner's agent: what is run is what was counted, whoever captured it.

        Raises `PartyError` for what holds no graph. `run` launches it; it goes with the exercise.
        """
        return self.party.ask("instantiate", target=self)

    def get(self, name: str) -> Any:
        """An attribute: plain data, or a `Handle`."""
        return self.party.ask("get", target=self, name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)


class _Method:
    def __init__(self, handle: Handle, name: str):
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self._handle
        return handle.party.ask("call", target=handle, method=self._name, args=list(args), kwargs=kwargs, seconds=BUILD_SECONDS)


def unit(work: Any) -> tuple[Party, Any, list, dict]:
    """Party, target, args and kwargs of something repeatable: a handle, a function, or a partial of one."""
    args: list = []
    kwargs: dict = {}
    if isinstance(work, partial):
        args, kwargs, work = list(work.args), dict(work.keywords), work.func
    if not isinstance(work, (Handle, Remote)):
        raise TypeError(f"not something to run: {type(work).__name__}")
    return work.party, work.target, args, kwargs


def repeat(work: Any, times: int, *, sync: bool = True, state: Any = None, start: Any = None) -> Any:
    """Run ``work`` ``times`` times there; with ``sync`` wait for the device.

    ``state``, ``start``: a staged buffer, set to ``start`` before the runs and returned after them.
    """
    party, target, args, kwargs = unit(work)
    return party.ask("repeat", target=target, args=args, kwargs=kwargs, times=int(times), sync=sync, state=state, start=start)
