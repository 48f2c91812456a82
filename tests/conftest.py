"""What every test gets: a cache folder of this run, so that nothing measured on tiny models reaches the user's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode.embedded import cache_folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's converted models stay in reach through a link: they take long to make and are only read."""
    models = cache_folder() / "models"
    folder = tmp_path_factory.mktemp("cache")
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "DRAFTSMITH_CACHE", str(folder))
        yield folder
