"""Filter of system calls, a classic BPF program for bubblewrap's --seccomp.

It refuses what no program of plain computation needs and kernels have had holes in. Namespaces, the missing
capabilities and the resource limits stand by themselves; this is a second wall. Numbers: the kernel's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. Form: seccomp(2), linux/filter.h.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

from mega_rl.rewards.sandbox import SandboxError

# name: (x86_64, aarch64); None: the architecture has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "move_pages": (279, 239), "migrate_pages": (256, 238),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # parts of the kernel with a history
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "fanotify_init": (300, 262), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "lookup_dcookie": (212, 18), "personality": (135, 92), "modify_ldt": (154, None),
    "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None),
    "nfsservctl": (180, 42), "vhangup": (153, 58),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "iopl": (172, None),
    "ioperm": (173, None), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "mknod": (133, None),
    "mknodat": (259, 33),
    # memory that belongs to no process, so that no limit of one counts it
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "semget": (64, 190), "mq_open": (240, 180),
    # the network, paths of sockets, and how much the kernel keeps for a socket
    "socket": (41, 198), "setsockopt": (54, 208),
}  # fmt: skip
ABSENT = {"clone3": (435, 435)}  # seccomp cannot inspect clone3's struct; ENOSYS makes libc fall back to clone
CLONE = (56, 220)
SOCKETPAIR = (53, 199)
IOCTL = (16, 29)
LAST_KNOWN = 456  # calls that are newer answer that there are none

NEW_NAMESPACES = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
AF_UNIX = 1
SOCK_STREAM, SOCK_TYPES = 1, 0xF  # each empty datagram takes most of a kilobyte of the kernel

# Offsets in struct seccomp_data; of arguments the low 32 bits: both machines are little-endian.
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24
_LOAD, _AND, _IF_EQUAL, _IF_ABOVE, _IF_BITS, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH, in the order of the tables' columns


def build_filter(machine: str | None = None) -> bytes:
    """Return the filter of a machine, by default this one's. Raises SandboxError."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(
            f"no filter of system calls for {machine}; legal: {', '.join(ARCHITECTURES)}; name a service with "
            "reward.sandbox=remote"
        )
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in _instructions(machine))


def _instructions(machine: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (code, jump if true, jump if false, constant); a jump counts skipped instructions."""
    column = [*ARCHITECTURES].index(machine)
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield _RETURN, 0, 0, _KILL  # a call of another architecture, as int 0x80
    yield _LOAD, 0, 0, _NUMBER
    yield _IF_ABOVE, 0, 1, LAST_KNOWN  # those of x32 among them
    yield _RETURN, 0, 0, _ERRNO | errno.ENOSYS
    for table, answer in ((REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                yield _IF_EQUAL, 0, 1, number
                yield _RETURN, 0, 0, _ERRNO | answer
    yield _IF_EQUAL, 0, 4, CLONE[column]
    yield _LOAD, 0, 0, _FIRST
    yield _IF_BITS, 0, 1, NEW_NAMESPACES
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _IF_EQUAL, 0, 7, SOCKETPAIR[column]
    yield _LOAD, 0, 0, _FIRST
    yield _IF_EQUAL, 0, 3, AF_UNIX
    yield _LOAD, 0, 0, _SECOND
    yield _AND, 0, 0, SOCK_TYPES
    yield _IF_EQUAL, 1, 0, SOCK_STREAM
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _IF_EQUAL, 0, 2 + 2 * len(TERMINAL_REQUESTS), IOCTL[column]
    yield _LOAD, 0, 0, _SECOND
    for request in TERMINAL_REQUESTS:
        yield _IF_EQUAL, 0, 1, request
        yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ALLOW
