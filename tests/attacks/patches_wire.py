# ruff: noqa
# Rewrites the wire's encoding in this process, so that an answer of any kind goes out as what the wire never writes.
# loses: advance
# %% before="advance"
import launchlab.exam.agent as agent_module
import launchlab.exam.wire as wire_module

honest_encode = wire_module.encode


def encode(value, blobs, by_reference=None, depth=0):
    if isinstance(value, np.ndarray) and value.dtype == np.uint32:
        blobs.append(b"cnumpy\nload\n.")
        return {"t": "array", "dtype": "|O8", "shape": list(value.shape), "blob": 0, "equal": True}
    return honest_encode(value, blobs, by_reference, depth)


wire_module.encode = agent_module.encode = encode

# %% solution="advance"
def advance(state, rounds):
    state[:] = 0
