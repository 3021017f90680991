"""The notebooks: they run, and what they show is what their code gives."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.published import is_printed

import tfgrad_jax

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for package in ("equinox", "flax", "ipykernel", "matplotlib", "optax", "sklearn"):
    pytest.importorskip(package)

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager  # noqa: E402
from jupyter_client.manager import AsyncKernelManager  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


class ThisInterpreter(KernelSpecManager):
    """The kernel is the Python that runs the tests, whatever kernels are installed."""

    def get_kernel_spec(self, kernel_name):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def _read(path):
    return nbformat.read(path, as_version=4)


def _execute(path, folder):
    """Return the notebook with the outputs of a run in a fresh kernel."""
    notebook = _read(path)
    manager = AsyncKernelManager(
        kernel_spec_manager=ThisInterpreter(), connection_file=str(folder / "kernel.json")
    )
    client = nbclient.NotebookClient(
        notebook,
        km=manager,
        timeout=300,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    package = str(Path(tfgrad_jax.__file__).parent.parent)  # the kernel tests the same one
    # Figures are shown inline, and JAX calls eager functions with values: the defaults of both.
    changed = {"MPLBACKEND", "JAX_CUSTOM_VJP3"}
    env = {name: value for name, value in os.environ.items() if name not in changed}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    env["IPYTHONDIR"] = str(folder)
    return client.execute(env=env, cleanup_kc=True)


def _code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _printed(cell):
    """Return what a cell prints, and its last value."""
    shown = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
    return "".join(shown)


def _kinds(cell):
    """Return what is shown, without what it is: streams by name, other outputs by MIME type."""
    return [o.get("name") or sorted(o.get("data", [o.output_type])) for o in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_clean(path):
    cells = _code_cells(_read(path))
    for output in (o for cell in cells for o in cell.outputs):
        assert output.output_type != "error"
        assert not re.search(r"/(home|root|tmp|Users|work)/", str(output))


@pytest.mark.docs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_fresh_run_gives_the_stored_outputs(path, tmp_path):
    stored = _code_cells(_read(path))
    fresh = _code_cells(_execute(path, tmp_path))  # raises where a cell raises
    for before, after in zip(stored, fresh, strict=True):
        assert _kinds(before) == _kinds(after)
        assert is_printed(_printed(after), _printed(before))
