"""The source tree as data: modules, the imports between them, and the size of functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import defedavg

ROOT = Path(defedavg.__file__).parent


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below ``defedavg``; the package itself is ''."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Yield the absolute names of everything imported anywhere in a file, lazily or for type checking only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the absolute names that a module imports."""
    path = modules()[module]
    parts = ["defedavg", *module.split(".")] if module else ["defedavg"]
    package = parts if path.name == "__init__.py" else parts[:-1]
    return frozenset(imported_names(ast.parse(path.read_text(encoding="utf-8")), package))


@cache
def dependencies(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports."""
    found = set()
    for name in imports_of(module):
        if name == "defedavg" or name.startswith("defedavg."):
            parts = name.split(".")[1:]
            while ".".join(parts) not in modules():  # the last part is a name inside a module
                parts = parts[:-1]
            found.add(".".join(parts))
    return frozenset(found - {module})


def packages_of(module: str) -> set[str]:
    """Return the third-party packages that a module imports."""
    return {name.split(".")[0] for name in imports_of(module)} - {"defedavg"} - set(sys.stdlib_module_names)


def area(module: str) -> str:
    """Return the top-level package or module that a module belongs to."""
    return module.split(".")[0]


def in_area(*areas: str) -> list[str]:
    """Return the modules of some areas."""
    return [module for module in modules() if area(module) in areas]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def branches(function: ast.AST) -> int:
    """Count conditions, loops, handlers, cases, further operands of and/or, comprehensions and their conditions."""
    count = 0
    for node in ast.walk(function):
        if isinstance(
            node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
        ):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def cycle(graph: dict[str, frozenset[str]]) -> list[str]:
    """Return the modules of a cycle, or an empty list."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if found := visit(other):
                return found
        path.pop()
        done.add(node)
        return []

    for start in sorted(graph):
        if found := visit(start):
            return found
    return []
