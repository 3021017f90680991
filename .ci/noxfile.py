"""Sessions that `.ci/run` starts after the README's own test command."""

import pathlib
import zipfile

import nox

nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "docs", "package", "tensorflow", "oldest", "newest"]
ROOT = pathlib.Path(__file__).parent.parent  # nox starts every session in the folder of this file
# What the tests need and every supported JAX has.
TOOLS = [
    "chex", "equinox", "flatbuffers", "hypothesis", "optax", "pytest", "pytest-randomly",
    "pytest-timeout", "pytest-xdist", "sybil",
]  # fmt: skip
# What `tests/interop` needs besides; docs/interop.md names the versions that were tested.
INTEROP = [
    "beartype", "cloudpickle", "dm-haiku", "jaxtyping", "keras", "orbax-checkpoint",
    "tfp-nightly[jax]",
]  # fmt: skip


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    session.chdir(ROOT)
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyrefly", "check")
    session.run("python", "-m", "pytest", "-m", "slow", "tests/test_types.py")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    session.chdir(ROOT)
    session.install("-e", ".[docs,test]")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build")
    session.run("python", "-m", "pytest", "tests/test_site.py")


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build, look into the wheel, and import it where only it is installed.

    `-- FOLDER` keeps what was built.
    """
    session.chdir(ROOT)
    session.install("build", "pyright==1.1.414")
    folder = session.posargs[0] if session.posargs else session.create_tmp()
    out = pathlib.Path(folder).resolve()
    session.run("python", "-m", "build", "--outdir", str(out))
    (wheel,) = out.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    if "tfgrad_jax/py.typed" not in names or any(n.startswith("tests/") for n in names):
        session.error(f"wrong contents: {names}")
    session.install("--force-reinstall", str(wheel))
    with session.chdir(out):
        session.run("python", "-c", "import tfgrad_jax; print(tfgrad_jax.__version__)")
        session.run("pyright", "--verifytypes", "tfgrad_jax", "--ignoreexternal")


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Run on the oldest JAX supported; the README's command has the newest of Python 3.11."""
    session.chdir(ROOT)
    session.install("jax==0.8.0", "jaxlib==0.8.0", "-e", ".", *TOOLS)
    session.run("python", "-m", "pytest", "tests")


@nox.session(python="3.13")
@nox.parametrize("flags", ["0", "1"], ids=["default", "flags"])
def newest(session: nox.Session, flags: str) -> None:
    """Run on the newest JAX of all, also with what it tries out behind flags."""
    session.chdir(ROOT)
    session.install("-e", ".[test]")
    env = {"JAX_CUSTOM_VJP3": flags, "JAX_CUSTOM_JVP3": flags, "JAX_REMAT3": flags}
    session.run("python", "-m", "pytest", "tests", env=env)


@nox.session(python="3.13")
def nightly(session: nox.Session) -> None:
    """Run on a pre-release of JAX, where the package index has one. Not among the default ones."""
    session.chdir(ROOT)
    session.install("-e", ".[test]")
    session.install("--upgrade", "--pre", "jax", "jaxlib")
    session.run("python", "-c", "import jax; print(jax.__version__)")
    session.run("python", "-m", "pytest", "tests")


@nox.session(python="3.11")
def tensorflow(session: nox.Session) -> None:
    """Run the conformance cases on TensorFlow itself."""
    session.chdir(ROOT)
    session.install("-e", ".", "tensorflow", *TOOLS)
    session.run("python", "-m", "pytest", "tests/tf_parity")


@nox.session(python="3.11")
def interop(session: nox.Session) -> None:
    """Run the tests with other libraries, at their current releases.

    Not among the default sessions: TFP on a current JAX is a nightly build.
    """
    session.chdir(ROOT)
    session.install("-e", ".[test]", *INTEROP)
    session.run("python", "-m", "tests.interop")
    session.run("python", "-m", "pytest", "-m", "interop", "tests/interop")
    session.run("python", "-m", "pytest", "tests/test_docs.py")  # none of its pages skipped


@nox.session(python="3.11")
def adopters(session: nox.Session) -> None:
    """Put our decorator where Keras and TFP wrap `jax.custom_gradient`, and run their tests.

    Not among the default sessions: it needs TFP's nightly build, which changes every day.
    """
    session.chdir(ROOT)
    session.install("-e", ".", "keras", "tfp-nightly[jax]", "absl-py", *TOOLS)
    session.run("python", "-m", "tests.adopters", env={"KERAS_BACKEND": "jax"})
