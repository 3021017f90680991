"""Keep the README, `pyproject.toml`, the workflows and the sources from drifting apart."""

import ast
import importlib.metadata
import pathlib
import re
import sys
import tomllib

import pytest

import tfgrad_jax

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_readme_names_the_supported_versions():
    python = re.fullmatch(r">=(\d+\.\d+)", PROJECT["requires-python"]).group(1)
    assert f"Python {python} or newer" in README
    (dependency,) = PROJECT["dependencies"]
    jax = re.fullmatch(r"jax>=([\d.]+)", dependency).group(1)
    assert f"needs jax {jax} or newer and nothing else" in README
    # So the README's test command runs on the oldest JAX, and no session need install it.
    if sys.version_info[:2] == tuple(map(int, python.split("."))):
        assert importlib.metadata.version("jax") == jax


def test_links_and_the_main_command_lead_somewhere():
    (main,) = re.findall(r"^python3 -m venv .* (\S+\.py)$", README, re.MULTILINE)
    for target in (main, *re.findall(r"\]\(([^)#:]+)\)", README)):
        assert (ROOT / target).exists(), target


def imports(path):
    """Return the modules that a module of the library imports, by their whole names."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


IMPORTS = {
    path.relative_to(ROOT / "tfgrad_jax").as_posix(): sorted(imports(path))
    for path in (ROOT / "tfgrad_jax").rglob("*.py")
}
GROUPS = "_frontend", "_closure", "_autodiff"
# What the modules of a folder may import, besides each other.
BELOW = {"_jax": set(), "_messages": {"_jax"}, **{group: {"_jax", "_messages"} for group in GROUPS}}
BELOW["_call"] = {"_jax", "_messages", *GROUPS}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_those_below_it_alone(folder):
    modules = {path: names for path, names in IMPORTS.items() if path.startswith(f"{folder}/")}
    assert len(modules) >= 3
    for path, names in modules.items():
        own = {name.split(".")[1] for name in names if name.startswith("tfgrad_jax.")}
        assert own <= {folder} | BELOW[folder], path
        assert "tfgrad_jax" not in names, path


def test_modules_import_what_is_public_in_jax_and_its_interpreters_in_two_places():
    for path, names in IMPORTS.items():
        assert not [name for name in names if name.startswith("jax._src")], path
    inside = {p for p, names in IMPORTS.items() if any("jax.interpreters" in n for n in names)}
    assert inside <= {"_jax/compat.py", "_autodiff/primitives.py"}


def test_the_library_imports_jax_alone():
    names = set().union(*IMPORTS.values())
    known = {*sys.stdlib_module_names, "annotationlib"}  # which Python has from 3.14 on
    others = {name.partition(".")[0] for name in names} - known
    assert others == {"jax", "numpy", "tfgrad_jax"}  # JAX brings NumPy


def test_all_names_what_the_package_exports():
    exported = [name for name in vars(tfgrad_jax) if not name.startswith("_")]
    assert sorted(tfgrad_jax.__all__) == sorted(exported)


def test_version_changelog_and_citation_agree():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tfgrad_jax.__version__)
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", tfgrad_jax.__version__]
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == tfgrad_jax.__version__
    assert (ROOT / "tfgrad_jax" / "py.typed").is_file()


def test_workflows_call_sessions_that_exist():
    nox = (ROOT / ".ci" / "noxfile.py").read_text()
    sessions = set(re.findall(r"^def (\w+)\(session", nox, re.M)) - {"in_venv", "pytest"}
    called = set()
    for name in ("ci", "nightly", "release"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        called |= set(re.findall(r"session: (\w+),", text))
        called |= {word for line in re.findall(r" -s ([a-z ]+)", text) for word in line.split()}
    assert called == sessions


def test_workflows_pin_the_actions_of_others():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    used = [name for text in texts for name in re.findall(r"uses: (.+)", text)]
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", name) for name in used)
