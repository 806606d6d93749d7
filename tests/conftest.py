"""One thread for the suite and the processes it starts: small tensors gain nothing from two, and where cores are
shared, threads that wait for each other take ten times longer."""

import os

import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
