"""The work that custom gradients are for: each workload in every way there is to write it."""

from benchmarks.workloads.attention import attention, pallas_pair
from benchmarks.workloads.common import Workload as Workload
from benchmarks.workloads.cross_entropy import cross_entropy
from benchmarks.workloads.elementwise import log1pexp, rmsnorm
from benchmarks.workloads.stacks import DEPTHS, fixed_point, reversible
from benchmarks.workloads.training import digits_step, transformer_step

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        log1pexp(),
        rmsnorm(),
        cross_entropy(),
        *(reversible(depth) for depth in DEPTHS),
        fixed_point(),
        attention(),
        pallas_pair(),
        digits_step(),
        transformer_step(),
    )
}
