"""The exam: three processes, of which one believes nothing that it did not measure itself.

In a notebook the names below examine the notebook's own kernel (open mode). Under
``nbgrader autograde`` the same test cells run in the examiner with sealed counterparts.

Who is who, from the inside out:

* `agent`     answers asks in a learner's or the reference's process; never believed
* `kernel`    one such process, from outside: start, ask, pause, kill; `sandbox` wraps it
* `party`     translates asks, buffers and handles; in open mode it is this very process
* `process`   a party in a kernel, with a notebook's cells run in it; started anew after accidents
* `examine`   the examiner: `Master` (the solution notebook), `Reference` (its process), verdicts
* `check`     what test cells call; leaves records. `timing` measures, `judge` decides from records
* `planted`   instruments that test cells plant in the other two processes
* `report`, `show`  verdicts as data, and as outputs of a notebook
"""

import numpy as _np

from launchlab.device import identity as _identity
from launchlab.exam.check import Check as _Check
from launchlab.exam.check import alone_on as _alone_on
from launchlab.exam.memory import Buffer as on_gpu
from launchlab.exam.party import OpenParty as _OpenParty
from launchlab.exam.remote import Namespace as _Namespace

_here = _OpenParty()
student = _Namespace(_here)
reference = _Namespace(_here)
secret = _np.random.default_rng()
check = _Check(secret, announce=lambda line: print("✓", line), alone=lambda: _alone_on(_identity()))

__all__ = ["check", "on_gpu", "reference", "secret", "student"]
