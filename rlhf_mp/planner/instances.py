"""Machines that clouds rent out, and the smallest that a model trains on. No prices: they change by the week."""

from dataclasses import dataclass

from rlhf_mp.planner.capacity import METHODS, spread_job
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.plan import make_plan

PROVIDERS = ("AWS", "GCP", "Azure")


@dataclass(frozen=True)
class Instance:
    """One machine as its provider names and describes it."""

    provider: str
    name: str
    gpu: str
    num_gpus: int


# the providers' pages on GPU machines: EC2 G4/G5/P4/P5, Compute Engine's GPU platforms, Azure's N series
INSTANCES = (
    Instance("AWS", "g4dn.xlarge", "T4", 1),
    Instance("AWS", "g5.2xlarge", "A10G", 1),
    Instance("AWS", "g5.12xlarge", "A10G", 4),
    Instance("AWS", "p4d.24xlarge", "A100-40G", 8),
    Instance("AWS", "p4de.24xlarge", "A100-80G", 8),
    Instance("AWS", "p5.48xlarge", "H100-80G", 8),
    Instance("GCP", "n1-standard-4 + T4", "T4", 1),
    Instance("GCP", "a2-highgpu-1g", "A100-40G", 1),
    Instance("GCP", "a2-highgpu-2g", "A100-40G", 2),
    Instance("GCP", "a2-megagpu-16g", "A100-40G", 16),
    Instance("GCP", "a3-highgpu-8g", "H100-80G", 8),
    Instance("Azure", "NC4as_T4_v3", "T4", 1),
    Instance("Azure", "NC24ads_A100_v4", "A100-80G", 1),
    Instance("Azure", "NC48ads_A100_v4", "A100-80G", 2),
    Instance("Azure", "ND96amsr_A100_v4", "A100-80G", 8),
    Instance("Azure", "ND96isr_H100_v5", "H100-80G", 8),
)


def smallest_instance(shape: ModelShape, method: str, provider: str) -> Instance | None:
    """The machine with the least GPU memory in all that holds supervised training; None: none alone does."""
    own = [instance for instance in INSTANCES if instance.provider == provider]
    for instance in sorted(own, key=lambda i: find_gpu(i.gpu).memory * i.num_gpus):
        if make_plan(spread_job(shape, METHODS[method], find_gpu(instance.gpu), instance.num_gpus)).fits:
            return instance
    return None


def describe_instances(shape: ModelShape) -> str:
    """A table of methods by providers."""
    lines = [f"{'smallest single machine':<24}" + "".join(f"{provider:<34}" for provider in PROVIDERS)]
    for method in METHODS:
        found = (smallest_instance(shape, method, provider) for provider in PROVIDERS)
        cells = (f"{i.name} ({i.num_gpus} x {i.gpu})" if i else "more than one machine" for i in found)
        lines.append(f"{method:<24}" + "".join(f"{cell:<34}" for cell in cells).rstrip())
    return "\n".join(lines)
