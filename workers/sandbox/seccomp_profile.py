"""The system calls that sandboxes refuse, in the words that Docker and Podman take: the list of `seccomp` itself."""

from __future__ import annotations

import errno
import json
import platform
from functools import cache

from workers.sandbox import seccomp

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_ALL_BITS = 0xFFFFFFFF


@cache
def profile(machine: str | None = None, *, has_ip: bool) -> str:
    """JSON for `security_opt`. `machine` is the engine's, None = this one's. Raises KeyError for one without a list.

    Calls of another numbering, as x86-64 also takes, end the process.
    """
    known = seccomp.families(has_ip=has_ip)
    largest = max(known)
    families = [_compare(0, largest, "SCMP_CMP_GT")]
    families += [_compare(0, family, "SCMP_CMP_EQ") for family in range(largest) if family not in known]
    typed = [_masked(1, request) for request in (seccomp.TIOCSTI, seccomp.TIOCLINUX)]
    rules = [
        _refuse(list(seccomp.NOT_PERMITTED), errno.EPERM),
        _refuse(list(seccomp.NOT_THERE), errno.ENOSYS),
        *(_refuse(["socket"], errno.EAFNOSUPPORT, condition) for condition in families),
        *(
            _refuse([name], errno.EPERM, _compare(place, value, "SCMP_CMP_NE"))
            for name, (_, own) in seccomp.ITSELF.items()
            for place, value in own.items()
        ),
        *(_refuse(["ioctl"], errno.EPERM, condition) for condition in typed),
    ]
    architecture = _ARCHITECTURES[machine or platform.machine()]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture], "syscalls": rules})


def _refuse(names: list[str], error: int, condition: dict[str, object] | None = None) -> dict[str, object]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": [condition] if condition else []}


def _compare(index: int, value: int, how: str) -> dict[str, object]:
    return {"index": index, "value": value, "op": how}


def _masked(index: int, value: int) -> dict[str, object]:
    """The kernel looks at the lower word alone."""
    return {"index": index, "value": _ALL_BITS, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
