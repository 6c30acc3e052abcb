"""The arguments of the class or function at a dotted path, read from its source.

Nothing is imported, so a mistake in a setting of torch.optim.AdamW or lightning.Trainer is found before they load.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef
WITHOUT_ARGUMENTS = ("object", "ABC", "Generic", "Protocol")  # bases without arguments


@dataclass(frozen=True)
class Arguments:
    """Names of arguments; `others` is True if **kwargs are accepted."""

    names: tuple[str, ...]
    others: bool = False


@cache
def arguments(target: str) -> Arguments | None:
    """Return the arguments that Hydra can pass to a target; None if its source does not show them."""
    found = _find(target)
    if found is None:
        return None
    module, definition = found
    if isinstance(definition, ast.FunctionDef):
        return _of_function(definition, bound=False)
    return _of_class(module, definition)


def _find(target: str) -> tuple[str, Definition] | None:
    """Return the definition of a target and the module that contains it."""
    module, _, name = target.rpartition(".")
    while module:
        if _source(module) is not None:
            return _definition(module, name.split("."))
        module, _, last = module.rpartition(".")
        name = f"{last}.{name}"
    return None


def _definition(module: str, names: list[str]) -> tuple[str, Definition] | None:
    tree = _tree(module)
    for statement in () if tree is None else _statements(tree):
        if isinstance(statement, Definition) and statement.name == names[0]:
            if len(names) == 1:
                return module, statement
            inner = (each for each in statement.body if isinstance(each, Definition) and each.name == names[1])
            return next(((module, each) for each in inner), None)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == names[0]:
                    return _find(".".join([_absolute(module, statement), alias.name, *names[1:]]))
    return None


def _absolute(module: str, statement: ast.ImportFrom) -> str:
    """Return the full name of the module that an import statement in `module` refers to."""
    if statement.module is not None and not statement.level:
        return statement.module
    source = _source(module)
    is_package = source is not None and source.name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    above = package[: len(package) - statement.level + 1]
    return ".".join([*above, statement.module] if statement.module else above)


def _of_class(module: str, definition: ast.ClassDef) -> Arguments | None:
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _of_function(statement, bound=True)
        if isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__" and statement.args.kwarg:
            return Arguments(tuple(_fields(definition)), others=True)  # transformers passes it what is not a field
    inherited = []
    for name in (ast.unparse(base) for base in definition.bases):
        if name.partition("[")[0] not in WITHOUT_ARGUMENTS:
            base = _of_base(module, name)
            if base is None:
                return None
            inherited.append(base)
    if any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        fields = {name: True for each in inherited for name in each.names} | _fields(definition)
        return Arguments(tuple(name for name, is_argument in fields.items() if is_argument))
    return next((each for each in inherited if each.names or each.others), Arguments(()))


def _of_base(module: str, name: str) -> Arguments | None:
    found = _definition(module, name.split("."))
    return _of_class(found[0], found[1]) if found is not None and isinstance(found[1], ast.ClassDef) else None


def _fields(definition: ast.ClassDef) -> dict[str, bool]:
    """Return the fields of a dataclass, and whether each is an argument."""
    found = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            found[ast.unparse(statement.target)] = "init=False" not in ast.unparse(statement)
    return found


def _of_function(definition: ast.FunctionDef, *, bound: bool) -> Arguments:
    given = definition.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)][bound:]
    return Arguments((*names, *(argument.arg for argument in given.kwonlyargs)), given.kwarg is not None)


def _statements(tree: ast.Module | ast.If | ast.Try) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those inside `if` and `try`."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement)


@cache
def _tree(module: str) -> ast.Module | None:
    source = _source(module)
    try:
        return None if source is None else ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


@cache
def _source(module: str) -> Path | None:
    """Return the source file of a module; None if it cannot be read."""
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    files = [Path(spec.origin)] if spec.origin else []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for name in others:  # by hand: Python's own search imports parent packages
        files = [file for folder in folders for file in (folder / name / "__init__.py", folder / f"{name}.py")]
        folders = [folder / name for folder in folders]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)
