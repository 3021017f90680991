"""Keep the README, `pyproject.toml`, the workflows and the sources from drifting apart."""

import ast
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import tfgrad_jax

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)


def test_readme_names_the_supported_versions():
    python = re.fullmatch(r">=(\d+\.\d+)", PROJECT["requires-python"]).group(1)
    assert f"Python {python} or newer" in README
    (dependency,) = PROJECT["dependencies"]
    jax = re.fullmatch(r"jax>=([\d.]+)", dependency).group(1)
    assert f"needs jax {jax} or newer and nothing else" in README
    # So the README's test command runs on the oldest JAX, and no session need install it.
    if sys.version_info[:2] == tuple(map(int, python.split("."))):
        assert importlib.metadata.version("jax") == jax


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


def test_version_changelog_and_citation_agree():
    """A version `.dev0` is that of the next release, and has its section already."""
    number, dev = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev0)?", tfgrad_jax.__version__).groups()
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", number]
    said = release.notes(f"v{number}").partition("\n")[0]
    assert said == "Not released yet." if dev else said.startswith("Released on ")
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == tfgrad_jax.__version__ == release.version()
    assert (ROOT / "tfgrad_jax" / "py.typed").is_file()


@pytest.mark.nightly
def test_a_dry_run_of_a_release_of_a_local_tag(tmp_path):
    """The wheel of a clone is built, installed alone, and tested; a wrong tag is refused."""
    clone, version = tmp_path / "clone", tfgrad_jax.__version__.removesuffix(".dev0")

    def git(*command):
        name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *name, *command], cwd=clone, check=True)

    subprocess.run(["git", "clone", "-q", f"file://{ROOT}", clone], check=True)
    for file in ("tfgrad_jax/__init__.py", "CITATION.cff"):
        text = (clone / file).read_text()
        (clone / file).write_text(text.replace(tfgrad_jax.__version__, version))
    changes = (clone / "CHANGELOG.md").read_text()
    dated = changes.replace("Not released yet.", "Released on 2026-01-02.")
    (clone / "CHANGELOG.md").write_text(dated)
    git("commit", "-qam", "Release")
    git("tag", f"v{version}")
    git("tag", "v9.9.9")
    dry_run = [sys.executable, ".ci/release.py", "dry-run"]
    few = ["-n", "0", "tests/transforms/test_first_of_all.py"]
    ran = subprocess.run([*dry_run, f"v{version}", *few], cwd=clone, capture_output=True, text=True)
    assert f"v{version} could be released" in ran.stdout, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    ran = subprocess.run([*dry_run, "v9.9.9", *few], cwd=clone, capture_output=True, text=True)
    assert ran.returncode and "v9.9.9 must not be released" in ran.stderr


def test_a_vendored_copy_works_under_another_name(tmp_path):
    """`docs/depend.md` says to copy the folder; nothing may import it by its own name."""
    vendor = tmp_path / "a" / "_vendor"
    shutil.copytree(ROOT / "tfgrad_jax", vendor / "tfgrad_jax")
    (vendor / "__init__.py").touch()
    code = """if True:
        import sys
        import jax
        from a._vendor.tfgrad_jax import custom_gradient
        from a._vendor.tfgrad_jax.testing import assert_gradient, check_gradient

        def loss(w, x):
            @custom_gradient
            def f(x):
                return w * x, lambda dy, variables: (7 * dy * w, [5 * dy * x])

            return f(x) ** 2

        print(jax.grad(loss, (0, 1))(2.0, 3.0), jax.jit(jax.grad(loss))(2.0, 3.0))
        print(check_gradient(custom_gradient(lambda x: (x**2, lambda dy: 2 * x * dy)), 3.0).ok)
        print(sorted(name for name in sys.modules if name.partition(".")[0] == "tfgrad_jax"))
    """
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    *numbers, modules = ran.stdout.splitlines()
    assert re.findall(r"Array\(([\d.]+)", numbers[0]) == ["180.", "168."]  # 5 x 2y, 7 w 2y, y = 6
    assert numbers[0].endswith("180.0") and numbers[1] == "True"
    assert modules == "[]"


def test_workflows_call_sessions_that_exist():
    nox = (ROOT / ".ci" / "noxfile.py").read_text()
    sessions = set(re.findall(r"^def (\w+)\(session", nox, re.M)) - {"in_venv", "pytest"}
    called = set()
    for name in ("ci", "nightly", "release", "docs"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        called |= set(re.findall(r"session: (\w+),", text))
        called |= {word for line in re.findall(r" -s ([a-z ]+)", text) for word in line.split()}
    assert called == sessions


def test_nothing_is_published_before_ci_and_the_tests_against_the_wheel():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    needed = re.findall(r"^  (\w+):\n(?:    needs: (\w+)|    uses)", text, re.MULTILINE)
    assert needed == [("ci", ""), ("build", "ci"), ("publish", "build"), ("release", "publish")]
    check, package, test, upload = (
        text.index(s) for s in ("release.py check", "-s package", "release.py test", "name: dist")
    )
    assert check < package < test < upload
