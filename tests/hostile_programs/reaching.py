"""Programs that reach out: to sockets, other processes, the kernel's files, paths, the interpreter, system calls."""

from __future__ import annotations

from mega_rl.rewards.sandbox.seccomp import REFUSED
from tests.hostile_programs.programs import Hostile, attempts, family

SOCKETS = attempts(
    "sockets",
    {
        "tcp to loopback": "socket.create_connection(('127.0.0.1', {port}), 1)",
        "tcp to loopback, IPv6": "socket.socket(socket.AF_INET6).connect(('::1', {port}))",
        "tcp to any address": "socket.create_connection(('0.0.0.0', {port}), 1)",
        "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "vsock": "socket.socket(socket.AF_VSOCK)",
        "the kernel's ciphers": "socket.socket(socket.AF_ALG)",
        "Bluetooth": "socket.socket(31, socket.SOCK_RAW, 1)",
        "a path's": "socket.socket(socket.AF_UNIX).connect({unix!r}) or True",
        "an abstract one": "socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r}) or True",
        "a server": "socket.create_server(('127.0.0.1', 0))",
        "a pair of the internet": "socket.socketpair(socket.AF_INET)",
        "http": "urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
        "names": "socket.getaddrinfo('example.com', 80)",
        "curl": "subprocess.run(['curl', '-m', '1', 'http://127.0.0.1:{port}/']).returncode == 0",
        "a shell's": "subprocess.run(['bash', '-c', 'echo x > /dev/tcp/127.0.0.1/{port}']).returncode == 0",
        "by system call": "ctypes.CDLL(None).socket(2, 1, 0) >= 0",
        "asyncio": "asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
    },
    before="import asyncio, ctypes, os, socket, subprocess, urllib.request",
)

OTHERS = attempts(
    "other processes",
    {
        "trace the first": "libc.ptrace(16, 1, 0, 0) == 0",
        "trace the parent": "libc.ptrace(16, os.getppid(), 0, 0) == 0",
        "trace itself": "libc.ptrace(0, 0, 0, 0) == 0",
        "kill the parent outside": "os.kill({pid}, 9) is None",
        "ask for the parent outside": "os.kill({pid}, 0) is None",
        "kill everybody else": "os.kill(-1, 0) is None and False",
        "kill the group outside": "os.killpg({pid}, 0) is None",
        "limits of another": "__import__('resource').prlimit({pid}, 7)",
        "its descriptor": "os.pidfd_open({pid})",
        "priority of another": "os.setpriority(os.PRIO_PROCESS, {pid}, 5) is None",
        "scheduler of another": "os.sched_getaffinity({pid})",
        "signals by queue": "libc.sigqueue({pid}, 0, 0) == 0",
        "read its memory": "libc.process_vm_readv(1, 0, 0, 0, 0, 0) == 0",
        "its session": "os.getsid({pid})",
    },
    before="import ctypes, os\nlibc = ctypes.CDLL(None)",
)

KERNEL_FILES = attempts(
    "files of the kernel",
    {
        **{
            f"write {path}": f"os.write(os.open({path!r}, os.O_WRONLY), b'1')"
            for path in (
                "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
                "/proc/sys/vm/drop_caches", "/proc/sys/kernel/randomize_va_space", "/proc/self/uid_map",
                "/proc/self/setgroups", "/proc/kcore", "/proc/1/comm", "/proc/irq/default_smp_affinity",
                "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/cgroup.procs", "/proc/sys/fs/file-max",
            )
        },
        **{
            f"read {path}": f"open({path!r}, 'rb').read(1)"
            for path in (
                "/proc/kcore", "/proc/kmsg", "/proc/vmallocinfo", "/proc/1/mem", "/proc/1/stack", "/dev/mem", "/dev/kmsg",
                "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse", "/dev/console", "/dev/tty", "/dev/net/tun",
                "/dev/loop-control", "/etc/shadow", "/etc/passwd",
            )
        },
        "the first's environment": "{secret!r}.encode() in open('/proc/1/environ', 'rb').read()",
        "the first's root": "os.path.exists('/proc/1/root' + {secret_file!r})",
        "the first's memory limit": "os.write(os.open('/proc/1/oom_score_adj', os.O_WRONLY), b'-1000')",
        "the first's descriptors": "[n for n in os.listdir('/proc/1/fd') if os.path.isdir(f'/proc/1/fd/{n}')]",
        "the secret in any environment": "any({secret!r}.encode() in open(f'/proc/{p}/environ', 'rb').read() for p in os.listdir('/proc') if p.isdigit())",
        "the secret in any command": "any({secret!r}.encode() in open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc') if p.isdigit())",
        "processes outside": "any(int(p) > 500 for p in os.listdir('/proc') if p.isdigit())",
    },
)  # fmt: skip

PATHS = attempts(
    "paths",
    {
        "the secret": "open({secret_file!r}).read()",
        "its folder": "os.listdir(os.path.dirname({secret_file!r}))",
        "above the root": "open('/../../../..' + {secret_file!r}).read()",
        "above the temporary folder": "open('/tmp/../..' + {secret_file!r}).read()",
        "by a symbolic link": "os.symlink({secret_file!r}, '/tmp/l') or open('/tmp/l').read()",
        "by a link to the root": "os.symlink('/', '/tmp/r') or open('/tmp/r' + {secret_file!r}).read()",
        "by a hard link": "os.link({secret_file!r}, '/tmp/h') or open('/tmp/h').read()",
        "by this process's root": "open('/proc/self/root' + {secret_file!r}).read()",
        "by the first's root": "open('/proc/1/root' + {secret_file!r}).read()",
        "by the first's folder": "open('/proc/1/cwd/..' + {secret_file!r}).read()",
        "by a descriptor": "[os.listdir(f'/proc/self/fd/{n}') for n in range(3, 64) if os.path.isdir(f'/proc/self/fd/{n}')]",
        "by a descriptor that is left": "[n for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}') and os.readlink(f'/proc/self/fd/{n}')[:5] != '/proc']",
        "write the canary": "open({secret_file!r}, 'w').write('x')",
        "make its folder": "os.makedirs(os.path.dirname({secret_file!r})) or open({secret_file!r}, 'w').write('x')",
        "the package": "open({package!r}).read()",
        "another root": "os.chroot('/tmp') is None",
        "a block device": "os.mknod('/tmp/d', 0o60600, os.makedev(8, 0)) is None",
        "a memory device": "os.mknod('/tmp/d', 0o20600, os.makedev(1, 1)) is None",
        "the home folder": "os.listdir('/root')[:1] not in ([], ['.pyenv'])",
        "variable data": "os.listdir('/var')",
        "an old root": "os.listdir('/oldroot') or os.listdir('/newroot')",
        "a program with a user's rights": "[n for n in ('su', 'sudo', 'mount', 'passwd', 'newuidmap') if os.system(n + ' --help </dev/null >/dev/null 2>&1; test $(id -u) = 0') == 0]",
        "a copy with a user's rights": "__import__('shutil').copy('/usr/bin/id', '/tmp/id') and os.chmod('/tmp/id', 0o4755) is None and os.system('test $(/tmp/id -u) = 0') == 0",
        "become root": "os.setuid(0) is None",
        "become another group": "os.setgroups([0]) is None",
        "become anybody": "os.setresuid(1000, 1000, 1000) is None",
        "give a file away": "open('/tmp/o', 'w').close() or os.chown('/tmp/o', 0, 0) is None",
    },
)  # fmt: skip

INTERPRETER = attempts(
    "interpreter",
    {
        "a module of the library": "open(json.__file__, 'a')",
        "a package": "open(os.path.join(site.getsitepackages()[0], 'evil.pth'), 'w')",
        "sitecustomize": "open(os.path.join(os.path.dirname(json.__file__), '..', 'sitecustomize.py'), 'w')",
        "the program itself": "open(sys.executable, 'r+b')",
        "compiled modules": "open(json.__cached__, 'r+b')",
        "a program of the system": "open('/usr/bin/env', 'r+b')",
        "its folder": "open('/usr/bin/evil', 'w')",
        "a preloaded library": "open('/etc/ld.so.preload', 'w')",
        "the sandbox's folder": "open('/sandbox/program.py', 'a')",
        "its name": "os.rename('/sandbox/program.py', '/sandbox/x') is None",
        "its rights": "os.chmod('/sandbox/program.py', 0o777) is None",
        "a mount over it": "ctypes.CDLL(None).mount(b'/tmp', b'/usr', None, 4096, None) == 0",
        "writable again": "ctypes.CDLL(None).mount(None, b'/usr', None, 32 | 4096, None) == 0",
    },
    before="import ctypes, json, os, site, sys",
)

MACHINE_CODE = """
import ctypes, mmap
code = {code!r}
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
print(ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
print("ESCAPED")
"""
SYSTEM_CALLS = [
    *attempts(
        "system calls",
        {name: f"libc.syscall({numbers[0]}, 0, 0, 0, 0, 0, 0) >= 0" for name, numbers in REFUSED.items() if name in (
            "mount", "umount2", "pivot_root", "setns", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup",
            "add_key", "keyctl", "kexec_load", "reboot", "swapon", "init_module", "finit_module", "delete_module",
            "acct", "quotactl", "syslog", "iopl", "ioperm", "fanotify_init", "open_by_handle_at", "name_to_handle_at",
            "memfd_create", "mq_open", "personality", "modify_ldt", "settimeofday", "sethostname", "fsopen",
            "open_tree", "move_mount", "process_vm_writev", "kcmp", "pidfd_getfd", "vhangup", "lookup_dcookie",
        )},
        before="import ctypes\nlibc = ctypes.CDLL(None)",
    ),
    *attempts(
        "system calls",
        {
            "unshare the user": "libc.unshare(0x10000000) == 0",
            "unshare mounts": "libc.unshare(0x00020000) == 0",
            "unshare processes": "libc.unshare(0x20000000) == 0",
            "unshare the network": "libc.unshare(0x40000000) == 0",
            "clone into a user namespace": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
            "clone3 into a user namespace": "libc.syscall(435, ctypes.byref((ctypes.c_uint64 * 11)(0x10000000)), 88) >= 0",
            "a call of x32": "libc.syscall(0x40000000 + 39) >= 0",
            "a call of tomorrow": "libc.syscall(700) >= 0",
            "rights back": "libc.prctl(47, 2, 21, 0, 0) == 0",
            "secure bits": "libc.prctl(28, 0x2f, 0, 0, 0) == 0",
            "a letter to the terminal": "libc.ioctl(0, 0x5412, b'x') == 0 or libc.ioctl(2, 0x5412, b'x') == 0",
            "a terminal of its own": "libc.ioctl(0, 0x540E, 1) == 0",
        },
        before="import ctypes, os\nlibc = ctypes.CDLL(None)",
    ),
    *family(
        "system calls",
        {
            "a call of the 32-bit kernel": MACHINE_CODE.format(code=bytes.fromhex("b814000000cd80c3")),
            "sysenter": MACHINE_CODE.format(code=bytes.fromhex("b8140000000f34c3")),
        },
    ),
]  # fmt: skip

ENVIRONMENT = family(
    "environment",
    {
        "variables": "import os\nprint(dict(os.environ))",
        "variables of the kernel": "print(open('/proc/self/environ').read())",
        "arguments": "import glob\nfor path in glob.glob('/proc/*/cmdline'): print(open(path).read())",
        "all readable files": "import os\nfor folder, _, names in os.walk('/'):\n    if folder.startswith(('/usr', '/proc', '/dev', '/root')): continue\n    for name in names:\n        try: print(folder, name, open(os.path.join(folder, name), errors='replace').read(200))\n        except OSError: pass",
        "mounts": "print(open('/proc/self/mountinfo').read())",
        "own memory": "import re\ntext = b''\nfor line in open('/proc/self/maps'):\n    a, b = (int(n, 16) for n in line.split()[0].split('-'))\n    if 'r' in line.split()[1] and b - a < 1 << 24:\n        try:\n            m = open('/proc/self/mem', 'rb', 0); m.seek(a); text += m.read(b - a)\n        except (OSError, OverflowError, ValueError): pass\nprint('{half}' + '{other}' in text.decode('latin-1').replace(repr('{half}'), ''))",
    },
)  # fmt: skip

REACHING: list[Hostile] = [*SOCKETS, *OTHERS, *KERNEL_FILES, *PATHS, *INTERPRETER, *SYSTEM_CALLS, *ENVIRONMENT]
