"""Programs and tests that ask what a verdict means: wrong programs that must fail, right ones that must pass, and tests
that check nothing, which must be refused."""

from __future__ import annotations

import itertools

from tests.hostile_programs.programs import Hostile

# Builtin: tests that read it, a right f, and what the name must give for a wrong f to pass if the tests took it.
READ = {
    "abs": ("assert abs(f(3.5) - 10.5) < 1e-6", "3 * x", "0"),
    "all": ("assert all(v > 2 for v in f(3))", "[x]", "True"),
    "any": ("assert any(v == 3 for v in f(3))", "[x]", "True"),
    "ascii": ("assert ascii(f(3)) == ascii(9)", "3 * x", "''"),
    "bin": ("assert bin(f(3)) == bin(9)", "3 * x", "''"),
    "bool": ("assert bool(f(3)) == bool(1)", "True", "0"),
    "bytes": ("assert bytes(f(3)) == bytes(3)", "x", "b''"),
    "chr": ("assert chr(f(65)) == chr(66)", "x + 1", "''"),
    "complex": ("assert complex(f(3)) == complex(9)", "3 * x", "0"),
    "dict": ("assert dict(f(3)) == dict([(3, 9)])", "[(x, 3 * x)]", "{}"),
    "divmod": ("assert divmod(f(3), 2) == divmod(9, 2)", "3 * x", "0"),
    "enumerate": ("n = 0\nfor n, v in enumerate(f(3)): assert v == 9\nassert f(3)[0] == 9", "[3 * x]", "[]"),
    "filter": ("assert list(filter(None, f(3))) == [9]", "[0, 3 * x]", "[9]"),
    "float": ("assert float(f(3)) == float(9)", "3 * x", "0"),
    "format": ("assert format(f(3)) == format(9)", "3 * x", "''"),
    "frozenset": ("assert frozenset(f(3)) == frozenset([9])", "[3 * x]", "0"),
    "getattr": ("assert getattr(f(3), 'real') == 9", "3 * x", "9"),
    "hasattr": ("assert hasattr(f(3), 'upper')", "'x'", "True"),
    "hash": ("assert hash(f(3)) == hash(9)", "3 * x", "0"),
    "hex": ("assert hex(f(3)) == hex(9)", "3 * x", "''"),
    "int": ("assert int(f(3)) == int('9')", "3 * x", "0"),
    "isinstance": ("assert isinstance(f(3), str)", "'x'", "True"),
    "issubclass": ("assert issubclass(type(f(3)), str)", "'x'", "True"),
    "iter": ("assert list(iter(f(3))) == [9]", "[3 * x]", "[9]"),
    "len": ("assert len(f(3)) == len('abc')", "'abc'", "0"),
    "list": ("assert list(f(3)) == list((9,))", "(3 * x,)", "[]"),
    "map": ("assert all(map(lambda v: v == 9, f(3)))", "[3 * x]", "[]"),
    "max": ("assert max(f(3)) == max([9, 3])", "[3 * x]", "0"),
    "min": ("assert min(f(3)) == min([9, 10])", "[3 * x]", "0"),
    "next": ("assert next(iter(f(3))) == 9", "[3 * x]", "9"),
    "oct": ("assert oct(f(3)) == oct(9)", "3 * x", "''"),
    "ord": ("assert ord(f(3)) == ord('a')", "'a'", "0"),
    "pow": ("assert pow(f(3), 2) == pow(9, 2)", "3 * x", "0"),
    "range": ("for i in range(2): assert f(i) == 3 * i\nassert f(5) >= 0", "3 * x", "[]"),
    "repr": ("assert repr(f(3)) == repr([9])", "[3 * x]", "''"),
    "reversed": ("assert list(reversed(f(3))) == list(reversed([9, 1]))", "[3 * x, 1]", "[]"),
    "round": ("assert round(f(3), 2) == round(9.001, 2)", "3 * x", "0"),
    "set": ("assert set(f((3, 4))) == set((4, 3))", "x", "0"),
    "slice": ("assert 'abcd'[slice(f(3))] == 'abcd'[slice(3)]", "x", "None"),
    "sorted": ("assert sorted(f(3)) == sorted([9, 3])", "[x, 3 * x]", "0"),
    "str": ("assert str(f(3)) == str(9)", "3 * x", "''"),
    "sum": ("assert sum(f(3)) == sum([9, 3])", "[x, 3 * x]", "0"),
    "tuple": ("assert tuple(f(3)) == tuple([9])", "[3 * x]", "()"),
    "type": ("assert type(f(3)) == type('')", "'x'", "0"),
    "zip": ("for a, b in zip(f(3), [9]): assert a == b\nassert f(3)[:0] == []", "[3 * x]", "[]"),
}
FORMS = {
    "function": "def {name}(*a, **k): return {lie}",
    "class": "class {name}:\n    def __new__(cls, *a, **k): return {lie}",
    "assignment": "globals()['{name}'] = lambda *a, **k: {lie}",
    "import *": "__all__ = ['f', '{name}']\ndef {name}(*a, **k): return {lie}",
}
MODULES = {
    "math": ("assert math.isclose(f(3), 9.0)", "isclose", "3 * x"),
    "re": ("assert re.fullmatch('a+', f(3))", "fullmatch", "'a' * x"),
    "itertools": ("assert list(itertools.chain(f(3))) == list(itertools.chain([9]))", "chain", "[3 * x]"),
    "collections": ("assert collections.Counter(f(3)) == collections.Counter([9])", "Counter", "[3 * x]"),
    "statistics": ("assert statistics.mean(f(3)) == statistics.mean([9])", "mean", "[3 * x]"),
    "json": ("assert json.dumps(f(3)) == json.dumps([9])", "dumps", "[3 * x]"),
    "operator": ("assert operator.eq(f(3), 9)", "eq", "3 * x"),
    "functools": ("assert functools.reduce(lambda a, b: a + b, f(3)) == 12", "reduce", "[x, 3 * x]"),
}


def judged(family: str, name: str, program: str, tests: object, *, passes: bool, **row: object) -> Hostile:
    """Return a program with the tests of its row."""
    return Hostile(family, name, program, "row", tests, row, passes)


def _shadowed() -> list[Hostile]:
    made = []
    for (name, (tests, right, lie)), (form, text) in itertools.product(READ.items(), FORMS.items()):
        whole = f"from solution import *\n{tests}" if "import" in form else tests
        wrong = f"def f(x): return None\n{text.format(name=name, lie=lie)}"
        own = f"def f(x): return {right}\n{text.format(name=name, lie='1' if lie == '0' else '0')}"
        made.append(judged("shadowed builtins", f"{name} as {form}", wrong, whole, passes=False))
        made.append(judged("own helpers of right programs", f"{name} as {form}", own, whole, passes=True))
    for name, (tests, attribute, right) in MODULES.items():
        for form, text in {
            "class": f"class {name}:\n    {attribute} = staticmethod(lambda *a, **k: 9)",
            "object": f"import types\n{name} = types.SimpleNamespace({attribute}=lambda *a, **k: 9)",
        }.items():
            wrong = f"def f(x): return [None]\n{text}"
            made.append(judged("shadowed modules", f"{name} as {form}", wrong, tests, passes=False))
        program = f"import {name}\ndef f(x): return {right}"
        made.append(judged("own helpers of right programs", f"module {name}", program, tests, passes=True))
    return made


CASES = "cases = [(1, 3), (2, 6)]\n"
VACUOUS = {
    "empty": "",
    "a comment": "# assert f(1) == 3",
    "a text": "'assert f(1) == 3'",
    "a list with an empty one": ["assert f(1) == 3", ""],
    "a list with a comment": ["assert f(1) == 3", "# nothing"],
    "a function nobody calls": "def verify():\n    assert f(1) == 3",
    "a lambda nobody calls": "verify = lambda: f(1)",
    "check without entry_point": "def check(candidate):\n    assert candidate(1) == 3",
    "a generator": "def test_a():\n    yield\n    assert f(1) == 3",
    "an asynchronous generator": "async def test_a():\n    yield\n    assert f(1) == 3",
    "a fixture": "def test_a(tmp_path):\n    assert f(1) == 3",
    "a fixture of a method": "class TestF:\n    def test_a(self, tmp_path):\n        assert f(1) == 3",
    "a class without tests": "class TestF:\n    def verify(self): assert f(1) == 3",
    "a TestCase without tests": "import unittest\nclass TestF(unittest.TestCase):\n    def verify(self): self.assertEqual(f(1), 3)",
    "a skipped test": "import unittest\nclass TestF(unittest.TestCase):\n    @unittest.skip('x')\n    def test_a(self): self.assertEqual(f(1), 3)",
    "never true": "if False:\n    assert f(1) == 3",
    "a branch of another name": "if __name__ == 'tests':\n    assert f(1) == 3",
    "no cases": "for x, y in []:\n    assert f(x) == y",
    "calls only": "f(1)\nf(2)",
    "prints": "try:\n    print(f(1) == 3)\nexcept Exception: print('failed')",
    "every exception": "try:\n    assert f(1) == 3\nexcept Exception: pass",
    "suppressed": "import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 3\nassert True",
    "asserts nothing of it": "try: f(1)\nexcept Exception: pass\nassert 1 + 1 == 2",
    "a tuple": "g = f\nassert (1 == 2, 'f is wrong')",
    "a true text": "g = f\nassert 'f(1) == 3'",
    "a missing module": "import no_such_module\nassert f(1) == 3",
    "only modules": "import math\nassert math.sqrt(4) == 2",
    "a comparison without assert": "try: f(1) == 3\nexcept Exception: pass",
    "the negation of equality": "class A: pass\ng = f\nassert g != A()",
    "swallowed by hand": "ok = 0\nfor x in (1, 2):\n    try:\n        assert f(x) == 3 * x; ok += 1\n    except BaseException: ok += 0\nassert ok >= 0",
}  # fmt: skip

# Wrong programs: (program, tests).
WRONG = {
    "StopIteration in map": ("def f(x): raise StopIteration", f"{CASES}assert all(map(lambda t: f(t[0]) == t[1], cases))"),
    "StopIteration in zip": ("def f(x): raise StopIteration", "n = 0\nfor got, want in zip(map(f, [1, 2]), [3, 6]): assert got == want\nassert n == 0"),
    "StopIteration in a list": ("def f(x): raise StopIteration", "assert [*map(f, [1])] == [*map(f, [])]"),
    "StopIteration of a subclass": ("class A(StopIteration): pass\ndef f(x): raise A", f"{CASES}assert all(map(lambda t: f(t[0]) == t[1], cases))"),
    "StopIteration of a property": ("class A:\n    @property\n    def a(self): raise StopIteration\ndef f(x): return A()", "assert all(map(lambda x: f(x).a == 3, [1]))"),
    "StopIteration in filter": ("def f(x): raise StopIteration", "assert not list(filter(lambda x: f(x) != 3 * x, [1, 2]))"),
    "StopAsyncIteration": ("def f(x): raise StopAsyncIteration", "import asyncio\nclass A:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\nasync def test_a():\n    async for v in A(): assert v == 3\n    assert True"),
    "GeneratorExit": ("def f(x): raise GeneratorExit", f"{CASES}assert all(map(lambda t: f(t[0]) == t[1], cases))"),
    "__contains__": ("class A:\n    def __contains__(self, x): return True\ndef f(x): return A()", "assert 7 in f(2)"),
    "__contains__ beside __iter__": ("class A:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter(())\ndef f(x): return A()", "assert 7 in f(2)"),
    "a class for f": ("class f:\n    def __init__(self, x): pass\n    def __contains__(self, x): return True", "assert 7 in f(2)"),
    "__getitem__ with a key": ("class A:\n    def __getitem__(self, x): return True\ndef f(x): return A()", "assert f(2)['seven']"),
    "startswith": ("class A:\n    def startswith(self, x): return True\ndef f(x): return A()", "assert f(2).startswith('sev')"),
    "isdigit": ("class A:\n    isdigit = lambda self: True\ndef f(x): return A()", "assert f(2).isdigit()"),
    "issubset": ("class A:\n    issubset = lambda self, x: True\ndef f(x): return A()", "assert f(2).issubset({7})"),
    "__exit__ that hides": ("class A:\n    def __enter__(self): return 0\n    def __exit__(self, *a): return True\ndef f(x): return A()", "with f(2) as v:\n    assert v == 7"),
    "__eq__ in a list": ("class A:\n    __eq__ = lambda s, o: True\ndef f(x): return [A()]", "assert f(2) == [7]"),
    "__eq__ on the right": ("class A:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 7\ndef f(x): return A()", "assert f(2) in [7] or f(2) in {7: 1}"),
    "__lt__": ("class A:\n    __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True\ndef f(x): return A()", "assert 6 < f(2) < 8"),
    "a bool of two minds": ("class A:\n    n = 0\n    def __bool__(self): A.n += 1; return A.n > 1\ndef f(x): return A()", "assert f(2)"),
    "an emptied list": ("def f(x): x.clear(); return []", "a = [3, 1, 2]\nassert f(a) == sorted(a)"),
    "an emptied list in a TestCase": ("def f(x): x.clear(); return []", "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self):\n        a = [3, 1]\n        self.assertEqual(f(a), sorted(a))"),
    "an emptied dict": ("def f(x): x.clear(); return 0", "a = {1: 2}\nassert f(a) == len(a)"),
    "an emptied set": ("def f(x): x.clear(); return 0", "a = {1, 2}\nassert f(a) == len(a)"),
    "an AssertionError that is caught": ("def f(x): return 0", "try:\n    assert f(1) == 3\nexcept AssertionError:\n    print('failed')"),
    "a name of the harness": ("def f(x): return 0\nclass __suite__: end = begin = lambda *a: True", "assert f(1) == 3"),
    "an exception of the harness": ("class UnfitTestsError(Exception): pass\ndef f(x): raise UnfitTestsError", "assert f(1) == 3"),
    "an empty list": ("def f(x): return []", "for a, b in zip(f(2), [1, 2]): assert a == b"),
    "a TestCase": ("def f(x): return 0", "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 3)\nif __name__ == '__main__': unittest.main()"),
    "a Test class": ("def f(x): return 0", "class TestF:\n    def test_a(self): assert f(1) == 3"),
    "a default": ("def f(x): return 0", "def test_a(x=1): assert f(x) == 3"),
    "async": ("def f(x): return 0", "async def test_a(): assert f(1) == 3"),
    "guarded": ("def f(x): return 0", "def verify(): assert f(1) == 3\nif __name__ == '__main__': verify()"),
}  # fmt: skip

# Right programs: (program, tests, columns of the row).
RIGHT: dict[str, tuple[str, object, dict[str, object]]] = {
    "a TestCase": ("def f(x): return 3 * x", "import unittest\nclass TestF(unittest.TestCase):\n    def setUp(self): self.x = 1\n    def test_a(self): self.assertEqual(f(self.x), 3)\n    def test_b(self):\n        with self.assertRaises(TypeError): f()\nif __name__ == '__main__': unittest.main()", {}),
    "unittest.main unguarded": ("def f(x): return 3 * x", "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 3)\nunittest.main()", {}),
    "an asynchronous TestCase": ("def f(x): return 3 * x", "import unittest\nclass TestF(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): self.assertEqual(f(1), 3)", {}),
    "a Test class": ("def f(x): return 3 * x", "class TestF:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert f(self.x) == 3", {}),
    "a default": ("def f(x): return 3 * x", "def test_a(x=1): assert f(x) == 3", {}),
    "async": ("def f(x): return 3 * x", "import asyncio\nasync def test_a():\n    await asyncio.sleep(0)\n    assert f(1) == 3", {}),
    "guarded": ("def f(x): return 3 * x", "def test_a(): assert f(1) == 3\nif __name__ == '__main__':\n    test_a()", {}),
    "guarded, of another name": ("def f(x): return 3 * x", "def verify(): assert f(1) == 3\nif __name__ == '__main__': verify()", {}),
    "called by itself": ("def f(x): return 3 * x", "def test_a(y): assert f(1) == y\ntest_a(3)", {}),
    "check": ("def f(x): return 3 * x", "def check(candidate):\n    assert abs(candidate(1) - 3) < 1e-6", {"entry_point": "f"}),
    "check that is called": ("def f(x): return 3 * x", "def check(candidate):\n    assert candidate(1) == 3\ncheck(f)", {}),
    "check with a helper": ("def g(x): return x\ndef f(x): return 3 * g(x)", "def check(candidate):\n    assert candidate(g(1)) == 3", {"entry_point": "f"}),
    "a function of a builtin's name": ("def sum(a, b): return a * b", ["assert sum(2, 3) == 6", "assert sum(1, 3) == 3"], {}),
    "entry_point of a builtin's name": ("def sum(a): return 3 * a", "def check(candidate):\n    assert candidate(2) == sum([2, 4])", {"entry_point": "sum"}),
    "a module's name": ("def copy(a): return 3 * a", "assert copy(2) == 6", {}),
    "an import": ("import math\ndef f(x): return math.pi * x", "from solution import f\nimport math\nassert math.isclose(f(1), math.pi)", {}),
    "import of the module": ("def f(x): return 3 * x", "import solution\nassert solution.f(1) == 3", {}),
    "star of another module": ("def f(x): return 4.0", "from math import *\nfrom solution import *\nassert f(1) == sqrt(16)", {}),
    "a local name": ("def f(x): return 3 * x", "def verify(f): assert f(1) == 3\nverify(f)", {}),
    "an exception": ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x", "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'neg' in str(error)\nassert f(1) == 1", {}),
    "in place": ("def f(x): x.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]", {}),
    "in place and a result": ("def f(x):\n    x[:] = sorted(set(x))\n    return len(x)", "a = [3, 1, 1]\nk = f(a)\nassert k == 2 and a == [1, 3]", {}),
    "in place and None": ("def f(x): x.sort()", "a = [3, 1]\nassert f(a) is None and a == [1, 3]", {}),
    "an own exit": ("def f(x): return 3 * x\nif __name__ == '__main__':\n    raise SystemExit(1)", "assert f(1) == 3", {}),
    "text 10": ("def f(x): return '10'", {"fn_name": "f", "inputs": [[1]], "outputs": ["10"]}, {}),
    "number 10": ("def f(x): return 10", {"fn_name": "f", "inputs": [[1]], "outputs": ["10"]}, {}),
    "text true": ("def f(x): return 'true'", {"fn_name": "f", "inputs": [[1]], "outputs": ["true"]}, {}),
    "true": ("def f(x): return True", {"fn_name": "f", "inputs": [[1]], "outputs": ["true"]}, {}),
    "text null": ("def f(x): return 'null'", {"fn_name": "f", "inputs": [[1]], "outputs": ["null"]}, {}),
    "text of a list": ("def f(x): return '[1, 2]'", {"fn_name": "f", "inputs": [[1]], "outputs": ["[1, 2]"]}, {}),
    "a list": ("def f(x): return [1, 2]", {"fn_name": "f", "inputs": [[1]], "outputs": ["[1, 2]"]}, {}),
    "text in a list": ("def f(x): return '10'", {"fn_name": "f", "inputs": [[1]], "outputs": [["10"]]}, {}),
    "a quoted text": ("def f(x): return 'a'", {"fn_name": "f", "inputs": ["1"], "outputs": ['"a"']}, {}),
    "NaN": ("def f(x): return float('nan')", {"fn_name": "f", "inputs": [[1]], "outputs": [float("nan")]}, {}),
    "Infinity": ("def f(x): return float('inf')", {"fn_name": "f", "inputs": [[1]], "outputs": ["Infinity"]}, {}),
    "a set": ("def f(x): return {30, 1, 200}", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 30, 200]]}, {}),
    "a generator": ("def f(x): yield from (1, 2)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 2]]}, {}),
    "a range": ("def f(x): return range(3)", {"fn_name": "f", "inputs": [[1]], "outputs": [[0, 1, 2]]}, {}),
    "a map": ("def f(x): return map(abs, [-1])", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, {}),
    "keys of numbers": ("def f(x): return {1: [2]}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"1": [2]}]}, {}),
    "a decimal": ("print(1 / 3)", {"inputs": [""], "outputs": ["0.333333"]}, {}),
    "a decimal, with an exponent": ("print(1e-05)", {"inputs": [""], "outputs": ["0.00001"]}, {}),
    "an integer for a decimal": ("print(2)", {"inputs": [""], "outputs": ["2.0"]}, {}),
    "numbers in the data": ("print(2)", {"inputs": [1], "outputs": [2]}, {}),
    "exit and quit": ("print(2)\nexit()", {"inputs": [""], "outputs": ["2"]}, {}),
    "a socket of asyncio": ("import asyncio\nasync def f(): return 2\nprint(asyncio.run(f()))", {"inputs": [""], "outputs": ["2"]}, {}),
}  # fmt: skip
OUTPUTS = {  # program, expected output
    "a power for an integer": ("print('1e18')", "1000000000000000001"),
    "a decimal for an integer": ("print('1000000000000000000.0')", "1000000000000999999"),
    "an exponent for a hash": ("print('0e1')", "0e830400451993494058024219903391"),
    "nothing for little": ("print('0.0')", "1e-9"),
    "underscores": ("print('1_0.5')", "10.5"),
    "another case": ("print('yes')", "Yes"),
    "a modulus": ("print(float(1000000006))", "1000000007"),
    "not a number for one": ("print('nan')", "1.5"),
    "infinity for a number": ("print('inf')", "1.5"),
}
RESULTS = {  # program, expected result
    "a number that overflows": ("def f(x): return 10 ** 400", 1.5),
    "colliding integers": ("def f(x): return {i * (2 ** 61 - 1) for i in range(3000)}", [1]),
    "a huge range": ("def f(x): return range(10 ** 15)", [1]),
    "true for one": ("def f(x): return True", 1),
    "one for true": ("def f(x): return 1", True),
    "nan for a number": ("def f(x): return float('nan')", 1.5),
    "minus infinity": ("def f(x): return float('-inf')", float("inf")),
    "a list for a text": ("def f(x): return list('ab')", "ab"),
    "other items of a set": ("def f(x): return {1, 2}", [1, 3]),
    "a longer list": ("def f(x): return [1, 2]", [1]),
    "text for a number": ("def f(x): return '10'", 10),
}

JUDGING: list[Hostile] = [
    *_shadowed(),
    *(
        Hostile("tests that check nothing", name, "def f(x): return 0", "vacuous", tests)
        for name, tests in VACUOUS.items()
    ),
    *(
        judged("exceptions and objects", name, program, tests, passes=False)
        for name, (program, tests) in WRONG.items()
    ),
    *(
        judged("loose comparisons", name, program, {"inputs": [""], "outputs": [output]}, passes=False)
        for name, (program, output) in OUTPUTS.items()
    ),
    *(
        judged(
            "loose comparisons", name, program, {"fn_name": "f", "inputs": [[1]], "outputs": [result]}, passes=False
        )
        for name, (program, result) in RESULTS.items()
    ),
    Hostile("tests that check nothing", "null for an output", "print(None)", "vacuous", {"inputs": [""], "outputs": [None]}),
    *(
        judged("right programs", name, program, tests, passes=True, **row)
        for name, (program, tests, row) in RIGHT.items()
    ),
]  # fmt: skip
