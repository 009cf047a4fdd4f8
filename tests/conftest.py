"""One thread a worker: two workers with two threads each thrash on two cores."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
