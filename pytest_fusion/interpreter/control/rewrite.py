"""Rewrites a kernel's Python so that it runs as if compiled.

Triton's compiler differs from Python:
  * ``a and b``, ``a or b``, ``not a`` on tensors are element by element and evaluate every operand; Python uses the
    truth of a whole block, which silently drops half of a mask.
  * ``min`` and ``max`` of blocks are element by element too.
  * the variable of ``for i in range(...)`` is a tensor (``i.to(tl.int64)`` works), bounds included.
  * compilers before 3.8 reject ``0 <= x < n``.
  * a kernel defined inside a function sees that function's variables.
  * programs that run together may take different branches, leave loops at different times and return early: ``if``,
    ``for``, ``while``, ``return``, ``assert`` and ``x if c else y`` call ``runtime``.

Only the code object is replaced: defaults, annotations and closure cells stay. Upstream re-executes the ``def`` in the
module's globals and copies its own globals there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

from pytest_fusion.interpreter.control.runtime import KernelRuntime

# The only name added to a user's module, with an unusual spelling.
RUNTIME = "__fusion_interpreter__"
_PREFIX = "__fusion_"
_FRAME = _PREFIX + "frame"


class _Transformer(ast.NodeTransformer):
    """Rewrites the body of one function."""

    def __init__(self, framed: bool, file: str) -> None:
        self._file = file
        self.carried: set[str] = set()
        # Lines of loads whose value the next iteration of a loop uses.
        self.ahead: set[int] = set()
        self._framed = framed
        self._made = 0
        self._loops: list[str | None] = []

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("assign", [node.value])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        constant = ast.unparse(node.annotation).strip("'\"").endswith("constexpr")
        self.generic_visit(node)
        if node.value is not None and not constant:
            node.value = _call("assign", [node.value])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if _has(node, ast.NamedExpr):
            return node
        return _call("both" if isinstance(node.op, ast.And) else "either", [_thunk(value) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("negate", [node.operand]) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if _has(node, ast.NamedExpr):
            return node
        return _call("choose", [node.test, _thunk(node.body), _thunk(node.orelse)])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in {"min", "max"}:
            return _call("extreme", [node.func, *node.args], node.keywords)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        # Every operand but the outer two is evaluated once, bound to a lambda's argument.
        names = [f"_operand{i}" for i in range(len(node.ops) + 1)]
        pairs: list[ast.expr] = [
            _thunk(ast.Compare(left=_name(a), ops=[op], comparators=[_name(b)]))
            for a, op, b in zip(names, node.ops, names[1:], strict=False)
        ]
        bound = ast.Call(
            func=ast.Lambda(args=_arguments(names), body=_call("both", pairs)),
            args=[node.left, *node.comparators],
            keywords=[],
        )
        return _call("chain", [_thunk(bound)])

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        return ast.Expr(value=_call("check", [node.test, _thunk(node.msg or ast.Constant(value=""))]))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if not self._framed:
            return node
        value = node.value or ast.Constant(value=None)
        left = ast.Return(value=_method(_FRAME, "result"))
        return _placed(node, [ast.If(test=_method(_FRAME, "leave", value), body=[left], orelse=[])])

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        self.generic_visit(node)
        branch, names = self._temporary("branch"), self._carry([*node.body, *node.orelse])
        divergent = _attribute(branch, "divergent")
        returns = [_name(_FRAME)] if self._framed and _has(node, ast.Return) else []
        enter = ast.If(test=divergent, body=[ast.Expr(_method(branch, "enter", _tuple(names)))], orelse=[])
        statements: list[ast.stmt] = [
            _set(branch, _call("branch", [node.test, *returns])),
            ast.If(test=_attribute(branch, "first"), body=[enter, *node.body], orelse=[]),
            ast.If(test=divergent, body=[_unpack(names, _method(branch, "switch", _tuple(names)))], orelse=[]),
        ]
        if node.orelse:
            statements.append(ast.If(test=_attribute(branch, "second"), body=node.orelse, orelse=[]))
        joined = _unpack(names, _method(branch, "join", _tuple(names)))
        statements.append(ast.If(test=divergent, body=[joined], orelse=[]))
        return _placed(node, statements)

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        ranged = isinstance(node.iter, ast.Call) and _is_range(node.iter.func) and not node.orelse
        loop = self._temporary("loop") if ranged else None
        self.ahead.update(_loads_ahead(node))
        self._loops.append(loop)
        self.generic_visit(node)
        self._loops.pop()
        if loop is None or not isinstance(node.iter, ast.Call):
            return node
        names = self._carry([*node.body, ast.Assign(targets=[node.target], value=_name("_"))])
        turn = self._temporary("turn")
        rounds = _call("iterate", [_name(loop), *node.iter.args], node.iter.keywords)
        first = ast.Assign(targets=[node.target], value=_name(turn))
        body = self._turn(loop, names, [first, *node.body])
        each = ast.For(target=ast.Name(id=turn, ctx=ast.Store()), iter=rounds, body=body, orelse=[])
        return _placed(node, [_set(loop, _call("loop", [])), each, ast.Expr(_method(loop, "done"))])

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        loop = self._temporary("loop") if not node.orelse else None
        self.ahead.update(_loads_ahead(node))
        self._loops.append(loop)
        self.generic_visit(node)
        self._loops.pop()
        if loop is None:
            return node
        names = self._carry(node.body)
        body = self._turn(loop, names, node.body)
        body.append(ast.Expr(_method(loop, "turned", _tuple(names))))
        test = _call("test", [_name(loop), node.test, ast.Constant(value=f"{self._file}:{node.lineno}")])
        each = ast.While(test=test, body=body, orelse=[])
        return _placed(node, [_set(loop, _call("loop", [])), each, ast.Expr(_method(loop, "done"))])

    def visit_Break(self, node: ast.Break) -> ast.AST | list[ast.stmt]:
        return self._together(node, "break")

    def visit_Continue(self, node: ast.Continue) -> ast.AST | list[ast.stmt]:
        return self._together(node, "continue")

    def _together(self, node: ast.stmt, what: str) -> ast.AST | list[ast.stmt]:
        loop = self._loops[-1] if self._loops else None
        text = ast.Constant(value=f"`{what}` at {self._file}:{node.lineno}")
        check = _call("together", [text]) if loop is None else _method(loop, "agree", text)
        return _placed(node, [ast.Expr(check), node])

    def _turn(self, loop: str, names: list[str], body: list[ast.stmt]) -> list[ast.stmt]:
        """An iteration of a loop, which restores the variables of programs that left it."""
        before_it, partial = self._temporary("before"), _attribute(loop, "partial")
        saved = _set(before_it, ast.IfExp(test=partial, body=_tuple(names), orelse=_tuple([])))
        merged = _unpack(names, _method(loop, "merge", _name(before_it), _tuple(names)))
        return [saved, *body, ast.If(test=partial, body=[merged], orelse=[])]

    def _carry(self, statements: Iterable[ast.stmt]) -> list[str]:
        names = sorted(_assigned(statements))
        self.carried.update(names)
        return names

    def _temporary(self, kind: str) -> str:
        self._made += 1
        return f"{_PREFIX}{kind}{self._made}"


def _assigned(statements: Iterable[ast.stmt]) -> set[str]:
    """Local names that the statements assign, without those of nested scopes and our own temporaries."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith(_PREFIX):
            found.add(node.id)
        if isinstance(
            node, ast.Lambda | ast.FunctionDef | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _loads_ahead(loop: ast.For | ast.While) -> set[int]:
    """Lines of the loop's assignments to names that its body or condition reads: the last iteration's is not dead."""
    read = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    lines: set[int] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign | ast.AugAssign) and _assigned([node]) & read:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(child, kind) for child in ast.walk(node))


def _is_range(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id == "range") or (
        isinstance(function, ast.Attribute) and function.attr == "range"
    )


def _name(name: str) -> ast.expr:
    return ast.Name(id=name, ctx=ast.Load())


def _set(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)


def _tuple(names: list[str]) -> ast.expr:
    return ast.Tuple(elts=[_name(n) for n in names], ctx=ast.Load())


def _unpack(names: list[str], value: ast.expr) -> ast.stmt:
    if not names:
        return ast.Expr(value=value)
    targets: list[ast.expr] = [ast.Name(id=n, ctx=ast.Store()) for n in names]
    return ast.Assign(targets=[ast.Tuple(elts=targets, ctx=ast.Store())], value=value)


def _attribute(name: str, attribute: str) -> ast.expr:
    return ast.Attribute(value=_name(name), attr=attribute, ctx=ast.Load())


def _method(name: str, method: str, *args: ast.expr) -> ast.expr:
    return ast.Call(func=_attribute(name, method), args=list(args), keywords=[])


def _placed(node: ast.stmt, statements: list[ast.stmt]) -> list[ast.stmt]:
    """``statements`` at the line of ``node`` if they have none of their own."""
    for statement in statements:
        if statement is node:
            continue
        ast.copy_location(statement, node)
        for child in ast.walk(statement):
            if "lineno" in child._attributes and not hasattr(child, "lineno"):
                ast.copy_location(child, node)
    return statements


def _arguments(names: list[str]) -> ast.arguments:
    args = [ast.arg(arg=n) for n in names]
    return ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[])


def _thunk(body: ast.expr) -> ast.expr:
    return ast.Lambda(args=_arguments([]), body=body)


def _call(method: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.expr:
    return ast.Call(func=_attribute(RUNTIME, method), args=args, keywords=keywords or [])


# Lines, by file, of loads that are not dead although their value may be unused when a launch ends.
AHEAD: dict[str, set[int]] = {}


def _body(definition: ast.FunctionDef, file: str) -> list[ast.stmt]:
    # There is a ``return`` elsewhere than at the end of the function's own block.
    framed = any(not isinstance(s, ast.Return | ast.FunctionDef) and _has(s, ast.Return) for s in definition.body)
    transformer = _Transformer(framed, file)
    statements: list[ast.stmt] = []
    for statement in definition.body:
        if framed and isinstance(statement, ast.Return):
            transformer.generic_visit(statement)
            statement.value = _method(_FRAME, "finish", statement.value or ast.Constant(value=None))
            statements.append(statement)
            continue
        replaced = transformer.visit(statement)
        statements.extend(replaced if isinstance(replaced, list) else [replaced])
    AHEAD.setdefault(file, set()).update(transformer.ahead)
    if framed:
        statements.append(ast.Return(value=_method(_FRAME, "finish", ast.Constant(value=None))))
    parameters = {a.arg for a in [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]}
    head = [_set(name, _attribute(RUNTIME, "missing")) for name in sorted(transformer.carried - parameters)]
    if framed:
        head.append(_set(_FRAME, _call("frame", [])))
    return [*head, *statements]


def rewritten(function: FunctionType, runtime: KernelRuntime) -> Callable[..., Any]:
    """``function`` with its body rewritten; the function itself if its source is not found."""
    code = _rewritten_code(function)
    if code is None:
        return function
    function.__globals__.setdefault(RUNTIME, runtime)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    result = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells[n] for n in code.co_freevars)
    )
    result.__kwdefaults__ = function.__kwdefaults__
    result.__annotations__ = function.__annotations__
    result.__qualname__, result.__module__ = function.__qualname__, function.__module__
    return result


def _rewritten_code(function: FunctionType) -> CodeType | None:
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if definition is None or definition.name != function.__name__:
        return None
    definition.decorator_list = []
    definition.returns = None
    for argument in [*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs]:
        argument.annotation = None
    # Only the shape of the signature matters in the code object; the values come from the original function.
    definition.args.defaults = [ast.Constant(value=None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [None if d is None else ast.Constant(value=None) for d in definition.args.kw_defaults]
    ast.increment_lineno(definition, start - 1)
    definition.body = _body(definition, function.__code__.co_filename)
    # The free variables become the factory's arguments, so that the kernel's code object still has them free.
    module = ast.parse(f"def _factory({', '.join(function.__code__.co_freevars)}): ...")
    factory = module.body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [definition]
    # Under its own name it would be the factory's local, and a function that calls itself would need a closure.
    definition.name = _PREFIX + "function"
    ast.fix_missing_locations(module)
    compiled = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    code = _nested(_nested(compiled, "_factory"), definition.name)
    return code.replace(co_name=function.__name__, co_qualname=function.__qualname__)


def _nested(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
