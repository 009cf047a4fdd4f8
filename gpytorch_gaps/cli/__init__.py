"""The command line: ``gpytorch-gaps fill``, ``inspect`` and ``demo``, or ``python -m gpytorch_gaps``."""
