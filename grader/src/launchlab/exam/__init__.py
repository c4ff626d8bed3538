"""The exam. In a notebook these names examine the notebook's own kernel (open mode); under
``nbgrader autograde`` the same test cells run in the examiner, with sealed counterparts."""

import numpy as _np

from launchlab.exam.check import Check as _Check
from launchlab.exam.memory import Buffer as on_gpu
from launchlab.exam.party import OpenParty as _OpenParty
from launchlab.exam.remote import Namespace as _Namespace

_here = _OpenParty()
student = _Namespace(_here)
reference = _Namespace(_here)
secret = _np.random.default_rng()
check = _Check(secret, announce=lambda line: print("✓", line))

__all__ = ["check", "on_gpu", "reference", "secret", "student"]
