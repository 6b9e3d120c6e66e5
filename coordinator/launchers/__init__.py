"""Starts clusters on engines that own the machines: Slurm, MPI, Kubernetes and Ray."""
