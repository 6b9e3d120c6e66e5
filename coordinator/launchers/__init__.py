"""Starts clusters on engines that own the machines: Slurm and MPI."""
