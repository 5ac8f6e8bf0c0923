"""What a rank of a scenario is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tools.bench.scenarios import Scenario


@dataclass(frozen=True)
class Spec:
    """What a rank is told, as JSON. ``directory`` is empty; rank 0 leaves ``rows.json`` in it."""

    scenario: Scenario
    rank: int
    directory: str
    scale: float

    def dump(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> Spec:
    data = json.loads(text)
    scenario = data.pop("scenario")
    for name in ("contestants", "measures"):
        scenario[name] = tuple(scenario[name])
    return Spec(Scenario(**scenario), **data)
