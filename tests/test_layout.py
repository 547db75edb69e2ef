"""The rules about what may import what, and that the architecture page knows every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dyncp

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dyncp"
MODULES = sorted(SOURCE.rglob("*.py"))
NUMPY_ONLY = {"numpy"}
# folder -> the folders of dyncp it may import besides itself; folders that are not named here sit on top of all
ALLOWED = {
    "ir": set(),
    "masks": {"ir"},
    "jit.py": set(),
    "cost": {"ir", "jit"},
    "planner": {"ir", "masks", "jit", "cost"},
    "strategies": {"ir", "masks", "cost", "planner"},
    "simulator": {"ir", "cost"},
    "runtime": {"ir", "jit"},
    "lookahead": {"ir", "masks", "strategies"},
}
# folder -> the packages from outside that it must not import
FORBIDDEN = {
    "masks": {"torch"},
    "cost": {"torch"},
    "simulator": {"torch"},
    "planner": {"torch"},
    "strategies": {"torch"},
    "report": {"torch"},
}


def folder_of(path):
    return path.relative_to(SOURCE).parts[0]


def imports_of(path):
    """The full names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; name the module in full"
            yield node.module
            if node.module == "dyncp":
                yield from (f"dyncp.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    folder = folder_of(path)
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "dyncp":
            target = rest[0] if rest else ""
            allowed = folder not in ALLOWED or target in ALLOWED[folder] | {folder}
            assert allowed or (rest == [] and folder == "lookahead"), f"{folder} must not import {name}"
        else:
            assert top not in FORBIDDEN.get(folder, set()), f"{folder} must not import {top}"
            if folder == "ir":
                assert top in NUMPY_ONLY | sys.stdlib_module_names, f"ir is stdlib and numpy only, but imports {top}"


def test_the_import_rules_see_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from dyncp import planner\n    import torch.nn\n")
    assert list(imports_of(wrong)) == ["dyncp", "dyncp.planner", "torch.nn"]


@pytest.mark.parametrize("name", ["dyncp", "dyncp.strategies", "dyncp.masks", "dyncp.cli", "dyncp.commands.plan"])
def test_planning_does_not_import_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0


def test_every_public_name_is_there():
    for name in dyncp.__all__:
        assert getattr(dyncp, name) is not None
    assert set(dyncp.__all__) <= set(dir(dyncp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dyncp.nothing  # noqa: B018


def test_the_architecture_page_lists_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = [str(path.relative_to(SOURCE)) for path in MODULES if path.name != "__init__.py"]
    missing = [name for name in listed if f"`{name}`" not in page]
    assert not missing, f"docs/architecture.md does not describe {', '.join(missing)}"
    gone = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and ".py`" in line]
    assert not [name for name in gone if not (SOURCE / name).exists()]
