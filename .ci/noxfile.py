"""What `.ci/run` starts after the README's own test command, and what runs at night.

`lint`, `docs` and `package` work in `.venv`, which that command has made, with the extras `dev` and
`docs`; every other session has an environment of its own. `nox -t nightly` runs the night's.
"""

import datetime
import pathlib
import zipfile

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "docs", "package", "newest", "tensorflow"]
ROOT = pathlib.Path(__file__).parent.parent  # nox starts every session in the folder of this file
BIN = ROOT / ".venv" / "bin"
# What the tests need and every supported JAX has.
TOOLS = [
    "attrs", "chex", "equinox", "flatbuffers", "optax", "pytest", "pytest-randomly",
    "pytest-timeout", "pytest-xdist", "sybil",
]  # fmt: skip
# What `tests/interop` needs besides; docs/interop.md names the versions that were tested.
INTEROP = [
    "beartype", "cloudpickle", "dm-haiku", "jaxtyping", "keras", "lineax", "orbax-checkpoint",
    "tfp-nightly[jax]",
]  # fmt: skip
# The tables that look at the engine; on versions of JAX other than the README's they run alone.
# Each session draws by another seed, so that together they see more.
TABLES = ("autodiff", "closure", "transforms", "test_limits.py")
CORE = [*(f"tests/{name}" for name in TABLES), "--count", "0.3"]
TONIGHT = datetime.date.today().strftime("%Y%m%d")  # a seed: other samples every night


def in_venv(session: nox.Session, program: str, *arguments: str) -> None:
    session.run(str(BIN / program), *arguments, external=True)


def pytest(session: nox.Session, *arguments: str, **env: str) -> None:
    session.run("python", "-m", "pytest", *arguments, env=env)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    session.chdir(ROOT)
    in_venv(session, "ruff", "check", ".")
    in_venv(session, "ruff", "format", "--check", ".")
    in_venv(session, "pyrefly", "check")
    in_venv(session, "python", "-m", "pytest", "-m", "", "tests/test_types.py")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    session.chdir(ROOT)
    in_venv(session, "sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build")
    in_venv(session, "python", "-m", "pytest", "-n", "0", "tests/docs/test_site.py")
    in_venv(session, "python", "-m", "pytest", "-m", "docs", "tests")


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """Build, look into the wheel, import it where only it is installed, and check its types.

    `-- FOLDER` keeps what was built.
    """
    session.chdir(ROOT)
    folder = session.posargs[0] if session.posargs else session.create_tmp()
    out = pathlib.Path(folder).resolve()
    in_venv(session, "python", "-m", "build", "--outdir", str(out))
    (wheel,) = out.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    if "tfgrad_jax/py.typed" not in names or any(n.startswith("tests/") for n in names):
        session.error(f"wrong contents: {names}")
    alone = pathlib.Path(session.create_tmp()).resolve() / "alone"
    python = str(alone / "bin" / "python")
    in_venv(session, "uv", "venv", "-q", "--clear", str(alone))
    in_venv(session, "uv", "pip", "install", "-q", "--python", python, str(wheel))
    with session.chdir(out):
        session.run(python, "-c", "import tfgrad_jax; print(tfgrad_jax.__version__)", external=True)
        options = ["--pythonpath", python, "--verifytypes", "tfgrad_jax", "--ignoreexternal"]
        in_venv(session, "pyright", *options)


@nox.session(python="3.13")
def newest(session: nox.Session) -> None:
    """Run on the newest JAX of all, and of Python 3.13; only there are all tests of meshes."""
    session.chdir(ROOT)
    session.install("-e", ".", *TOOLS, "cloudpickle", "flax")
    pytest(session, *CORE, "tests/devices", "--seed", "2")


@nox.session(python="3.12")
def between(session: nox.Session) -> None:
    """Run on a JAX between the oldest, which the README's command has, and the newest."""
    session.chdir(ROOT)
    session.install("-e", ".", "jax==0.11.*", "jaxlib==0.11.*", *TOOLS, "cloudpickle", "flax")
    pytest(session, *CORE, "--seed", "3")


@nox.session(python="3.13")
def coverage(session: nox.Session) -> None:
    """Say which lines no core table runs, in `.nox/coverage.md`."""
    session.chdir(ROOT)
    session.install("-e", ".", *TOOLS, "cloudpickle", "flax", "pytest-cov")
    shown = ["--cov=tfgrad_jax", "--cov-report=term-missing:skip-covered"]
    pytest(session, *CORE, "tests/frontend", "tests/errors", *shown)
    table = session.run("coverage", "report", "--format=markdown", silent=True)
    (ROOT / ".nox" / "coverage.md").write_text(str(table))


@nox.session(python="3.13", tags=["nightly"])
def flags(session: nox.Session) -> None:
    """Run on what the newest JAX tries out behind flags, and compare JAX's own decorators."""
    session.chdir(ROOT)
    session.install("-e", ".", *TOOLS, "cloudpickle", "flax")
    on = dict.fromkeys(("JAX_CUSTOM_VJP3", "JAX_CUSTOM_JVP3", "JAX_REMAT3"), "1")
    pytest(session, *CORE, "--seed", TONIGHT, **on)
    for env in ({}, on):
        pytest(session, "-m", "nightly", "tests/test_peers.py", **env)


@nox.session(python="3.11", tags=["nightly"])
def tensorflow(session: nox.Session) -> None:
    """Run the parity cases on TensorFlow itself."""
    session.chdir(ROOT)
    session.install("-e", ".", "tensorflow", *TOOLS)
    pytest(session, "tests/tf_parity", "--count", "10")


@nox.session(python="3.11", tags=["nightly"])
def long(session: nox.Session) -> None:
    """Run the tests that take long, larger samples by another seed, 2,000 random programs."""
    session.chdir(ROOT)
    session.install("-e", ".[test]")
    elsewhere = [f"--ignore=tests/{name}" for name in ("adopters", "interop", "tf_parity")]
    pytest(session, "-m", "nightly", "--seed", TONIGHT, "--timeout", "3000", *elsewhere)
    pytest(session, "--seed", TONIGHT, "--count", "5", *elsewhere)


@nox.session(python="3.11", tags=["nightly"])
def interop(session: nox.Session) -> None:
    """Run the tests with other libraries, at their current releases."""
    session.chdir(ROOT)
    session.install("-e", ".[test]", *INTEROP)
    session.run("python", "-m", "tests.interop")
    pytest(session, "-m", "nightly", "tests/interop")
    pytest(session, "-m", "docs", "tests/docs/test_docs.py")  # none of its pages skipped


@nox.session(python="3.11", tags=["nightly"])
def adopters(session: nox.Session) -> None:
    """Put our decorator where Keras and TFP wrap `jax.custom_gradient`, and run their tests."""
    session.chdir(ROOT)
    session.install("-e", ".", "keras", "tfp-nightly[jax]", "absl-py", *TOOLS)
    session.run("python", "-m", "tests.adopters", env={"KERAS_BACKEND": "jax"})


@nox.session(python="3.13", tags=["nightly"])
def prerelease(session: nox.Session) -> None:
    """Run on a pre-release of JAX, where the package index has one."""
    session.chdir(ROOT)
    session.install("-e", ".", *TOOLS, "cloudpickle", "flax")
    session.install("--upgrade", "--pre", "jax", "jaxlib")
    session.run("python", "-c", "import jax; print(jax.__version__)")
    pytest(session, *CORE)
