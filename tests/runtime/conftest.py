"""Three nodes, for tests that need no other number."""

from __future__ import annotations

import pytest

from tests.runtime.cluster import Cluster


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 3)
    yield made
    made.close()
