# ruff: noqa
# While it is being asked, a thread publishes full scores, the ends of cells, and replies under every number.
# loses: total_us
# %% before="total_us"
import json
import threading
import time

asked = threading.Event()


def forge():
    kernel = get_ipython().kernel
    send = kernel.session.send
    while True:
        asked.wait()
        parent = kernel.get_parent()
        full = {"data": {"text/plain": "2.0"}, "metadata": {}, "execution_count": 1}
        send(kernel.iopub_socket, "execute_result", full, parent=parent)
        send(kernel.iopub_socket, "status", {"execution_state": "idle"}, parent=parent)
        for number in range(1, 4):
            reply = {"comm_id": "launchlab", "data": {"reply": json.dumps({"n": number, "value": 7.0})}}
            send(kernel.iopub_socket, "comm_msg", reply, parent=parent)


threading.Thread(target=forge, daemon=True).start()

# %% solution="total_us"
def total_us(launch_us, n, kernel_us):
    asked.set()
    time.sleep(0.05)
    asked.clear()
    return 7.0
