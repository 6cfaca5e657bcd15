"""When moeffn is installed, the tests must exercise that installation, with its compiled module, not the source."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

import moeffn
from moeffn.backends import native


@pytest.fixture
def installed() -> metadata.Distribution:
    """The installed distribution; an in-place run of the source tree has none."""
    for found in metadata.distributions(path=[p for p in sys.path if "site-packages" in p]):
        if found.name == "moeffn":
            return found
    pytest.skip("moeffn is not installed here: the source tree is tested")


def test_the_installed_package_is_the_one_under_test(installed):
    assert Path(moeffn.__file__).resolve() == Path(str(installed.locate_file("moeffn/__init__.py"))).resolve()
    assert installed.version == moeffn.__version__


def test_the_compiled_module_of_the_installation_is_loaded(installed):
    built = [f for f in installed.files or [] if f.name.startswith("_native.")]
    if not built:
        pytest.skip("installed without a C++ compiler")
    assert Path(native.module().__file__).resolve() == Path(str(installed.locate_file(built[0]))).resolve()


def test_data_files_are_installed(installed):
    names = {str(f) for f in installed.files or []}
    assert {"moeffn/accounting/presets.json", "moeffn/integrations/families.csv"} <= names
