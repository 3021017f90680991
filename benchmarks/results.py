"""What was measured: one `Group` per comparison, kept as JSON.

The file of a device and a version of JAX is `{"meta": ..., "groups": [...]}`, where a group has
the fields of `Group` and leaves out those that are empty. Times are in seconds, sizes in
bytes. A run adds its groups to a `Results` and saves it after every part; `report` loads it.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import tfgrad_jax

OURS = "tfgrad_jax"


@dataclasses.dataclass
class Group:
    """One comparison: a number for each contestant, and the ratios of ours to the others."""

    section: str
    case: str
    measure: str
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.case, self.measure

    def __post_init__(self) -> None:
        """Add the ratios of numbers that are exact, such as bytes."""
        ours = self.values.get(OURS)
        if ours is not None and not self.ratios:
            others = {name: value for name, value in self.values.items() if name != OURS}
            self.ratios = {
                n: 1.0 if ours == value else ours / value if value else math.inf
                for n, value in others.items()
            }


@dataclasses.dataclass
class Results:
    """All groups of one run."""

    meta: dict[str, Any]
    groups: list[Group]

    @classmethod
    def here(cls, quick: bool) -> "Results":
        device = jax.devices()[0]
        meta = {"device": device.device_kind, "platform": device.platform}
        meta |= {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()}
        meta |= {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
        meta |= {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
        return cls({**meta, "tfgrad_jax": tfgrad_jax.__version__, "quick": quick}, [])

    @property
    def name(self) -> str:
        return f"{self.meta['device'].lower().replace(' ', '-')}-jax{self.meta['jax']}"

    @property
    def label(self) -> str:
        return f"{self.meta['platform'].upper()}, JAX {self.meta['jax']}"

    @property
    def where(self) -> str:
        """When and on what it was measured."""
        run = "Measured on {date}: {processor}, {cores} cores, {system}, Python {python}, JAX {jax}"
        return f"{run}.".format(**self.meta)

    @classmethod
    def load(cls, path: Path) -> "Results":
        data = json.loads(path.read_text())
        return cls(data["meta"], [Group(**group) for group in data["groups"]])

    def save(self, path: Path) -> None:
        """Write a line for each group, so that a diff shows which of them moved."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = [dataclasses.asdict(g).items() for g in self.groups]
        groups = [{k: v for k, v in items if v} for items in fields]
        # Four digits of each number, which are more than any measurement repeats.
        groups = json.loads(json.dumps(groups), parse_float=lambda x: float(f"{float(x):.4g}"))
        lines = ",\n".join(map(json.dumps, groups))
        path.write_text(f'{{"meta": {json.dumps(self.meta)}, "groups": [\n{lines}\n]}}\n')

    def find(self, *key: str | None) -> list[Group]:
        """Return the groups of a section, a case and a measure, where `None` stands for any."""
        wanted = [(i, part) for i, part in enumerate(key) if part is not None]
        return [g for g in self.groups if all(g.key[i] == part for i, part in wanted)]

    def ratio(self, section: str, case: str, measure: str, against: str) -> float | None:
        return next((g.ratios.get(against) for g in self.find(section, case, measure)), None)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
