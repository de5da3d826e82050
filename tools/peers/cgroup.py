"""A memory cgroup for a process that shall have less memory than the machine: version 1 or 2, made by root alone."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

# By version: the limit, the limit of swap (not everywhere), the most memory used so far (not everywhere).
_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.swap.max", "memory.peak"),
}
REMOVE_TRIES, REMOVE_PAUSE = 40, 0.05  # a group can go once the system has done with its last process


class GroupError(Exception):
    """Why there is none, in a sentence."""


@dataclass(frozen=True)
class Place:
    """A folder in which a group may be made."""

    version: int
    path: Path


def places(mounts: str, own: str) -> list[Place]:
    """Where to try, in order, from the texts of /proc/self/mountinfo and /proc/self/cgroup: in this process's own group
    and in the root, of version 1 where it has the memory controller, then of version 2.
    """
    paths = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[1 if controllers else 2] = path
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and "memory" not in options.split(",")):
            continue
        within = os.path.relpath(paths.get(version, "/"), root)  # in a container the mount shows a part of the tree
        if within != "." and not within.startswith(".."):
            found.append(Place(version, Path(mount, within)))
        found.append(Place(version, Path(mount)))
    return sorted(found, key=lambda place: place.version)


class Group:
    """A cgroup with a limit in bytes. It has no processes until their numbers are written to `procs`."""

    def __init__(self, place: Place, name: str, limit: int) -> None:
        self.limit, self.path = limit, place.path / name
        hard, swap, peak = _FILES[place.version]
        self.path.mkdir()
        self.procs, self._peak = self.path / "cgroup.procs", self.path / peak
        try:
            if place.version == 2 and not (self.path / hard).exists():
                (place.path / "cgroup.subtree_control").write_text("+memory")
            if not (self.path / hard).exists():
                raise FileNotFoundError(f"{place.path} has no memory controller")
            (self.path / hard).write_text(str(limit))
            with contextlib.suppress(OSError):  # a kernel that does not count swap
                if (self.path / swap).exists():
                    (self.path / swap).write_text(str(limit if place.version == 1 else 0))
        except OSError:
            self.path.rmdir()
            raise

    def peak(self) -> int | None:
        """Most bytes at a time so far, page cache included, where the system says so."""
        try:
            return int(self._peak.read_text())
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Its processes have ended."""
        for _ in range(REMOVE_TRIES):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(REMOVE_PAUSE)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def make_group(limit: int, name: str = f"colibri-bench-{os.getpid()}") -> Group:
    """A group for processes that together have `limit` bytes. GroupError where that cannot be."""
    try:
        found = places(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        found = []
    reason = "no memory cgroup is mounted"
    for place in found:
        try:
            return Group(place, name, limit)
        except OSError as error:
            reason = f"{place.path}: {error.strerror or error}"
    raise GroupError(f"no memory cgroup can be made here ({reason}); that takes root")
