"""Configurations in one line."""

from collections.abc import Callable

import pytest

from rlhf_mp.config.load import check_layers
from rlhf_mp.errors import Problem


@pytest.fixture
def problems_of() -> Callable[..., dict[str, Problem]]:
    """Problems by key of the defaults changed by ``key=value`` words."""

    def problems(*overrides: str) -> dict[str, Problem]:
        _, found = check_layers([], overrides)
        return {problem.key: problem for problem in found}

    return problems
