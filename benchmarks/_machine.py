"""The machine on which a time was measured."""

import platform
from pathlib import Path

import torch


def machine_facts() -> dict[str, str]:
    """CPU, cores, threads and versions: printed by every benchmark, since a bare time means nothing."""
    cpuinfo = Path("/proc") / "cpuinfo"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(len(models) or "unknown"),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
