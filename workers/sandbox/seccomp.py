"""The system calls that sandboxes refuse, as a program for the kernel's filter; bubblewrap installs it.

A list of what is refused: what no build or test needs, and what reaches far into the kernel or beyond the namespaces.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
"""Instructions of the classic packet filter: load a word, jump if equal, jump if at least, and, return."""
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24)
"""Places in `struct seccomp_data`; arguments have 8 bytes, the lower word first."""
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
"""Bit of calls that x86-64 takes in a second numbering, around every rule."""

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> the kernel's number for it, and its column in the tables."""

NOT_PERMITTED = {
    # Other processes' memory and files. Namespaces keep the host's out; this keeps commands from their own server.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Programs and events in the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    # Files by number, around the file system that the sandbox sees.
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # Keys, which all sandboxes of one user share.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    # The machine itself.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
NOT_THERE = {
    # Programs know what to do without: clone3's flags lie in memory, where no filter can look.
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Memory that no process seems to have, and that outlives the command.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
ITSELF = {
    # Of another process they would break or starve the server, and so throw a bad episode away.
    "prlimit64": ((302, 261), {0: 0}),
    "sched_setaffinity": ((203, 122), {0: 0}),
    "sched_setscheduler": ((144, 119), {0: 0}),
    "sched_setparam": ((142, 118), {0: 0}),
    "sched_setattr": ((314, 274), {0: 0}),
    "setpriority": ((141, 140), {0: 0, 1: 0}),
    "ioprio_set": ((251, 30), {0: 1, 1: 0}),
}
"""Calls for the caller's own thread alone: numbers, and arguments (place -> value) with which they mean it."""
_SOCKET = (41, 198)
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Kinds of sockets that a network namespace holds in; AF_VSOCK, for one, reaches the machine's host from everywhere."""
IP = (socket.AF_INET, socket.AF_INET6)
"""Only for commands that have a loopback: a network that leads nowhere is still much of a kernel to attack."""
_IOCTL = (16, 29)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Type into a terminal that somebody else reads."""


def is_known() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in ARCHITECTURES


def families(*, has_ip: bool) -> tuple[int, ...]:
    """Kinds of sockets that commands may have."""
    return FAMILIES if has_ip else tuple(family for family in FAMILIES if family not in IP)


def program(*, has_ip: bool) -> bytes:
    """The filter for this machine, as `bwrap --seccomp` reads it. Raises KeyError where `is_known` says no."""
    architecture, column = ARCHITECTURES[platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(errno.ENOSYS),
    ]
    for calls, error in ((NOT_PERMITTED, errno.EPERM), (NOT_THERE, errno.ENOSYS)):
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                code += [(_EQUAL, 0, 1, number), _refuse(error)]
    known = families(has_ip=has_ip)
    kinds = [(_EQUAL, len(known) - place, 0, family) for place, family in enumerate(known)]
    code += _rule(_SOCKET[column], [(_LOAD, 0, 0, _ARGUMENTS[0]), *kinds, _refuse(errno.EAFNOSUPPORT)])
    for columns, own in ITSELF.values():
        checks = [
            ((_LOAD, 0, 0, _ARGUMENTS[place]), (_EQUAL, 1, 0, value), _refuse(errno.EPERM))
            for place, value in own.items()
        ]
        code += _rule(columns[column], [instruction for check in checks for instruction in check])
    typed = [(_LOAD, 0, 0, _ARGUMENTS[1]), (_EQUAL, 1, 0, TIOCSTI), (_EQUAL, 0, 1, TIOCLINUX)]
    code += _rule(_IOCTL[column], [*typed, _refuse(errno.EPERM)])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _refuse(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _REFUSE | error)


def _rule(number: int, body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Instructions for one call; what the body does not refuse is allowed. All start with the call's number loaded."""
    return [(_EQUAL, 0, len(body) + 1, number), *body, (_RETURN, 0, 0, _ALLOW)]
