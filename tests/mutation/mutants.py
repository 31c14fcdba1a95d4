"""Mutants of a module: one small change each to something that its code computes.

Left alone are docstrings and every other text (messages of errors included), annotations, what a ``raise`` says,
whether a dataclass is frozen and has slots, and how much a cache keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""A comparison with its border moved, and turned round."""
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
EXTREMES = {"min": "max", "minimum": "maximum", "amin": "amax", "any": "all"}
EXTREMES |= {other: name for name, other in EXTREMES.items()}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MASKS = ("mask", "loss_mask", "trainable")
"""Names that hold a mask in every function that takes a tensor."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: its kind, the line (from 1), the code before and after, and the whole module with it.

    ``scope`` is the function or class it stands in, by its dotted name (``""`` at the module's top); a run of any line
    ``first`` to ``last`` reaches it. ``is_late``: it stands where calls run it, not in what the import alone evaluates.
    """

    kind: str
    line: int
    original: str
    mutated: str
    source: str
    scope: str
    first: int
    last: int
    is_late: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """A node with what it is to its parent, whether masks are about, and where it stands (see Mutant)."""

    node: Any
    role: str
    parent: ast.AST
    masked: bool
    scope: str = ""
    statement: Any = None
    is_late: bool = False

    def lines(self) -> tuple[int, int]:
        """The statement's, or the part of a compound one up to the end of this node."""
        statement = self.statement or self.node
        whole = isinstance(statement, FUNCTIONS) or not hasattr(statement, "body")
        return statement.lineno, (statement if whole else self.node).end_lineno


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module's source, in the order of the source."""
    tree = ast.parse(source)
    changes = [
        (place, kind, ast.unparse(instead))
        for place in _places(_Place(tree, "", tree, masked=False))
        for kind, instead in _changes(place)
    ]
    changes.sort(key=lambda change: (change[0].node.lineno, change[0].node.col_offset))
    lines, found = source.encode().splitlines(keepends=True), []  # columns count bytes
    for place, kind, text in changes:
        node = place.node
        before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
        spliced = before + (text if isinstance(node, ast.stmt) else f"({text})").encode() + after
        about = (place.scope, *place.lines(), place.is_late)
        found.append(Mutant(kind, node.lineno, ast.unparse(node), text, spliced.decode(), *about))
    return found


def _places(place: _Place) -> Iterator[_Place]:
    """Every node below that may change, itself included."""
    node, masked = place.node, place.masked
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    yield place
    scope, statement = place.scope, place.statement
    if isinstance(node, ast.stmt | ast.Lambda):
        statement = node
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        masked = any("Tensor" in ast.unparse(one.annotation) for one in arguments if one.annotation)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        is_late = place.is_late or (name == "body" and isinstance(node, FUNCTIONS))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword):  # its value is a part of the call like any other
                child = None if child.arg in ("frozen", "slots", "maxsize") else child.value
            if isinstance(child, ast.AST):
                yield from _places(_Place(child, name, node, masked, scope, statement, is_late))


def _changes(place: _Place) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in a node's place, with the kind of change."""
    node = place.node
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", _with(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])
        case ast.BinOp(op=ast.BitAnd()):
            yield "operator", _with(node, op=ast.BitOr())
            yield "mask", node.left
            yield "mask", node.right
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield "operator", _with(node, op=OPERATORS[type(node.op)]())
        case ast.BoolOp():
            yield "boolean", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            yield "boolean" if isinstance(node.op, ast.Not) else "sign", node.operand
        case ast.Constant():
            yield from _constant(node, is_default=place.role in ("defaults", "kw_defaults"))
        case ast.Call():
            yield from _call(node)
        case ast.Name() if place.masked and node.id in MASKS:
            used = isinstance(place.parent, ast.Call | ast.Subscript | ast.BinOp)
            is_where = (
                isinstance(place.parent, ast.Call) and ast.unparse(place.parent.func) == "torch.where"
            )  # see _call
            if used and not is_where:
                yield "mask", _expression(f"torch.ones_like({node.id})")
    is_condition = place.role in ("test", "ifs") or isinstance(place.parent, ast.BoolOp)
    if is_condition and isinstance(node, ast.Name | ast.Attribute | ast.Call):
        yield "boolean", ast.UnaryOp(ast.Not(), node)


def _constant(node: ast.Constant, *, is_default: bool) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int | float):
        for other in dict.fromkeys((value + 1, value - 1, 0)):
            if other != value:
                yield "default" if is_default else "constant", _expression(repr(other))
    elif is_default and isinstance(value, str | None):
        yield "default", ast.Constant(f"not {value}" if value else 1)


def _call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in EXTREMES:
        yield "extreme", _with(node, func=ast.Name(EXTREMES[function.id]))
    if not isinstance(function, ast.Attribute):
        return
    if function.attr in EXTREMES:
        yield "extreme", _with(node, func=_with(function, attr=EXTREMES[function.attr]))
    is_of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch"
    operands = node.args if is_of_torch else [function.value, *node.args]  # torch.f(x, y) and x.f(y) alike
    if function.attr == "clamp":  # each bound left out
        bounds = [*zip(("min", "max"), operands[1:], strict=False), *((one.arg, one.value) for one in node.keywords)]
        for left_out, _ in bounds:
            kept = [ast.keyword(name, value) for name, value in bounds if name != left_out]
            yield "clamp", ast.Call(ast.Attribute(operands[0], "clamp"), [], kept) if kept else operands[0]
    elif function.attr == "where":  # the arms swapped, and each arm taken everywhere
        condition, yes, no = operands if is_of_torch else (operands[1], operands[0], operands[2])
        everywhere = ast.BinOp(condition, ast.BitOr(), ast.Constant(True))
        nowhere = ast.BinOp(condition, ast.BitAnd(), ast.Constant(False))
        for arms in ([condition, no, yes], [everywhere, yes, no], [nowhere, yes, no]):
            yield "mask", ast.Call(_expression("torch.where"), arms, [])
    elif function.attr == "bool" and not is_of_torch:
        yield "mask", _expression(f"{ast.unparse(node)} | True")


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**({name: getattr(node, name) for name in node._fields} | fields))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
