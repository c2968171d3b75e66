"""Rewrite a kernel's Python so that running it means what compiling it means.

What Python itself does differently from Triton's compiler:

* ``a and b``, ``a or b``, ``not a`` on tensors are element by element and evaluate every operand; Python asks for the
  truth of a whole block, which silently drops half of a mask.
* ``min`` and ``max`` of blocks are element by element too.
* the variable of ``for i in range(...)`` is a tensor (``i.to(tl.int64)`` works), bounds included.
* ``0 <= x < n`` is refused by compilers before 3.8.
* a kernel defined inside a function sees that function's variables.

Upstream re-executes the ``def`` in the module's globals and copies its own globals there; here only the code object is
replaced: defaults, annotations and closure cells stay those of the original function.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import warnings
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

# The only name put into a user's module; a keyword-like spelling nobody uses.
RUNTIME = "__fusion_interpreter__"


class KernelRuntime:
    """What rewritten kernels call at run time."""

    def __init__(self, tl: Any, semantic: Any, handle: Any, chained_comparisons: bool) -> None:
        self._tl = tl
        self._semantic = semantic
        self._handle = handle
        self.chained_comparisons = chained_comparisons

    def assign(self, value: Any) -> Any:
        """The value of ``name = value``: Python numbers become tensors, as upstream's own rewriting makes them."""
        return self._semantic.to_tensor(value, False)

    def both(self, *operands: Callable[[], Any]) -> Any:
        """``a and b``."""
        return self._logical(operands, False)

    def either(self, *operands: Callable[[], Any]) -> Any:
        """``a or b``."""
        return self._logical(operands, True)

    def _logical(self, operands: tuple[Callable[[], Any], ...], decisive: bool) -> Any:
        """Compile-time operands decide at once; tensors are all evaluated and combined bit by bit."""
        result = value = None
        for operand in operands:
            value = self._unwrapped(operand())
            if not isinstance(value, self._tl.tensor):
                if bool(value) is decisive:
                    return value
                continue
            mask = value if value.dtype.is_int1() else self._semantic.not_equal(value, self._semantic.to_tensor(0))
            if result is None:
                result = mask
            else:
                result = self._semantic.or_(result, mask) if decisive else self._semantic.and_(result, mask)
        return value if result is None else result

    def negate(self, value: Any) -> Any:
        """``not a``."""
        value = self._unwrapped(value)
        if not isinstance(value, self._tl.tensor):
            return not value
        return self._semantic.equal(value, self._semantic.to_tensor(0))

    def chain(self, evaluate: Callable[[], Any]) -> Any:
        """``a < b < c``, which compilers up to 3.7 refuse."""
        if self.chained_comparisons:
            return evaluate()
        raise NotImplementedError(
            "this Triton's compiler refuses a chained comparison (a < b < c) inside a kernel; write (a < b) & (b < c)"
        )

    def extreme(self, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """``min`` or ``max`` called by its bare name: ``tl.minimum`` or ``tl.maximum`` once a tensor is among them."""
        of_tensors = {builtins.min: self._tl.core.builtin_min, builtins.max: self._tl.core.builtin_max}.get(function)
        values = [self._unwrapped(v) for v in operands]
        if of_tensors is None or not any(isinstance(v, self._tl.tensor) for v in values):
            return function(*operands, **options)
        with warnings.catch_warnings():
            # That maximum() is preferred for blocks is for the compiler to say.
            warnings.simplefilter("ignore")
            return of_tensors(*values, **options)

    def iterate(self, *bounds: Any, **options: Any) -> Any:
        """``range`` or ``tl.range`` of a ``for`` loop: yields scalar tensors of the bounds' common integer type."""
        options.pop("_semantic", None)
        if bounds and "step" in options:
            bounds = (*(bounds if len(bounds) > 1 else (0, *bounds)), options["step"])
        values = [self._unwrapped(b) for b in bounds]
        wide = any(isinstance(b, self._tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in values)
        numbers = [int(b.handle.data.reshape(-1)[0]) if isinstance(b, self._tl.tensor) else int(b) for b in values]
        wide = wide or any(not -(2**31) <= n < 2**31 for n in numbers)
        builder = self._semantic.builder
        make, kind = (builder.get_int64, self._tl.int64) if wide else (builder.get_int32, self._tl.int32)
        for number in range(*numbers):
            yield self._tl.tensor(make(number), kind)

    def _unwrapped(self, value: Any) -> Any:
        return value.value if isinstance(value, self._tl.constexpr) else value


class _Transformer(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call("assign", [node.value])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(child, ast.NamedExpr) for child in ast.walk(node)):
            return node
        return _call("both" if isinstance(node.op, ast.And) else "either", [_thunk(value) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("negate", [node.operand]) if isinstance(node.op, ast.Not) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in {"min", "max"}:
            return _call("extreme", [node.func, *node.args], node.keywords)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and _is_range(node.iter.func):
            node.iter = _call("iterate", node.iter.args, node.iter.keywords)
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


def _is_range(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id == "range") or (
        isinstance(function, ast.Attribute) and function.attr == "range"
    )


def _name(name: str) -> ast.expr:
    return ast.Name(id=name, ctx=ast.Load())


def _arguments(names: list[str]) -> ast.arguments:
    args = [ast.arg(arg=n) for n in names]
    return ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[])


def _thunk(body: ast.expr) -> ast.expr:
    return ast.Lambda(args=_arguments([]), body=body)


def _call(method: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.expr:
    return ast.Call(
        func=ast.Attribute(value=_name(RUNTIME), attr=method, ctx=ast.Load()), args=args, keywords=keywords or []
    )


def rewritten(function: FunctionType, runtime: KernelRuntime) -> Callable[..., Any]:
    """``function`` with its body rewritten; the function itself where its source cannot be found."""
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
    definition.body = [_Transformer().visit(statement) for statement in definition.body]
    # The free variables become the factory's arguments, so that the kernel's code object keeps them free.
    module = ast.parse(f"def _factory({', '.join(function.__code__.co_freevars)}): ...")
    factory = module.body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body = [definition]
    ast.increment_lineno(ast.fix_missing_locations(module), start - 1)
    compiled = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    return _nested(_nested(compiled, "_factory"), function.__name__)


def _nested(code: CodeType, name: str) -> CodeType:
    return next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
