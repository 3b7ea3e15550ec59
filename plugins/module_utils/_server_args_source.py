# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the command line flags of an sglang release from its source, without running any of it."""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError


class Flag(NamedTuple):
    """One option of ``python -m sglang.launch_server``."""

    names: tuple[str, ...]  # all spellings without the leading dashes
    dest: str
    kind: str  # value, list, optional (a value or the bare flag), switch, toggle (--x and --no-x)
    type: str  # int, float, str, json, object (JSON), suffixed (4096 or 4k); str too where the release has a parser of its own
    choices: Optional[tuple[Any, ...]]  # None: any, or not to be told from the source
    default: Any  # None too where it is not to be told from the source
    required: bool
    plain: bool  # a plain store or store_true, which --config files can carry
    replacement: str  # what a retired flag says to use instead, as upstream words it
    error: str  # upstream's message where the flag stops the server


def read_flags(location: str) -> list[Flag]:
    """Return the flags of the release whose package folder (``.../sglang``) is ``location``.

    Raises:
        InferenceError: The source is missing or has a shape that is not known.
    """
    path = os.path.join(location, "srt", "server_args.py")
    source = _Source(os.path.dirname(location))
    module = source.module("sglang.srt.server_args")
    subject = os.path.join("sglang", "srt", "server_args.py")
    if module is None:
        raise InferenceError(subject, f"{path} is missing or is not Python", "the source of an sglang release")
    function = _add_cli_args(module.tree)
    if function is None:
        raise InferenceError(subject, "no ServerArgs.add_cli_args", "the shape of sglang 0.5.2 to 0.5.23")
    scope = _Scope(source, module, function)
    flags = [_field_flag(field) for field in _fields(source, module)]
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [name for name in (scope.value(item, None) for item in call.args) if isinstance(name, str)]
            keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            flags.append(_flag(names, scope, keywords, type_node=keywords.get("type")))
    if len(flags) < 50:
        raise InferenceError(subject, f"{len(flags)} flags", "the shape of sglang 0.5.2 to 0.5.23, with more than a hundred")
    return flags


class _Opaque(Exception):
    """An expression whose value the source alone does not tell."""


class _Module(NamedTuple):
    name: str
    is_package: bool
    tree: ast.Module
    names: dict[str, ast.AST]  # what the module binds at its top level


class _Source:
    """The modules of a package tree, parsed on demand."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._modules: dict[str, Optional[_Module]] = {}

    def module(self, name: str) -> Optional[_Module]:
        """Return a module by its dotted name, None where there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def imported(self, importer: _Module, statement: ast.ImportFrom) -> Optional[_Module]:
        """Return the module that ``from X import y`` in ``importer`` reads."""
        # "from .x": one level is the package itself, which an __init__ is and any other module lies in.
        parts = importer.name.split(".") + ([""] if importer.is_package else [])
        base = parts[: len(parts) - statement.level] if statement.level else []
        return self.module(".".join([*base, *filter(None, [statement.module])]))

    def _parse(self, name: str) -> Optional[_Module]:
        base = os.path.join(self.root, *name.split("."))
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            try:
                tree = ast.parse(Path(path).read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue
            return _Module(name, path.endswith("__init__.py"), tree, _bindings(tree.body))
        return None


def _bindings(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Return name -> the node that binds it first; imports are bound to the ImportFrom itself."""
    bound: dict[str, ast.AST] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, statement.value)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            bound.setdefault(statement.target.id, statement.value)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                bound.setdefault(alias.asname or alias.name, statement)
        elif isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            bound.setdefault(statement.name, statement)
    return bound


class _Class(NamedTuple):
    """A class, or the scope of one, as a value."""

    scope: _Scope
    node: ast.ClassDef

    def members(self) -> Iterator[_Member]:
        for name, value in _bindings(self.node.body).items():
            if not isinstance(value, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom)) and not name.startswith("_"):
                yield _Member(name, self.scope.value(value, None))


class _Member(NamedTuple):
    """A member of an enumeration."""

    name: str
    value: Any


class _Scope:
    """Where names are looked up: a body of statements, then its module, then what that imports."""

    def __init__(self, source: _Source, module: _Module, body: Union[ast.FunctionDef, ast.ClassDef, None] = None) -> None:
        self._source = source
        self._module = module
        self._local = _bindings(body.body) if body else {}

    def value(self, node: Optional[ast.AST], default: Any) -> Any:
        """Return the value of an expression, ``default`` where there is none or the source does not tell."""
        if node is None:
            return default
        try:
            return self._evaluate(node)
        except (_Opaque, RecursionError):
            return default

    def raises(self, name: str) -> bool:
        """Return whether a class of this name has code that raises an exception."""
        found = self.value(ast.Name(id=name, ctx=ast.Load()), None)
        return isinstance(found, _Class) and any(isinstance(node, ast.Raise) for node in ast.walk(found.node))

    def _evaluate(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [item for element in node.elts for item in self._spread(element)]
        if isinstance(node, ast.Dict):
            return {self._evaluate(key): None for key in node.keys if key is not None}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._evaluate(node.left), self._evaluate(node.right)
            if type(left) is type(right) and isinstance(left, (str, list)):
                return left + right
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._evaluate(node.value), node.attr)
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and isinstance(node.generators[0].target, ast.Name):
            return [self._element(node.elt, node.generators[0].target.id, item) for item in self._items(node.generators[0].iter)]
        if isinstance(node, ast.Call):
            return self._call(node)
        raise _Opaque

    def _spread(self, node: ast.expr) -> list[Any]:
        return self._items(node.value) if isinstance(node, ast.Starred) else [self._evaluate(node)]

    def _items(self, node: ast.AST) -> list[Any]:
        value = self._evaluate(node)
        if isinstance(value, _Class):
            return list(value.members())
        if isinstance(value, (list, dict)):
            return list(value)
        raise _Opaque

    def _named(self, name: str) -> Any:
        node = self._local.get(name) or self._module.names.get(name) or self._module.names.get("*")
        if node is None:
            raise _Opaque
        if isinstance(node, ast.ImportFrom):
            found = self._source.imported(self._module, node)
            if found is None:
                raise _Opaque
            original = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), name)
            return _Scope(self._source, found)._named(original)
        if isinstance(node, ast.ClassDef):
            return _Class(_Scope(self._source, self._module, node), node)
        if isinstance(node, ast.FunctionDef):
            return _Scope(self._source, self._module, node), node
        return self._evaluate(node)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, _Member) and name in ("name", "value"):
            return getattr(owner, name)
        if isinstance(owner, _Class) and name in owner.scope._local:
            return owner.scope._named(name)
        raise _Opaque

    def _element(self, node: ast.AST, name: str, item: Any) -> Any:
        """Evaluate the element of a comprehension: the item itself, an attribute of it, lower() of either."""
        if isinstance(node, ast.Name) and node.id == name:
            return item
        if isinstance(node, ast.Attribute):
            return self._attribute(self._element(node.value, name, item), node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "lower" and not node.args:
            value = self._element(node.func.value, name, item)
            if isinstance(value, str):
                return value.lower()
        raise _Opaque

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "list", "set", "sorted", "tuple") and len(node.args) == 1:
            return self._items(node.args[0])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "keys" and not node.args:
            return self._items(node.func.value)
        if isinstance(node.func, ast.Name) and not node.args and not node.keywords:
            called = self._named(node.func.id)
            if isinstance(called, tuple) and len(called) == 2 and isinstance(called[1], ast.FunctionDef):
                # The last return is the one that does not depend on what happens to be loaded.
                scope, last = called[0], called[1].body[-1]
                if isinstance(last, ast.Return) and last.value:
                    return scope._evaluate(last.value)
        raise _Opaque


def _add_cli_args(tree: ast.Module) -> Optional[ast.FunctionDef]:
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == "ServerArgs":
            for item in statement.body:
                if isinstance(item, ast.FunctionDef) and item.name == "add_cli_args":
                    return item
    return None


class _Field(NamedTuple):
    """An annotated field that upstream turns into a flag: ``name: A[type, Arg(...)] = default``."""

    scope: _Scope
    name: str
    type: ast.expr
    metadata: dict[str, ast.AST]  # the keywords of Arg(...)
    default: Optional[ast.expr]


def _fields(source: _Source, module: _Module) -> Iterator[_Field]:
    """Yield ServerArgs's fields, and since 0.5.20 those of the namespaces that make it up."""
    bodies = [(module, module.names.get("ServerArgs"))]
    folder = os.path.join(source.root, "sglang", "srt", "arg_groups", "fields")
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "[!_]*.py"))):
        found = source.module(f"sglang.srt.arg_groups.fields.{os.path.basename(path)[:-3]}")
        if found:
            bodies.extend((found, node) for node in found.tree.body)
    for owner, body in bodies:
        for statement in body.body if isinstance(body, ast.ClassDef) else ():
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotated = _annotated(statement.annotation)
                if annotated:
                    yield _Field(_Scope(source, owner), statement.target.id, *annotated, statement.value)


def _annotated(node: ast.AST) -> Optional[tuple[ast.expr, dict[str, ast.AST]]]:
    """Return the type and the keywords of Arg in ``A[type, Arg(...)]`` or ``A[type, "help"]``, None where it is no flag."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and _last(node.value) in ("A", "Annotated")):
        return None
    declared, *rest = node.slice.elts
    for item in rest:
        if isinstance(item, ast.Call) and _last(item.func) == "Arg":
            keywords: dict[str, ast.AST] = {keyword.arg: keyword.value for keyword in item.keywords if keyword.arg}
            no_cli = keywords.get("no_cli")
            return None if isinstance(no_cli, ast.Constant) and no_cli.value else (declared, keywords)
        if isinstance(item, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            return declared, {}
    return None


def _last(node: Optional[ast.AST]) -> str:
    """Return the last part of a dotted name: ``BooleanOptionalAction`` of ``argparse.BooleanOptionalAction``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _field_flag(field: _Field) -> Flag:
    scope, keywords = field.scope, dict(field.metadata)
    names = [scope.value(keywords.get("cli_name"), "--" + field.name.replace("_", "-")), *scope.value(keywords.get("aliases"), [])]
    keywords["dest"] = ast.Constant(field.name)
    if field.default is not None:
        keywords["default"] = field.default
    elif "required" not in keywords and "action" not in keywords:
        keywords["required"] = ast.Constant(True)
    keywords.update(_items(keywords.pop("action_kwargs", None)))
    declared = _not_none(field.type)
    parsed: Optional[ast.AST] = declared
    if "action" not in keywords:
        if isinstance(declared, ast.Subscript) and _last(declared.value) == "Literal":
            literals = list(declared.slice.elts) if isinstance(declared.slice, ast.Tuple) else [declared.slice]
            keywords.setdefault("choices", ast.List(elts=literals, ctx=ast.Load()))
            parsed = ast.Name(id=type(scope.value(literals[0], "")).__name__, ctx=ast.Load())
        elif isinstance(declared, ast.Subscript) and _last(declared.value) in ("list", "List") and "type_parser" not in keywords:
            keywords.setdefault("nargs", ast.Constant("+"))
            parsed = declared.slice
        elif _last(declared) == "bool" and "type_parser" not in keywords:
            keywords["action"] = ast.Constant("store_true")
    return _flag(names, scope, keywords, type_node=keywords.get("type_parser", parsed))


def _items(node: Optional[ast.AST]) -> dict[str, ast.AST]:
    """Return the entries of a dict display, by their text keys."""
    if not isinstance(node, ast.Dict):
        return {}
    return {key.value: value for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _not_none(node: ast.expr) -> ast.expr:
    """Return X of ``Optional[X]``, ``Union[X, None]`` and ``X | None``; the node itself of anything else."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Subscript) and _last(node.value) == "Optional":
        return _not_none(node.slice)
    if isinstance(node, ast.Subscript) and _last(node.value) == "Union" and isinstance(node.slice, ast.Tuple):
        parts = node.slice.elts
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = [node.left, node.right]
    others = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)]
    return others[0] if parts and len(others) == 1 else node


_TYPES = {
    "int": "int",
    "float": "float",
    "loads": "json",  # json.loads
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "object",
    "human_readable_int": "suffixed",
}


def _flag(names: list[str], scope: _Scope, keywords: Mapping[str, ast.AST], type_node: Optional[ast.AST]) -> Flag:
    def text(keyword: str) -> str:
        value = scope.value(keywords.get(keyword), "")
        return value if isinstance(value, str) else ""

    spellings = tuple(name.lstrip("-") for name in names)
    action_node = keywords.get("action")
    action = text("action") or _last(action_node) or "store"
    nargs = scope.value(keywords.get("nargs"), None)
    choices = scope.value(keywords.get("choices"), None)
    if action in ("store_true", "DeprecatedStoreTrueAction") or (
        action in ("DeprecatedStoreConstAction", "DeprecatedAction") and nargs is None and "nargs" not in keywords
    ):
        kind = "switch"
    elif action == "BooleanOptionalAction":
        kind = "toggle"
    else:
        kind = "optional" if nargs == "?" else "list" if nargs in ("+", "*") or isinstance(nargs, int) else "value"
    return Flag(
        names=spellings,
        dest=text("dest") or spellings[0].replace("-", "_"),
        kind=kind,
        type=_TYPES.get(_last(type_node), "str"),
        choices=tuple(choices) if isinstance(choices, list) else None,
        default=scope.value(keywords.get("default"), None),
        required=scope.value(keywords.get("required"), False) is True,
        plain=action in ("store", "store_true"),
        replacement=text("new_flag"),
        error=text("error_message") or (text("help") if action == "DeprecatedAction" and scope.raises(action) else ""),
    )
