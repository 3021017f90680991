"""Mark these tests, and let the libraries be as lenient as their users are."""

import pathlib

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def lenient(as_users_run_it):
    """Run every test of this folder so."""
