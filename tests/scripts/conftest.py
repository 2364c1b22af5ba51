"""Fixtures shared by the tests of the scripts."""

import pytest

from tests.helpers.gcloud_stand_in import Cloud


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)
