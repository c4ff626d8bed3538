"""Times as people type and read them: on this machine's clock. nbgrader keeps UTC without saying so."""

from __future__ import annotations

from datetime import UTC, datetime


class Unreadable(Exception):
    """Not a time; the text (Chinese) shows how to write one."""


def typed(text: str) -> datetime:
    """A time as typed, on this machine's clock unless it names another zone; in UTC, to the second. Raises `Unreadable`."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).replace(microsecond=0)
    except (ValueError, OverflowError):
        raise Unreadable(f"看不懂时间“{text}”。请写成 '2026-11-30 18:00'。") from None


def shown(time: datetime) -> str:
    """A time, to the minute, on this machine's clock."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M")


def kept(time: datetime) -> datetime:
    """A time as the gradebook keeps it."""
    return time.astimezone(UTC).replace(tzinfo=None)


def told(time: datetime) -> datetime:
    """A time of the gradebook's."""
    return time.replace(tzinfo=UTC)


def lateness(handed_in: datetime, due: datetime) -> str:
    """How late that is, in words; empty if it is not."""
    hours, minutes = divmod(int((handed_in - due).total_seconds()) // 60, 60)
    return f"迟交 {hours} 小时 {minutes} 分" if handed_in > due else ""
