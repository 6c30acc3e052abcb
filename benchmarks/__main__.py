"""List the benchmarks and what each measures: `python -m benchmarks`."""

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commands() -> dict[str, str]:
    """Return the runnable modules, each with the first line of its docstring."""
    found = {}
    for file in sorted(HERE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "__main__" in text and file != Path(__file__):
            module = ".".join(file.relative_to(HERE.parent).with_suffix("").parts)
            found[module] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    for module, line in commands().items():
        print(f"python -m {module}\n    {line}")
