"""Starts clusters on engines that own the machines: Slurm, MPI, Ray and Spark."""
