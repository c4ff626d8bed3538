"""What GPU this machine has, asked of the driver itself: no CuPy, no CUDA context, no device memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Gpu:
    """GPU 0 as CUDA numbers it.

    driver: the driver's version ("580.65.06"); cuda: the newest CUDA that it speaks, (major, minor);
    compute_capability: (major, minor); memory: total device memory, bytes; uuid: what tells this GPU from its equals
    (32 hexadecimal digits).
    """

    name: str
    driver: str
    cuda: tuple[int, int]
    compute_capability: tuple[int, int]
    memory: int
    uuid: str = ""


def has_gpu() -> bool:
    """Whether CUDA can use a GPU here."""
    return gpu() is not None


@cache
def gpu() -> Gpu | None:
    """GPU 0, or None without a driver or a visible device. Asked once per process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, device = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)) or not number.value:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name, memory, version = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    uuid = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid_v2(uuid, device)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDriverGetVersion(ctypes.byref(version))

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    spoken = (version.value // 1000, version.value % 1000 // 10)
    return Gpu(
        name=name.value.decode(),
        driver=_driver() or f"CUDA {spoken[0]}.{spoken[1]}",
        cuda=spoken,
        compute_capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        memory=memory.value,
        uuid=bytes(uuid).hex(),
    )


def identity() -> str:
    """What tells GPU 0 from all others of this machine, its equals included; "none" without a GPU."""
    found = gpu()
    return found.uuid or found.name if found else "none"


def _driver() -> str:
    """The driver's version from NVML, which CUDA's own library does not tell; "" without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version)):
        return ""
    nvml.nvmlShutdown()
    return version.value.decode()


def free_memory() -> tuple[int, int] | None:
    """Bytes free and bytes in all on GPU 0, as NVML counts them for every process; None where it does not tell."""
    handle = _nvml_handle()
    if handle is None:
        return None
    nvml, device = handle
    told = _Memory()
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(told)):
        return None
    return told.free, told.total


def memory_of(pid: int) -> int | None:
    """Bytes that a process holds on GPU 0, its context included, as NVML counts them; None where it does not tell (WSL2, say)."""
    return processes().get(pid)


def processes() -> dict[int, int | None]:
    """Who computes on GPU 0, and the bytes that each holds there; empty where NVML does not tell."""
    handle = _nvml_handle()
    if handle is None:
        return {}
    nvml, device = handle
    number, told = ctypes.c_uint(256), (_Process * 256)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(number), told):
        return {}
    return {each.pid: None if each.used == _NOT_AVAILABLE else each.used for each in told[: number.value]}


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t: used is in bytes."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


@cache
def _nvml_handle() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVML and its handle of CUDA's GPU 0, by the bus that both know it by; None without NVML. Opened once per process."""
    if gpu() is None:
        return None
    try:
        cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, bus, handle = ctypes.c_int(), ctypes.create_string_buffer(64), ctypes.c_void_p()
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetPCIBusId(bus, len(bus), device):
        return None
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
        return None
    return nvml, handle
