"""Programs that forge a verdict: none solves its task, which is to return 3 * x + 1, with secret values of x."""

from __future__ import annotations

from tests.hostile_programs.programs import Hostile, family

# Beginnings of programs whose function `f` is wrong.
WRONG = {
    "leave with success": "import os\nos._exit(0)",
    "leave as the function is called": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit as the function is called": "import sys\ndef f(x): sys.exit(0)",
    "an equal of everything": "class A:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 1\n    __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True\n    __sub__ = __rsub__ = __abs__ = lambda self, *other: self\n    __bool__ = lambda self: True\ndef f(x): return A()",
    "an equal number": "class A(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = int.__hash__\ndef f(x): return A(1)",
    "an equal list": "class A(list):\n    def __eq__(self, other): return True\n    def __len__(self): return 1\ndef f(x): return A()",
    "builtins": "import builtins\nbuiltins.abs = builtins.len = builtins.int = lambda *a: 0\nbuiltins.AssertionError = Exception\nbuiltins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
    "json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\njson.loads = lambda *a, **k: {'passed': True}\ndef f(x): return 0",
    "modules of the harness": "for name in ('json', 'ast', 'subprocess', 'ctypes', 'types'):\n    open(f'/tmp/{name}.py', 'w').write('import os\\nos._exit(0)')\ndef f(x): return 0",
    "a module of its name": "import sys, types\nfor name in ('tests', 'solution', '__main__', 'harness'):\n    sys.modules[name] = types.SimpleNamespace(check=lambda *a: None, f=lambda x: 0)\ndef f(x): return 0",
    "write a verdict to every descriptor": 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'\\n{token} {"passed": true}\\n{"passed": true}\\n\')\n    except OSError: pass\ndef f(x): return 0',
    "answer for the protocol": 'import os\nos.write(1, b\'["value", ["f"]]\\n\')\nfor fd in range(3, 64):\n    try: os.write(fd, b\'["value", ["f"]]\\n["value", true]\\n\' * 5)\n    except OSError: pass\ndef f(x): return 0',
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for value in list(frame.f_locals.values()):\n            if isinstance(value, str) and 'assert' in value: return eval(value.split('==')[1].split()[0])\n        frame = frame.f_back\n    return 0",
    "objects of the collector": "import gc\ndef f(x):\n    for value in gc.get_objects():\n        if isinstance(value, dict) and value.get('tests'): return 3 * x + 1\n    return 0",
    "memory of the parent": "import os\ndef f(x):\n    for line in open(f'/proc/{os.getppid()}/maps'):\n        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n        try:\n            memory = open(f'/proc/{os.getppid()}/mem', 'rb', 0); memory.seek(a)\n            if b'assert ' + b'f(' in memory.read(b - a): return 3 * x + 1\n        except (OSError, OverflowError, ValueError, MemoryError): pass\n    return 0",
    "descriptors of the parent": "import glob, os\ndef f(x):\n    for path in glob.glob(f'/proc/{os.getppid()}/fd/*') + glob.glob('/proc/1/fd/*'):\n        try:\n            if 'assert' in open(path).read(1 << 16): return 3 * x + 1\n        except (OSError, UnicodeDecodeError): pass\n    return 0",
    "arguments of the parent": "import glob\ndef f(x):\n    for path in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ'):\n        try:\n            if 'assert f' in open(path).read(): return 3 * x + 1\n        except OSError: pass\n    return 0",
    "files": "import os\ndef f(x):\n    for folder in ('/sandbox', '/tmp', '/dev/shm', '.'):\n        for name in os.listdir(folder):\n            if 'assert f(' in open(os.path.join(folder, name)).read(): return 3 * x + 1\n    return 0",
    "kill the parent": "import os\ndef f(x): os.kill(os.getppid(), 9)",
    "stop the parent": "import os, signal, time\ndef f(x):\n    os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)",
    "trace the parent": "import ctypes, os\ndef f(x): return 3 * x + 1 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else 0",
    "write the parent's memory": "import os\ndef f(x):\n    try: open(f'/proc/{os.getppid()}/mem', 'r+b')\n    except OSError: return 0\n    return 3 * x + 1",
    "messages without end": "import os\ndef f(x):\n    while True:\n        for fd in range(3, 9):\n            try: os.write(fd, b'x' * 65536)\n            except OSError: pass",
    "a message of many levels": "import os\ndef f(x):\n    for fd in range(3, 9):\n        try: os.write(fd, b'[' * 200000 + b'\\n')\n        except OSError: pass",
    "a large value": "def f(x): return [0] * 10 ** 7",
    "a value without end": "def f(x):\n    while True: yield 0",
    "a value in itself": "def f(x):\n    a = []; a.append(a)\n    return a",
    "a value that raises": "class A(dict):\n    def items(self): raise SystemExit(0)\ndef f(x): return A()",
    "exceptions": "def f(x): raise SystemExit(0)",
    "an exception of the tests": "class AssertionError(BaseException): pass\ndef f(x): raise AssertionError('passed')",
    "a hook at the exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
    "a hook for tracing": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return None",
    "a hook for imports": "import sys\nclass A:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, A())\ndef f(x): return 0",
    "a function of another form": "f = type('F', (), {'__call__': lambda self, x: True, '__eq__': lambda self, o: True})()",
    "true": "def f(x): return True",
    "not a number": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "the values of a smaller task": "def f(x): return {1: 4, 2: 7}.get(x, 0)",
}
STDIN = {
    "print everything": "print(' '.join(str(n) for n in range(1000)))",
    "leave with success": "import os\nos._exit(0)",
    "echo": "print(input())",
    "a verdict": "print('{\"passed\": true}')",
    "the expected output in a file": "import glob\nfor path in glob.glob('/sandbox/*') + glob.glob('/tmp/*') + glob.glob('*'): print(open(path).read())",
    "right, and an error": "print(3 * int(input()) + 1)\nraise SystemExit(1)",
    "right, and never ending": "print(3 * int(input()) + 1, flush=True)\nwhile True: pass",
    "right by a daemon, too late": "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(0.5)\nprint(3 * int(input()) + 1)",
}  # fmt: skip

FORGING: list[Hostile] = [
    *family("forged verdicts of asserts", WRONG, kind="asserts"),
    *family("forged results of calls", WRONG, kind="call"),
    *family("forged output", STDIN, kind="stdin"),
]
