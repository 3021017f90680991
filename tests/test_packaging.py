"""Keep the README, `pyproject.toml` and `.ci/run` from drifting apart."""

import pathlib
import re
import tomllib

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


def test_commands_install_extras_and_run_files_that_exist():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        (extra,) = re.findall(r'"\.\[(\w+)\]"', command)
        assert extra in PROJECT["optional-dependencies"]
    assert (ROOT / commands[0].split()[-1]).is_file()


def test_ci_runs_the_command_of_the_readme():
    (pattern,) = re.findall(r"grep -E '([^']+)' README.md", (ROOT / ".ci" / "run").read_text())
    (command,) = re.findall(pattern, README, re.MULTILINE)
    assert command.endswith(".venv/bin/python -m pytest")


def test_readme_is_short_and_shows_code_at_once():
    lines = README.splitlines()
    assert len(lines) < 100
    assert any(line.startswith("@custom_gradient") for line in lines[:12])


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tfgrad_jax.__version__)
    assert (ROOT / "tfgrad_jax" / "py.typed").is_file()
