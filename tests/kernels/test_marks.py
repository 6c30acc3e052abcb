"""`make test-gpu` selects by the mark `gpu`: no test that uses a GPU goes without it."""

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


def unmarked(source: str) -> list[str]:
    """Tests of a module that use its constant DEVICE, themselves or through its functions, without the mark `gpu`.

    Those that ask for the fixture `device` are marked by it.
    """
    module = ast.parse(source)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    used = {
        name: {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} | {x.arg for x in node.args.args}
        for name, node in functions.items()
    }
    reaching, before = {"DEVICE"}, set()
    while reaching != before:
        before = reaching
        reaching = before | {name for name, names in used.items() if names & before}
    everywhere = any("pytestmark" in ast.unparse(node) and "mark.gpu" in ast.unparse(node) for node in module.body)
    return [
        name
        for name, node in functions.items()
        if name.startswith("test_") and name in reaching and not everywhere
        if not any("mark.gpu" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_uses_a_gpu_is_marked(file):
    source = file.read_text(encoding="utf-8")
    assert unmarked(source) == []
    if file.name != Path(__file__).name:
        assert "skipif" not in source, "the mark gpu(needs=...) decides what is skipped without a GPU"
        assert ".cuda()" not in source or "mark.gpu(needs=" in source


def test_a_test_without_the_mark_is_found():
    source = (
        "DEVICE = 'cuda'\ndef helper():\n    return DEVICE\ndef test_a():\n    helper()\n"
        "@pytest.mark.gpu\ndef test_b():\n    helper()\ndef test_c():\n    pass\n"
    )
    assert unmarked(source) == ["test_a"]
    assert unmarked("pytestmark = pytest.mark.gpu\n" + source) == []
