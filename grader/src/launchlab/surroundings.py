"""Where this process runs: Linux itself, WSL, a container; and whether it may make user namespaces. Read from files alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Surroundings:
    """wsl: 0 (no), 1 or 2. linux_driver: a Linux NVIDIA driver was installed inside WSL, where Windows' own belongs.
    container: "Docker", "Podman", "容器" (another kind) or "". forbidden: the setting of the kernel that forbids user
    namespaces, as sysctl names it, or "".
    """

    wsl: int = 0
    linux_driver: bool = False
    container: str = ""
    forbidden: str = ""


def look(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Surroundings:
    """What the files under ``root`` (the file system, or a picture of one) and the environment tell."""
    kernel = _read(root / "proc/sys/kernel/osrelease").lower()
    wsl = 0 if "microsoft" not in kernel else 2 if "wsl2" in kernel or (root / "dev/dxg").exists() else 1
    drivers = [root / folder / "libcuda.so.1" for folder in ("usr/lib/x86_64-linux-gnu", "usr/lib64")]
    return Surroundings(
        wsl=wsl,
        linux_driver=bool(wsl) and any(path.exists() for path in drivers),
        container=_container(root, environment),
        forbidden=_forbidden(root / "proc/sys"),
    )


def _container(root: Path, environment: Mapping[str, str]) -> str:
    if (root / "run/.containerenv").exists() or environment.get("container") == "podman":
        return "Podman"
    if (root / ".dockerenv").exists() or environment.get("container") == "docker":
        return "Docker"
    inside = environment.get("container") or re.search(r"/(docker|kubepods|lxc|containerd)", _read(root / "proc/1/cgroup"))
    return "容器" if inside else ""


def _forbidden(settings: Path) -> str:
    """Each kernel has some of the three: a limit of 0, Debian's old switch, and Ubuntu's rule of AppArmor."""
    for name, value in (
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        if _read(settings / name).strip() == value:
            return name.replace("/", ".")
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
