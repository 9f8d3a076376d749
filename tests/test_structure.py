"""The shape of the repository: which folder may import which, and habits that a linter does not know."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cost_models", "passes", "autopar")
MAY_IMPORT = {
    "cost_models": ("autopar.cost_models",),
    "passes": ("autopar.passes", "autopar.cost_models"),
    "autopar": ("autopar",),
}
PRIVATE_TORCH = {"autopar/torch_private.py", "passes/torch_ops.py"}


def source_files(package):
    """Python files of one of the three folders, not of those linked into it."""
    files = (ROOT / package).rglob("*.py")
    linked = (ROOT / "autopar/passes", ROOT / "autopar/cost_models")
    return sorted(f for f in files if not any(f.is_relative_to(link) for link in linked))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


FILES = {name_of(path): ast.parse(path.read_text()) for package in PACKAGES for path in source_files(package)}


def imports(tree):
    """(line, dotted name) of every import of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def dotted(node):
    """``a.b.c`` of an attribute chain, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def test_the_top_folders_are_the_three_packages_tests_and_examples():
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not any(p.match(pattern) for pattern in ignored)}
    assert folders - {".git"} == {*PACKAGES, "tests", "examples", ".ci"}


@pytest.mark.parametrize("package", ["passes", "cost_models"])
def test_the_installed_names_are_links_to_the_top_folders(package):
    link = ROOT / "autopar" / package
    assert link.is_symlink()
    assert link.resolve() == ROOT / package


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    allowed = MAY_IMPORT[file.split("/", maxsplit=1)[0]]
    for line, name in imports(FILES[file]):
        first = name.split(".", maxsplit=1)[0]
        assert first not in {"", "passes", "cost_models", "tests"}, f"{file}:{line} imports {name}"
        if first == "autopar":
            inside = any(name == a or name.startswith(f"{a}.") for a in allowed)
            assert inside, f"{file}:{line} imports {name}; {file} may import {', '.join(allowed)}"


@pytest.mark.parametrize("file", FILES)
def test_importing_does_nothing(file):
    """A module's top level defines; it calls nothing for its effect."""
    body = FILES[file].body
    effects = [n.lineno for n in body[1:] if isinstance(n, ast.Expr)]
    assert not effects, f"{file}: lines {effects} run when the module is imported"


@pytest.mark.parametrize("file", FILES)
def test_no_globals_and_no_environment(file):
    for node in ast.walk(FILES[file]):
        assert not isinstance(node, ast.Global), f"{file}:{node.lineno} writes a global"
        if isinstance(node, ast.Attribute):
            assert dotted(node) not in {"os.environ", "os.getenv", "os.putenv"}, (
                f"{file}:{node.lineno} reads os.environ"
            )


@pytest.mark.parametrize("file", sorted(set(FILES) - PRIVATE_TORCH))
def test_private_torch_names_live_in_two_files(file):
    found = [(line, name) for line, name in imports(FILES[file]) if re.match(r"torch\..*\b_", f"{name}.")]
    for node in ast.walk(FILES[file]):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if re.match(r"torch\.(?!ops\.).*\b_(?!_)", name):
            found.append((node.lineno, name))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".", maxsplit=1)[0] == "torch":
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.startswith("_")]
    assert not found, f"{file} names {found}; private torch names belong in {sorted(PRIVATE_TORCH)}"


def test_declared_dependencies_are_those_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", text)[0] for text in requirements}

    found = {name.split(".")[0] for tree in FILES.values() for _, name in imports(tree)}
    third_party = found - set(sys.stdlib_module_names) - {"autopar"}
    optional = names(project["optional-dependencies"]["hf"])
    assert third_party - optional == names(project["dependencies"])


def test_private_helpers_are_used():
    """A function or class whose name starts with an underscore is called for in its own module."""
    for file, tree in FILES.items():
        defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] == "_"}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not defined - used - {"__getattr__", "__dir__"}, f"{file} never uses {sorted(defined - used)}"


@pytest.mark.slow
def test_distributions_hold_one_package_with_its_data(tmp_path):
    """A wheel built from the checkout and one built from the sdist hold the same files under one top folder."""
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".ci", "*.egg-info"))
    wheel = files_of(build("wheel", checkout))
    shutil.unpack_archive(build("sdist", checkout), unpacked)
    (source,) = unpacked.iterdir()
    assert files_of(build("wheel", source)) == wheel
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"autopar"}
    data = {f"autopar/{name_of(p)}" for p in (ROOT / "cost_models").rglob("*.json")}
    modules = {name if name.startswith("autopar/") else f"autopar/{name}" for name in FILES}
    assert data | modules | {"autopar/py.typed"} <= wheel


def build(kind, folder):
    """Build the project in ``folder`` as pip would; returns the archive."""
    out = folder.parent / f"{folder.name}-{kind}"
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return next(out.iterdir())


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())
