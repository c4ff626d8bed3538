"""Results of cuda.bindings: unpacked, or raised as an error that explains itself in Chinese."""

# What a learner can do about it. Runtime and driver share these numbers.
MEANINGS = {
    1: "参数不对：检查句柄、指针和大小，常见原因是对象已经被销毁或回收",
    2: "显存不够：减小规模，或释放不再用的数组和图",
    35: "驱动太旧，或这台机器上没有可用的 GPU",
    100: "找不到 GPU",
    400: "句柄无效：流、事件或图已经被销毁，或属于另一个上下文",
    700: "内核访问了非法地址：图记录的缓冲可能已经被释放。出错以后这个进程的 CUDA 上下文不能再用，请重启内核",
    719: "内核运行中出错。出错以后这个进程的 CUDA 上下文不能再用，请重启内核",
    801: "这个操作在当前的 GPU、驱动或平台上不支持",
    900: "捕获期间不允许这个操作（例如同步、查询、cudaMalloc），这次捕获已经作废",
    901: "这次捕获在此之前就已经作废：真正的原因是更早的某个调用，这里只是回声",
    902: "两次独立的捕获被连到了一起",
    903: "参与捕获的流之间出现了不允许的依赖",
    904: "有分叉出去的流没有汇合回起始流，捕获就结束了",
    905: "捕获中的流等待了一个在捕获之外记录的事件",
    906: "阻塞流正在捕获时，又用到了传统默认流，两者之间会产生隐式依赖",
    907: "这个事件是在捕获中记录的，不能查询、同步或计时",
    908: "结束捕获的线程不是开始捕获的线程",
    910: "可执行图不能这样更新：拓扑、节点类型或函数变了",
}


class CudaError(RuntimeError):
    """A CUDA call returned an error.

    code: the number, such as 900. name: such as "cudaErrorStreamCaptureUnsupported".
    """

    def __init__(self, code: int, name: str):
        self.code, self.name = code, name
        meaning = MEANINGS.get(code)
        super().__init__(f"{name}（{code}）" + (f"：{meaning}" if meaning else ""))


def check_cuda(result: tuple):
    """Unpack what a function of cuda.bindings returned.

    result: (error, values…) as returned by cuda.bindings.runtime, .driver or .nvrtc.
    Returns None, the single value, or a tuple of the values. Raises CudaError if error is not success.
    """
    error, *values = result
    if int(error):
        raise CudaError(int(error), error.name)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
