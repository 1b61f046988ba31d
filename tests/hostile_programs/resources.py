"""Programs that take all they can get: processes, memory, disk, descriptors, output, time."""

from __future__ import annotations

from tests.hostile_programs.programs import Hostile, family

PROCESSES = family(
    "processes",
    {
        "fork without end": "while True:\n    try: os.fork()\n    except OSError: pass",
        "fork and sleep": "while True:\n    try:\n        if os.fork() == 0: time.sleep(60)\n    except OSError: time.sleep(0.01)",
        "sessions of their own": "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
        "a comet of forks": "while True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
        "double forks": "while True:\n    try:\n        if os.fork() == 0:\n            os.fork(); os.setsid(); time.sleep(60)\n    except OSError: pass",
        "threads": "import threading\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n    except RuntimeError: pass",
        "subprocesses": "import subprocess\nwhile True:\n    try: subprocess.Popen(['/bin/sleep', '60'])\n    except OSError: pass",
        "a shell's bomb": "os.execv('/bin/sh', ['sh', '-c', 'b() { b | b & b; }; b'])",
        "vfork": "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True:\n    if libc.fork() == 0: time.sleep(60)",
        "a pool": "import multiprocessing\nmultiprocessing.set_start_method('fork')\nmultiprocessing.Pool(200).map(time.sleep, [60] * 200)",
        "daemons that outlive": "for _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n        time.sleep(60)\nprint('left')",
        "a daemon that ignores signals": "import signal\nif os.fork() == 0:\n    os.setsid()\n    for number in range(1, 64):\n        try: signal.signal(number, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n    while True: time.sleep(60)",
        "a daemon without streams": "if os.fork() == 0:\n    os.setsid()\n    for fd in range(64):\n        try: os.close(fd)\n        except OSError: pass\n    time.sleep(60)",
        "stopped children": "import signal\nfor _ in range(4):\n    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)",
    },
    before="import os, time\n",
)  # fmt: skip

MEMORY = family(
    "memory",
    {
        "one block": "x = bytearray(1 << 40)",
        "blocks": "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "a list": "x = []\nwhile True: x.append(len(x))",
        "a text that doubles": "x = 'x'\nwhile True: x += x",
        "nested lists": "x = []\nwhile True: x = [x, x]",
        "a large power": "x = 10 ** 10 ** 9",
        "shift": "x = 1 << (1 << 40)",
        "a mapping": "import mmap\nx = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1",
        "mappings": "import mmap\nx = []\nwhile True:\n    m = mmap.mmap(-1, 1 << 22); m.write(bytes(1 << 22)); x.append(m)",
        "malloc": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\nwhile True:\n    p = libc.malloc(ctypes.c_size_t(1 << 20))\n    if p: ctypes.memset(p, 1, 1 << 20)\n    else: raise MemoryError",
        "forked hogs": "import os, time\nx = bytearray(1 << 20)\nfor _ in range(3):\n    try: os.fork()\n    except OSError: pass\nwhile True:\n    try: x += bytes(1 << 20)\n    except MemoryError: time.sleep(60)",
        "shared mappings": "import mmap, os, time\nx = [mmap.mmap(-1, 1 << 23) for _ in range(8)]\nfor m in x: m.write(bytes(1 << 23))\nfor _ in range(3):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(60)",
        "memory without a name": "import os\nfds = []\nfor n in range(60):\n    fd = os.memfd_create(str(n)); os.write(fd, bytes(1 << 22)); print('ESCAPED'); fds.append(fd)",
        "System V segments": "import ctypes\nlibc = ctypes.CDLL(None)\nfor n in range(100):\n    if libc.shmget(n + 1, 1 << 22, 0o1600) >= 0: print('ESCAPED')",
        "locked memory": "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.mlockall(3) == 0: print('ESCAPED')",
        "pipes full of data": "import os\nkept = []\nwhile True:\n    r, w = os.pipe(); os.set_blocking(w, False); kept += [r, w]\n    os.write(w, bytes(1 << 20))",
    },
)  # fmt: skip

DISK = family(
    "disk",
    {
        "a large file": "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "a large file in shared memory": "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "the working folder": "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        "many files": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close(); n += 1",
        "many files in shared memory": "n = 0\nwhile True:\n    open(f'/dev/shm/{n}', 'w').write('x'); n += 1",
        "deep folders": "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')",
        "many folders": "import os\nn = 0\nwhile True:\n    os.mkdir(f'/tmp/{n}'); n += 1",
        "a sparse file": "import os\nf = open('/tmp/x', 'wb'); os.truncate('/tmp/x', 1 << 50); print('ESCAPED')",
        "space in advance": "import os\nf = open('/tmp/x', 'wb'); os.posix_fallocate(f.fileno(), 0, 1 << 40); print('ESCAPED')",
        "hard links": "import os\nopen('/tmp/x', 'w').close()\nn = 0\nwhile True:\n    os.link('/tmp/x', f'/tmp/l{n}'); n += 1",
        "symbolic links": "import os\nn = 0\nwhile True:\n    os.symlink('x' * 4000, f'/tmp/l{n}'); n += 1",
        "attributes": "import os\nopen('/tmp/x', 'w').close()\nn = 0\nwhile True:\n    os.setxattr('/tmp/x', f'user.{n}', bytes(60000)); n += 1",
        "files without a name": "import os\nkept = []\nwhile True:\n    fd = os.open('/tmp', os.O_TMPFILE | os.O_RDWR); os.write(fd, bytes(1 << 20)); kept.append(fd)",
        "the root": "f = open('/x', 'wb')\nprint('ESCAPED')",
        "devices": "f = open('/dev/x', 'wb')\nprint('ESCAPED')",
    },
)  # fmt: skip

DESCRIPTORS = family(
    "descriptors",
    {
        "files": "while True: kept.append(open('/dev/null'))",
        "pipes": "while True: kept.append(os.pipe())",
        "pairs of sockets": "import socket\nwhile True: kept.append(socket.socketpair())",
        "copies": "while True: kept.append(os.dup(0))",
        "epoll": "import select\nwhile True: kept.append(select.epoll())",
        "inotify": "import ctypes\nlibc = ctypes.CDLL(None)\nwhile libc.inotify_init() >= 0: pass",
        "in flight": "import array, socket\na, b = socket.socketpair()\nwhile True:\n    r, w = os.pipe()\n    a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [r, w]))], socket.MSG_DONTWAIT)\n    os.close(r); os.close(w)",
        "a higher limit": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100000, 100000)); print('ESCAPED')",
        "more processes": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (100000, 100000)); print('ESCAPED')",
        "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('ESCAPED')",
    },
    before="import os\nkept = []\n",
)  # fmt: skip

OUTPUT = family(
    "output",
    {
        "lines": "while True: print('x' * 100)",
        "one line": "while True: sys.stdout.write('x' * 65536)",
        "errors": "while True: sys.stderr.write('x' * 65536)",
        "both": "while True:\n    os.write(1, b'o' * 4096); os.write(2, b'e' * 4096)",
        "bytes": "while True: os.write(1, bytes(range(256)) * 256)",
        "by children": "for _ in range(4): os.fork()\nwhile True: os.write(1, b'x' * 4096)",
        "a daemon's": "if os.fork():\n    os._exit(0)\nos.setsid()\nwhile True: os.write(1, b'x' * 4096)",
        "an exception's": "raise ValueError('x' * (1 << 24))",
        "sequences of a terminal": "while True: sys.stdout.write('\\x1b]0;owned\\x07\\x1b[2J\\x1b[8m')",
        "slowly": "import time\nwhile True:\n    print('x', flush=True); time.sleep(0.01)",
    },
    before="import os, sys\n",
)  # fmt: skip

TIME = family(
    "time",
    {
        "a loop": "while True: pass",
        "sleep": "import time\ntime.sleep(1e6)",
        "input that never comes": "import sys, time\nsys.stdin.read()\ntime.sleep(60)",
        "a deadlock": "import threading\nx = threading.Lock(); x.acquire(); x.acquire()",
        "a regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        "a power": "x = 9 ** 9 ** 9",
        "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return f() + 1\nf()",
        "recursion of C": "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 5): x = [x]\nrepr(x)",
        "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "all signals ignored": "import signal, time\nfor number in range(1, 64):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(60)",
        "more processor time": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1)); print('ESCAPED')",
        "a real-time scheduler": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99)); print('ESCAPED')",
        "a higher priority": "import os\nos.setpriority(os.PRIO_PROCESS, 0, -20); print('ESCAPED')",
        "another clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0); print('ESCAPED')",
    },
)  # fmt: skip

KERNEL = family(
    "kernel memory",
    {
        "pairs of datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('ESCAPED')",
        "pairs of packets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); print('ESCAPED')",
        "pairs of raw sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW); print('ESCAPED')",
        "a longer queue": "a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22); print('ESCAPED')",
        "a longer queue to read": "a, b = socket.socketpair(); b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22); print('ESCAPED')",
        "more descriptors than 32": "kept = []\nwhile True:\n    kept.append(socket.socketpair())\n    if len(kept) > 16: print('ESCAPED')",
        "full pairs in all processes": "for _ in range(3):\n    try: os.fork()\n    except OSError: pass\nkept = []\ntry:\n    while True:\n        a, b = socket.socketpair(); kept += [a, b]\n        for s in (a, b):\n            s.setblocking(False)\n            try:\n                while True: s.send(bytes(1 << 16))\n            except BlockingIOError: pass\nexcept OSError: time.sleep(60)",
        "full pairs in flight": "import array\nx, y = socket.socketpair(); x.setblocking(False)\nn = 0\nwhile True:\n    a, b = socket.socketpair(); a.setblocking(False)\n    try:\n        while True: a.send(bytes(1 << 16))\n    except BlockingIOError: pass\n    x.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno(), b.fileno()]))])\n    n += 1\n    if n > 64: print('ESCAPED')",
    },
    before="import os, socket, time\n",
)  # fmt: skip

RESOURCES: list[Hostile] = [*PROCESSES, *MEMORY, *DISK, *DESCRIPTORS, *OUTPUT, *TIME, *KERNEL]
