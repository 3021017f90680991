"""What holds before a release: `.github/workflows/release.yml` runs it, and a test.

    python .ci/release.py check v0.3.0              tag, version, changelog and citation agree
    python .ci/release.py notes v0.3.0              the section of the changelog
    python .ci/release.py test dist/*.whl [ARG...]  pytest against the wheel, installed alone
    python .ci/release.py dry-run v0.3.0 [ARG...]   all of it for a local tag; publishes nothing

`test` runs the tests of this checkout in a folder that has no `tfgrad_jax`, so what they import is
what will be published. It needs `uv`; `dry-run` also needs `build`.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
# These look at the repository itself, or take long without saying more about the wheel.
ELSEWHERE = ("docs", "interop", "test_benchmarks.py", "test_packaging.py", "test_types.py")


def version(root: pathlib.Path = ROOT) -> str:
    """Return the version, from its one source."""
    source = (root / "tfgrad_jax" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return found


def notes(tag: str, root: pathlib.Path = ROOT) -> str:
    """Return what the changelog says of a version, "" if it has no section."""
    text = (root / "CHANGELOG.md").read_text()
    _, found, rest = text.partition(f"\n## {tag.removeprefix('v')}\n")
    return rest.partition("\n## ")[0].strip() if found else ""


def problems(tag: str, root: pathlib.Path = ROOT) -> list[str]:
    """Return why a tag must not be released."""
    found, ours = [], version(root)
    (cited,) = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        found.append(f"the tag {tag!r} is no v and version, as in v1.2.3")
    if tag != f"v{ours}":
        found.append(f"the tag is {tag!r}, and `__version__` in tfgrad_jax/__init__.py is {ours!r}")
    if cited != ours:
        found.append(f"`version` in CITATION.cff is {cited!r}; expected {ours!r}")
    if not re.match(r"Released on \d{4}-\d\d-\d\d\.$", notes(tag, root).partition("\n")[0]):
        found.append(f"CHANGELOG.md has no section of {tag} that begins with 'Released on <date>.'")
    return found


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> str:
    print("+", *command, file=sys.stderr)
    return subprocess.run(command, cwd=cwd, check=True, text=True, stdout=subprocess.PIPE).stdout


def test(wheel: pathlib.Path, arguments: Sequence[str] = (), root: pathlib.Path = ROOT) -> None:
    """Run the tests of `root` against a wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tools = [name for name in extras["test"] + extras["examples"] if not name.startswith("tfgrad")]
    with tempfile.TemporaryDirectory() as folder:
        alone = pathlib.Path(folder)
        for name in run("git", "ls-files", cwd=root).splitlines():
            if not name.startswith("tfgrad_jax/") and (root / name).is_file():
                (alone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, alone / name)
        python = alone / ".venv" / "bin" / "python"
        run("uv", "venv", "-q", "-p", sys.executable, ".venv", cwd=alone)
        run("uv", "pip", "install", "-q", "--python", python, wheel.resolve(), *tools, cwd=alone)
        where = run(python, "-c", "import tfgrad_jax; print(tfgrad_jax.__file__)", cwd=alone)
        if "site-packages" not in where:
            raise SystemExit(f"the tests would import {where}")
        ignored = [f"--ignore=tests/{name}" for name in ELSEWHERE]
        command = [python, "-m", "pytest", "-q", *(arguments or ignored)]
        subprocess.run(command, cwd=alone, check=True)  # what it prints is shown at once


def check(tag: str, root: pathlib.Path = ROOT) -> None:
    """End with the reasons where a tag must not be released."""
    if found := problems(tag, root):
        raise SystemExit("\n- ".join([f"{tag} must not be released:", *found]))


def dry_run(tag: str, arguments: Sequence[str]) -> None:
    """Do all that the workflow does before it publishes, with the files of a local tag."""
    with tempfile.TemporaryDirectory() as folder:
        clone, dist = pathlib.Path(folder) / "clone", pathlib.Path(folder) / "dist"
        run("git", "clone", "-q", "--depth", "1", "--branch", tag, f"file://{ROOT}", clone)
        check(tag, clone)
        run(sys.executable, "-m", "build", "--outdir", dist, clone)
        (wheel,) = dist.glob("*.whl")
        test(wheel, arguments, clone)
        print(f"{tag} could be released: {wheel.name}")


def main(command: str, first: str, *rest: str) -> None:
    if command == "check":
        check(first)
    elif command == "notes":
        print(notes(first))
    elif command == "test":
        test(pathlib.Path(first), rest)
    elif command == "dry-run":
        dry_run(first, rest)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
