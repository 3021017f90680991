"""What was measured: one `Group` per comparison, kept as JSON, printed as a table."""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import jax

from benchmarks.timing import Comparison, Stats

# The names of the contestants, everywhere.
OURS = "tfgrad_jax"
OURS_FORWARD = "tfgrad_jax, forward_mode"
PLAIN = "plain autodiff"
CHECKPOINT = "jax.checkpoint"
UNDECORATED = "undecorated"
HAND = "hand-written"
HAND_EVERY_ORDER = "hand-written, right at every order"
HAND_JVP = "hand-written custom_jvp"
JAX_CUSTOM_GRADIENT = "jax.custom_gradient"
EQUINOX = "equinox.filter_custom_vjp"
NNX = "flax.nnx.custom_vjp"


@dataclasses.dataclass
class Group:
    """One comparison: a number for each contestant, and the ratios of ours to the others."""

    section: str
    case: str
    measure: str
    unit: str  # "s", "bytes", "flops", "GB/s" ...
    values: dict[str, float]
    quartiles: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    samples: int = 1
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    ratio_quartiles: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.case, self.measure

    @classmethod
    def timed(
        cls, section: str, case: str, measure: str, measured: Comparison, note: str = ""
    ) -> "Group":
        def quartiles(stats: dict[str, Stats]) -> dict[str, tuple[float, float]]:
            return {name: (s.q1, s.q3) for name, s in stats.items()}

        return cls(
            section,
            case,
            measure,
            "s",
            {name: s.median for name, s in measured.times.items()},
            quartiles(measured.times),
            max((s.samples for s in measured.times.values()), default=0),
            {name: s.median for name, s in measured.ratios.items()},
            quartiles(measured.ratios),
            measured.failures,
            note,
        )

    @classmethod
    def counted(
        cls,
        section: str,
        case: str,
        measure: str,
        unit: str,
        values: dict[str, float],
        note: str = "",
    ) -> "Group":
        """Make a group of numbers that are exact, such as bytes."""
        ours = values.get(OURS)
        ratios = {}
        if ours is not None:
            for name, value in values.items():
                if name != OURS:
                    ratios[name] = 1.0 if value == ours else ours / value if value else float("inf")
        return cls(section, case, measure, unit, values, ratios=ratios, note=note)


class Results:
    """All groups of one device and version of JAX; a partial run replaces what it measured."""

    def __init__(self, meta: dict[str, Any], groups: list[Group]) -> None:
        self.meta = meta
        self.groups = groups

    @classmethod
    def here(cls, quick: bool) -> "Results":
        device = jax.devices()[0]
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        for name in ("jaxlib", "numpy", "equinox", "flax", "optax", "tensorflow", "torch"):
            try:
                from importlib.metadata import version

                versions[name] = version(name)
            except ImportError:  # PackageNotFoundError
                continue
        meta = {
            "device": device.device_kind,
            "platform": device.platform,
            "processor": _processor(),
            "versions": versions,
            "quick": quick,
        }
        return cls(meta, [])

    @property
    def name(self) -> str:
        device = self.meta["device"].lower().replace(" ", "-")
        return f"{device}-jax{self.meta['versions']['jax']}"

    @classmethod
    def load(cls, path: Path) -> "Results":
        data = json.loads(path.read_text())
        return cls(data["meta"], [Group(**group) for group in data["groups"]])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"meta": self.meta, "groups": [_rounded(g) for g in self.groups]}
        path.write_text(json.dumps(data, indent=1) + "\n")

    def keep(self, earlier: "Results") -> None:
        """Keep what an earlier run measured, until it is measured again."""
        self.groups = earlier.groups
        self.meta["versions"] = earlier.meta["versions"] | self.meta["versions"]

    def add(self, groups: list[Group]) -> None:
        new = {g.key for g in groups}
        self.groups = [g for g in self.groups if g.key not in new] + groups

    def find(
        self, section: str, case: str | None = None, measure: str | None = None
    ) -> list[Group]:
        return [
            g
            for g in self.groups
            if g.section == section and case in (None, g.case) and measure in (None, g.measure)
        ]

    def first(self, section: str, case: str, measure: str) -> Group | None:
        return next(iter(self.find(section, case, measure)), None)


def _rounded(group: Group) -> dict[str, Any]:
    def shorter(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {k: shorter(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [shorter(v) for v in value]
        return value

    fields = dataclasses.asdict(group)
    return {k: shorter(v) for k, v in fields.items() if k == "unit" or v not in ({}, "")}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --- the table ----------------------------------------------------------------------------------


def amount(value: float, unit: str) -> str:
    """Write a number with its unit, three digits long."""
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
            if value >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value * 1e9:.3g} ns"
    if unit in ("bytes", "flops"):
        for scale, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= scale:
                return f"{value / scale:.3g} {name}{'B' if unit == 'bytes' else ''}"
        return f"{value:.0f}{' B' if unit == 'bytes' else ''}"
    return f"{value:.3g} {unit}".rstrip()


def table(group: Group) -> list[str]:
    """Return the lines of one comparison."""
    lines = [f"{group.case} | {group.measure}"]
    for name, value in group.values.items():
        quartiles = group.quartiles.get(name)
        text = f"  {name:<36}{amount(value, group.unit):>12}"
        if quartiles:
            low, high = (amount(q, group.unit) for q in quartiles)
            text += f"  [{low}, {high}]"
        if name in group.ratios:
            text = f"{text:<76}ours / this {group.ratios[name]:.2f}x"
        lines.append(text)
    lines += [f"  {name:<36}{'cannot':>12}  {why}" for name, why in group.failures.items()]
    if group.note:
        lines.append(f"  ({group.note})")
    return lines
