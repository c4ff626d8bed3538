# ruff: noqa
# Sends the examiner frames that are no messages: unsigned, doubled, without parts, with parts of the wrong kinds.
# loses: advance
# %% before="advance"
def spit():
    kernel = get_ipython().kernel
    session, socket = kernel.session, kernel.iopub_socket
    header = session.msg("status")["header"]

    def signed(*parts):
        return [b"x", b"<IDS|MSG>", session.sign(parts), *parts]

    pack = session.pack
    good = [pack(header), pack({}), pack({}), pack({"execution_state": "idle"})]
    frames = [
        [b"x"],
        [b"<IDS|MSG>"],
        [b"x", b"<IDS|MSG>", b"0" * 64, *good],
        [b"x", b"<IDS|MSG>", b"", *good],
        signed(*good[:2]),
        signed(b"{", b"{", b"{", b"{"),
        signed(b"[]", b"[]", b"[]", b"[]"),
        signed(pack(header), b"3", b"{}", b"3"),
        signed(pack(header), b'"x"', b"{}", b'"x"'),
        signed(pack({**header, "msg_type": "stream"}), pack(kernel.get_parent("shell").get("header", {})), b"{}", b"{}"),
        signed(pack({**header, "msg_type": "stream"}), pack(kernel.get_parent("shell").get("header", {})), b"{}", b'{"name": 1, "text": 5}'),
        signed(pack({**header, "msg_type": "error"}), pack(kernel.get_parent("shell").get("header", {})), b"{}", b"[]"),
        signed(pack({**header, "msg_type": "comm_msg"}), b"{}", b"{}", b'{"comm_id": "launchlab", "data": []}'),
    ]
    same = signed(*good)
    for frame in [*frames, same, same]:
        socket.send_multipart(frame)


spit()

# %% solution="advance"
def advance(state, rounds):
    spit()
