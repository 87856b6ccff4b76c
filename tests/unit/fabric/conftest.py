from collections.abc import Iterator

import pytest
from fabric_bench import Bench, make_bench


@pytest.fixture(params=["tcp", "two-nics", "copy", "shm", "loopback"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = make_bench(request.param)
    yield made
    made.close()
